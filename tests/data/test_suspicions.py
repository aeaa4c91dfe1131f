"""Columns that look like ids, dates or the target are told; others are not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest

from coterie.data import from_table
from coterie.data.checking import looks_like_a_date, looks_like_an_id

N = 300
RANDOM = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {"user_column": "hospital", "target": "ill", "me": "a"}


def patients() -> pd.DataFrame:
    age = RANDOM.integers(20, 90, N)
    frame = pd.DataFrame(
        {"hospital": np.resize(["a", "b"], N), "age": age, "dose": RANDOM.normal(5, 1, N)}
    )
    return frame.assign(
        ill=np.where(age + RANDOM.normal(0, 9, N) > 55, "yes", "no"),
        sex=RANDOM.choice(["f", "m"], N),
    )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.arange(N), True),
        (RANDOM.permutation(N) + 50_000, True),
        ([f"P-{i:04d}" for i in range(N)], True),
        (RANDOM.normal(size=N), False),
        (RANDOM.integers(20, 90, N), False),
        (RANDOM.choice(10**7, N, replace=False), False),  # an income, say
        (RANDOM.choice(["f", "m"], N), False),
        (np.arange(N) % 2 == 0, False),
        (np.arange(9), False),
    ],
)
def test_what_looks_like_an_id(values: Any, found: bool) -> None:
    assert bool(looks_like_an_id(pd.Series(values))) is found


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([20240131, 20231224], True),
        ([20240131, 20241399], False),  # no such month
        ([1_700_000_000, 1_600_000_000], True),
        ([1_700_000_000_000, 1_600_000_000_000], True),
        ([1999, 2004], False),  # a year is a number to predict from
        ([0.5, 20240131.0], False),
        (["a", "b"], False),
        ([True, False], False),
    ],
)
def test_what_looks_like_a_date(values: Any, found: bool) -> None:
    assert bool(looks_like_a_date(pd.Series(values))) is found


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            {"patient": np.arange(N)},
            r"'patient' looks like an id \(300 different values in 300 rows\); .*`--id patient`",
        ),
        (
            {"seen": 20240100 + np.arange(N) % 28 + 1},
            r"'seen' looks like dates \(20240101\); .*`--drop seen`",
        ),
        (
            {"discharge": "of the ill"},
            "column 'discharge' alone tells 'ill' in 100% of the training rows",
        ),
        ({"score": "a number"}, "column 'score' alone tells 'ill' in 100%"),
    ],
)
def test_a_suspicious_column_is_told_with_the_remedy_which_helps(
    column: dict[str, Any], words: str
) -> None:
    frame = patients()
    ill = frame["ill"] == "yes"
    made: dict[str, Any] = {
        "of the ill": np.where(ill, "ward", "home"),
        "a number": ill * 5 + RANDOM.normal(size=N) / 10,
    }
    name, values = next(iter(column.items()))
    frame[name] = made[values] if isinstance(values, str) else values
    with pytest.warns(UserWarning, match=words):
        from_table(frame, **COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = from_table(frame, drop=[name], **COLUMNS)
    assert name not in task.preparation.numeric + task.preparation.categorical


def test_a_number_that_is_the_target_in_other_units_is_told() -> None:
    frame = patients().assign(grams=lambda f: 1000 * f["dose"])
    with pytest.warns(UserWarning, match="column 'grams' alone tells 'dose'"):
        from_table(frame, **{**COLUMNS, "target": "dose"})
