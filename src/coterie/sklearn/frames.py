"""From scikit-learn's X to a table: columns by name, and the group of each row."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from coterie.data.columns import check_names
from coterie.errors import DataError, KnobError, few_of

Array: TypeAlias = np.ndarray[Any, Any]
Column: TypeAlias = str | int
"""A column of X: its name, or its position, from the end where it is negative."""


def table(frame: Any, checked: Array, fitted: Mapping[str, bool] | None = None) -> pd.DataFrame:
    """Return X as a table; the columns of an array are called by their positions.

    A column of an array of objects or texts holds numbers where each of its values is one; after
    `fit`, where it did so then, so that a category or a group called "2" is the same in any rows.

    Args:
        frame: X as it was given.
        checked: the same as an array.
        fitted: the columns that `fit` saw, and whether they were numbers; None in `fit`.

    Example:
        >>> rows = np.array([["Bern", 1.5], ["Basel", None]], dtype=object)
        >>> table(rows, rows).dtypes.astype(str).tolist()[1]
        'float64'
    """
    if isinstance(frame, pd.DataFrame):
        check_names(frame.columns)
        return frame.set_axis(list(fitted or map(str, frame.columns)), axis=1).reset_index(
            drop=True
        )
    names = list(fitted or map(str, range(checked.shape[1])))
    if checked.dtype.kind not in "OSU":
        return pd.DataFrame(checked, columns=names)
    columns = zip(names, checked.T, strict=True)
    numbers = fitted or dict.fromkeys(names, True)
    return pd.DataFrame(
        {name: _numbers_if_all_are(column) if numbers[name] else column for name, column in columns}
    )


def _numbers_if_all_are(values: Array) -> Array:
    try:
        return values.astype(float)
    except (
        ValueError
    ):  # there is text; of what is neither text nor number nothing can be made: a TypeError
        return values.astype(object)


def name_of(argument: str, column: Column, frame: Any, rows: pd.DataFrame) -> str:
    """Return what a column of X is called in the table.

    Example:
        >>> X = np.zeros((3, 2))
        >>> name_of("group", -1, X, table(X, X))
        '1'
    """
    if isinstance(column, str):
        if not isinstance(frame, pd.DataFrame):
            raise KnobError(
                f"`{argument}` is {column!r}, but the columns of X have no names; give a position,"
                ' or let the step before keep names: `set_output(transform="pandas")`'
            )
        if column not in rows.columns:
            raise DataError(
                f"`{argument}` is {column!r}, which X does not have; its columns are"
                f" {few_of(rows.columns)}"
            )
        return column
    try:
        return str(rows.columns[column])
    except (IndexError, TypeError):
        raise KnobError(
            f"`{argument}` must be the name or the position of one of {rows.shape[1]} columns of X,"
            f" got {column!r}"
        ) from None


def unused(name: str, rows: pd.DataFrame) -> str:
    """Return a name that no column has."""
    while name in rows.columns:
        name += "_"
    return name


def groups_in(values: "pd.Series[Any]") -> list[Any]:
    """Return the group of each row; where one is missing, nobody knows whose the row is.

    Example:
        >>> groups_in(pd.Series(["Bern", None], name="hospital"))
        Traceback (most recent call last):
        ...
        coterie.errors.DataError: column 'hospital' is empty in 1 of 2 rows, first row 1 (counting
        from 0); ...
    """
    if (missing := values.isna().to_numpy()).any():
        where = (
            f"{missing.sum()} of {len(values)} rows, first row {int(missing.argmax())} (counting"
            " from 0)"
        )
        raise DataError(
            f"column {values.name!r} is empty in {where}; say of which group each row is"
        )
    return list(values.tolist())


def named(groups: list[Any]) -> tuple[Array, list[str]]:
    """Return the different groups, in the order of the rows, and the name of each row's.

    Example:
        >>> named(["Bern", "Basel", "Bern"])
        (array(['Bern', 'Basel'], dtype='<U5'), ['Bern', 'Basel', 'Bern'])
    """
    different = list(dict.fromkeys(groups))
    names = [str(group) for group in different]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"two groups are both written {name!r}, one as text and one as a number; rename one"
            )
    mixed = len(set(map(type, different))) > 1
    return np.array(different, dtype=object if mixed else None), [str(group) for group in groups]
