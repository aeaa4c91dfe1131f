"""Columns that look as if nothing should be predicted from them: ids, dates, and the target itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.data.preparation import Preparation

if TYPE_CHECKING:
    import pandas as pd

LEAST_ROWS = 20
"""With fewer rows values may all differ, or tell the target, by chance."""
CROWDED = 5
"""Whole numbers that all differ look like ids where so many times as many would fill their range."""
NEARLY_ALL = 0.98
"""The share of the rows whose target a column must tell by itself to look like the target."""
MOST_ROWS = 2000
"""On so many rows at most a column is tried as the only feature."""


def warn_of_suspicious(frame: pd.DataFrame, training: pd.DataFrame, target: str, preparation: Preparation) -> None:
    """Warn of features that look like ids or dates in the table, or like the target in the training rows."""
    features = [*preparation.numeric, *preparation.categorical]
    for column in features:
        looks = looks_like_an_id(frame[column]) or looks_like_a_date(frame[column])
        if looks:
            remedy = f"if it is, leave it out: {_dropping(column)}"
            remedy += (
                f", or carry it along: `ids={column!r}` (`--id {quote(column)}`)" if "id" in looks.split() else ""
            )
            warnings.warn(f"column {column!r} looks like {looks}; {remedy}", stacklevel=3)
    for column, share in leaking(training, target, preparation):
        warnings.warn(
            f"column {column!r} alone tells {target!r} in {share:.0%} of the training rows; if it is known "
            f"afterwards only, leave it out: {_dropping(column)}",
            stacklevel=3,
        )


def _dropping(column: str) -> str:
    return f"`drop=[{column!r}]` (`--drop {quote(column)}`)"


def looks_like_an_id(values: pd.Series[Any]) -> str:
    """Say that a column looks like an id, "" where it does not: no value twice, in text or in crowded numbers.

    Example:
        >>> import pandas as pd
        >>> looks_like_an_id(pd.Series(range(1000, 1100)))
        'an id (100 different values in 100 rows)'
        >>> looks_like_an_id(pd.Series(range(100)) / 7)
        ''
    """
    from pandas.api import types

    there = values.dropna()
    count, different = len(there), there.nunique()
    if count < LEAST_ROWS or types.is_bool_dtype(there):
        return ""
    if types.is_numeric_dtype(there):
        crowded = bool((there % 1 == 0).all()) and float(there.max() - there.min()) < CROWDED * count
        suspicious = different == count and crowded
    else:
        suspicious = different > count / 2
    return f"an id ({different} different values in {count} rows)" if suspicious else ""


def looks_like_a_date(values: pd.Series[Any]) -> str:
    """Say that a column of numbers looks like dates, as 20240131 or as seconds since 1970; "" where it does not.

    Example:
        >>> import pandas as pd
        >>> looks_like_a_date(pd.Series([20240131, 20231224, 20231101]))
        'dates (20240131)'
    """
    import pandas as pd
    from pandas.api import types

    there = values.dropna()
    if not len(there) or not types.is_numeric_dtype(there) or types.is_bool_dtype(there) or (there % 1 != 0).any():
        return ""
    days = there.between(19000101, 21001231)
    as_days = days.all() and pd.to_datetime(there.astype("int64").astype(str), errors="coerce").notna().all()
    seconds = there.between(5e8, 4e9).all() or there.between(5e11, 4e12).all()  # or milliseconds
    return f"dates ({there.iloc[0]:.0f})" if as_days or (seconds and there.nunique() > 1) else ""


def leaking(training: pd.DataFrame, target: str, preparation: Preparation) -> Iterator[tuple[str, float]]:
    """Yield the columns that tell the target by themselves, with the share of the rows in which they do.

    A small tree sees one column of the other rows, in five folds. Of numbers the share is that of their variance.
    """
    from sklearn.model_selection import cross_val_predict
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = training.sample(min(len(training), MOST_ROWS), random_state=0)
    truth = preparation.targets(rows[target]).numpy().ravel()
    classes = preparation.kind == "classification"
    counts = np.unique(truth, return_counts=True)[1]
    if len(rows) < LEAST_ROWS or len(counts) < 2 or (classes and counts.min() < 5):
        return
    tree = (DecisionTreeClassifier if classes else DecisionTreeRegressor)(min_samples_leaf=2, random_state=0)
    base = counts.max() / len(truth) if classes else 0.0
    for column in (*preparation.numeric, *preparation.categorical):
        codes = rows[[column]]
        if column in preparation.categorical:
            codes = codes.astype(str).apply(lambda values: values.astype("category").cat.codes)
        told = cross_val_predict(tree, codes.to_numpy(dtype=float), truth, cv=5)
        share = np.mean(told == truth) if classes else 1 - np.mean((told - truth) ** 2) / np.var(truth)
        if share >= NEARLY_ALL and 1 - share < (1 - base) / 4:
            yield column, float(share)
