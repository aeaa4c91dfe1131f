"""Columns that may not be what they seem.

Numbers with a stray text, decimal commas, dates, numbers as classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from coterie.errors import DataError, did_you_mean

MOST = 0.5
"""Text of which more than this share are numbers, or dates, is no text by intention."""
WORDS, LEAST_TEXTS = 4, 20
"""From so many words in the mean on, and so many rows, text that mostly differs is free text."""
MAX_CATEGORIES = 1000
"""A column with more different texts in user 0's training rows is refused.

Each would be an input of the model.
"""
MAX_CLASSES = 20
"""A target of whole numbers with more distinct values than this means regression."""

THOUSANDS = r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?"
COMMA = r"[-+]?\d{1,3}(?:[. ]?\d{3})*,\d+"
DATE = r"(?:\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4})(?:[ T].*)?"
DECIMALS = "say `decimal=','` (`--decimal ,`)"
AS_CATEGORIES = "or name it in `categorical`"
AS_DATES = "`dates=[{!r}]` (`--dates {}`)"
AS_CLASSES = 'or say `kind="classification"` (`--kind classification`)'


def check_names(columns: Iterable[object], where: str = "the table") -> None:
    """Refuse two columns of one name."""
    names = list(map(str, columns))
    for name in names:
        if names.count(name) > 1:
            remedy = "rename or drop all but one"
            if not any(any(map(str.isalpha, each)) for each in names):
                remedy = "the first line is data: name the columns with `header` (`--header a,b,…`)"
            raise DataError(f"{where} has {names.count(name)} columns called {name!r}; {remedy}")


def as_category(value: object) -> str:
    """Return a category as text: a number is the same one however it is written.

    What pandas makes of 1 depends on the other rows: 1.0 where one of them is empty, "1" as it is
    written where one is text. But a row must not change what others are.

    Example:
        >>> [as_category(value) for value in (1, 1.0, "1", "01", "1.50", True, "TRUE", "a")]
        ['1', '1', '1', '1', '1.5', 'True', 'True', 'a']
    """
    text = str(value)
    if text.lower() in ("true", "false"):
        return text.capitalize()
    try:
        number = float(text)
    except ValueError:
        return text
    if "_" in text:  # which Python takes for a part of a number
        return text
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def weights_in(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """Return how much each row counts, by a column of numbers that are at least 0 and not all 0."""
    if column not in rows.columns:
        raise DataError(
            f"the table has no column {column!r}, which says how much a row counts"
            f"{did_you_mean(column, rows.columns)}"
        )
    weights = pd.to_numeric(rows[column], errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        value, where = rows[column].tolist()[int(bad.argmax())], rows.index[int(bad.argmax())]
        problem = (
            f"column {column!r} holds weights, but it is {value!r} in row {where} (counting from 0)"
        )
        raise DataError(f"{problem}; a weight is a number, at least 0")
    if not weights.any():
        raise DataError(f"column {column!r} gives no row any weight; let some be above 0")
    return weights


def with_numbers(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the rows of a file that are kept.

    What was text because of other rows only is numbers again.

    Dates stay dates, which `pd.to_numeric` would take for nanoseconds.
    """
    changed = {}
    for column in columns:
        if not types.is_numeric_dtype(frame[column]) and frame[column].dtype.kind not in "mM":
            numbers = pd.to_numeric(frame[column], errors="coerce")
            if numbers.notna().any() and (numbers.notna() == frame[column].notna()).all():
                changed[column] = numbers
    return frame.assign(**changed)


def parts_of_dates(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the features that columns of dates become.

    Example:
        >>> parts_of_dates(["seen"])
        ('seen (year)', 'seen (month)', 'seen (weekday)', 'seen (days)')
    """
    parts = ("year", "month", "weekday", "days")
    return tuple(f"{column} ({part})" for column in columns for part in parts)


def with_dates(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Add to columns of dates the year and the days since 1970, numbers, and month and weekday, text.

    A date is a text such as 2024-01-31 or 31.1.2024, a number such as 20240131, or a date already.

    Example:
        >>> import pandas as pd
        >>> with_dates(pd.DataFrame({"seen": ["1970-01-02", None]}), ["seen"]).iloc[0, 2:].tolist()
        ['January', 'Friday', np.float64(1.0)]
    """
    parts: dict[str, Any] = {}
    for column in columns:
        values, text = frame[column], frame[column].astype(str).str.strip()
        days = text.str.split("[ T]").str[0].str.removesuffix(".0")
        read = [
            pd.to_datetime(days, format=form, errors="coerce")
            for form in ("%Y-%m-%d", "%d.%m.%Y", "%Y%m%d")
        ]
        moments = read[0].fillna(read[1]).fillna(read[2])
        if (bad := (moments.isna() & values.notna()).to_numpy()).any():
            raise DataError(
                f"column {column!r} should hold dates, but it is {first_in(values, bad)}; write"
                " dates as 2024-01-31, 31.1.2024 or 20240131, and leave the unknown ones empty"
            )
        since = (moments - pd.Timestamp(0)) / pd.Timedelta(days=1)
        each = moments.dt.year, moments.dt.month_name(), moments.dt.day_name(), since
        parts |= dict(zip(parts_of_dates([column]), each, strict=True))
    return frame.assign(**parts)


def check_features(
    frame: pd.DataFrame, columns: Sequence[str], categorical: Sequence[str] = ()
) -> None:
    """Refuse columns of text that are mostly numbers or dates, unless they are said to be categories."""
    for column in columns:
        if column not in categorical:
            _check_text(frame[column], AS_CATEGORIES)


def check_target(target: pd.Series[Any], kind: str) -> None:
    """Refuse a target that does not fit its kind, or that may be of either."""
    if kind == "auto":
        _check_text(target, AS_CLASSES)
    is_number = types.is_numeric_dtype(target) and not types.is_bool_dtype(target)
    if kind == "regression" or (kind == "auto" and is_number):
        check_numbers(target)
    different = target.nunique()
    fractions = is_number and bool((target % 1 != 0).any())
    if (
        kind == "classification"
        and different > MAX_CLASSES
        and (fractions or different > len(target) / 2)
    ):
        raise DataError(
            f"column {target.name!r} has {different} different values in {len(target)} rows, which"
            ' are no classes; say `kind="regression"` (`--kind regression`), or name another'
            " target"
        )


def check_numbers(target: pd.Series[Any]) -> None:
    """Refuse a target that is not all finite numbers."""
    bad = ~np.isfinite(pd.to_numeric(target, errors="coerce").to_numpy(dtype=float))
    if bad.any():
        raise DataError(
            f"column {target.name!r} is to be predicted as a number, but it is"
            f" {first_in(target, bad)}; correct it, drop the row, {AS_CLASSES}"
        )


def _check_text(values: pd.Series[Any], otherwise: str) -> None:
    """Refuse text that is mostly numbers or dates, and tell of numbers that are written as text."""
    if (
        not (types.is_object_dtype(values) or types.is_string_dtype(values))
        or not values.notna().any()
    ):
        return
    there = values.notna().to_numpy()
    text = values.where(there, "").astype(str).str.strip()
    numbers = pd.to_numeric(text.where(there), errors="coerce").notna().to_numpy()
    commas, dates = (
        text.str.fullmatch(pattern).to_numpy(dtype=bool) & there for pattern in (COMMA, DATE)
    )
    count, about = int(there.sum()), f"column {values.name!r}"
    thousands = text.str.fullmatch(THOUSANDS).to_numpy(dtype=bool) & there
    if numbers.sum() == count:
        warning = (
            f"{about} holds numbers as text, which is taken as categories; turn it into numbers,"
            f" {otherwise}"
        )
        warnings.warn(warning, stacklevel=4)
    elif thousands.any() and (thousands | numbers).sum() == count:
        problem = f"{about} holds commas between every three digits: {first_in(values, thousands)}"
        remedy = f"take them out if they part thousands, {DECIMALS} if decimals follow"
        raise DataError(f"{problem}; {remedy}, {otherwise}")
    elif commas.sum() > MOST * count or (commas.any() and (commas | numbers).sum() == count):
        problem = f"{about} holds numbers with decimal commas: {first_in(values, commas)}"
        raise DataError(f"{problem}; {DECIMALS}, write them with points, {otherwise}")
    elif dates.sum() > MOST * count:
        problem = f"{about} holds dates as text: {first_in(values, dates)}"
        parts = AS_DATES.format(values.name, quote(str(values.name)))
        remedy = f"predict from their parts: {parts}, leave the column out (`drop`)"
        raise DataError(f"{problem}; {remedy}, {otherwise}")
    elif numbers.sum() > MOST * count:
        stray = first_in(values, there & ~numbers)
        problem = f"{about} holds numbers in {numbers.sum()} of {count} rows, but it is {stray}"
        text_at = str(values[there & ~numbers].iloc[0])
        unknown = f"or where the value is unknown say `na_values={text_at!r}` "
        unknown += f"(`--na-values {quote(text_at)}`)"
        raise DataError(f"{problem}; correct it, leave it empty, {unknown}, {otherwise}")
    elif count >= LEAST_TEXTS and text[there].nunique() > MOST * count:
        words = text[there].str.count(r"\S+")
        if words.mean() >= WORDS:
            problem = f"{about} holds free text, of {words.mean():.0f} words in the mean: "
            problem += first_in(values, there)
            raise DataError(
                f"{problem}; leave the column out (`drop`), put numbers in its place (a count, a"
                f" score, an embedding), {otherwise}"
            )


def first_in(values: pd.Series[Any], which: np.ndarray[Any, Any]) -> str:
    """Say what stands in the first of some rows of a column."""
    place = int(which.argmax())
    return f"{str(values.iloc[place])[:40]!r} in row {values.index[place]} (counting from 0)"
