"""All users of a table: one preparation from sums and counts is the one that scikit-learn fits to all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from coterie.data import Preparation, from_table, users_from_table
from coterie.data.preparation import tidy
from coterie.data.statistics import Statistics
from coterie.errors import DataError


def clinics(n: int = 120) -> pd.DataFrame:
    """Return rows of three clinics, who miss different values and know different categories."""
    rng = np.random.default_rng(5)
    who = np.resize(["a", "b", "b", "c"], n)
    age = np.where(rng.random(n) < 0.2, np.nan, rng.normal(60, 9, n))
    stage = pd.Series(np.where(who == "a", "I", "II")).mask((who != "a") & (rng.random(n) < 0.5))
    pressure = np.where(who == "c", np.nan, rng.normal(120, 30, n))
    table = pd.DataFrame(
        {"who": who, "age": age, "stage": stage, "pressure": pressure, "nothing": np.nan}
    )
    return table.assign(
        dose=rng.integers(0, 3, n), ill=rng.integers(0, 2, n), cost=rng.normal(1000, 50, n)
    )


COLUMNS: dict[str, Any] = {
    "user_column": "who",
    "target": "ill",
    "features": ["age", "stage", "pressure", "nothing", "dose"],
}


def test_added_up_it_is_what_is_fitted_to_all_rows_together() -> None:
    table = clinics()
    numeric, other = ("age", "pressure"), ("stage", "dose")
    columns = [*numeric, *other, "nothing"]
    parts = [rows for _, rows in table.groupby("who")]
    told = [Statistics.of(rows[columns], rows["cost"], "regression", ["dose"]) for rows in parts]
    ours = (told[0] + told[1] + told[2]).preparation()
    neat = tidy(table, numeric, other)
    filled = make_pipeline(SimpleImputer(strategy="mean", add_indicator=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    theirs = np.hstack(
        [filled.fit_transform(neat[[*numeric]]), one_hot.fit_transform(neat[[*other]])]
    )
    assert (ours.numeric, ours.categorical) == (numeric, other)
    assert ours.n_inputs == len(ours.columns_of_inputs) == theirs.shape[1]
    np.testing.assert_allclose(ours.inputs(table), theirs.clip(-10, 10), atol=1e-6)
    assert (ours.centre, ours.scale) == pytest.approx(
        (table["cost"].mean(), table["cost"].std(ddof=0))
    )
    again = Preparation.from_plain(ours.to_plain())
    assert torch.equal(again.inputs(table), ours.inputs(table))


def test_everybody_has_the_splits_of_its_own_run_and_the_same_inputs() -> None:
    everybody = users_from_table(clinics(), **COLUMNS)
    assert {user.name for user in everybody.users} == {"a", "b", "c"}
    for user in everybody.users:
        one = from_table(clinics(), me=user.name, preparation=everybody.preparation, **COLUMNS).me
        for mine, theirs in (
            (user.examples, one.examples),
            (user.test, one.test),
            (user.validation, one.validation),
        ):
            assert mine is not None
            assert theirs is not None
            pair = (part.take(torch.arange(len(part))) for part in (mine, theirs))
            assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def test_test_rows_say_nothing() -> None:
    """What is held out does not move the preparation."""
    table = clinics()
    before = users_from_table(table, **COLUMNS)
    held_out = set(range(len(table)))
    for user in before.users:
        inputs = before.preparation.inputs(table)
        kept = user.examples.take(torch.arange(len(user)))[0]
        held_out -= {i for i in range(len(table)) if (kept == inputs[i]).all(1).any()}
    changed = table.copy()
    changed.loc[sorted(held_out), "age"] = 1e6
    after = users_from_table(changed, **COLUMNS)
    assert torch.equal(
        before.users[0].examples.take(torch.arange(5))[0],
        after.users[0].examples.take(torch.arange(5))[0],
    )


def test_own_examples_are_at_most_and_who_cannot_learn_is_left_out() -> None:
    table = pd.concat([clinics(), clinics(3).assign(who="tiny")])
    with pytest.warns(UserWarning, match="'tiny' is left out: 'tiny' has 3 rows, but 4 are needed"):
        found = users_from_table(table, own_examples=25, **COLUMNS)
    assert {user.name: len(user) for user in found.users} == {"a": 18, "b": 25, "c": 18}
    assert "tiny" in found.left_out
    with pytest.raises(
        DataError, match=r"nobody can learn from this table; 'tiny': 'tiny' has 3 rows"
    ):
        users_from_table(table[table["who"] == "tiny"], **COLUMNS)


def test_without_test_rows_all_others_are_trained_on() -> None:
    table = clinics()
    for user in users_from_table(table, test=0, **COLUMNS).users:
        rows = int((table["who"] == user.name).sum())
        assert user.test is None
        assert user.validation is not None
        assert len(user) + len(user.validation) == rows
        assert len(user.validation) == round(0.2 * rows)
    with pytest.raises(DataError, match="`test` must be above 0 and below 1, got 1"):
        users_from_table(table, test=1, **COLUMNS)


def test_columns_that_do_not_fit_together() -> None:
    numbers, text = pd.DataFrame({"x": [1.0, 2.0]}), pd.DataFrame({"x": ["a", "b"]})
    targets = pd.Series([0, 1])
    one = Statistics.of(numbers, targets, "classification")
    with pytest.raises(DataError, match="numbers for one user and text for another"):
        one + Statistics.of(text, targets, "classification")
    with pytest.raises(DataError, match="not all users have the column 'x'"):
        one + Statistics.of(numbers.rename(columns={"x": "y"}), targets, "classification")


def test_of_many_who_cannot_learn_some_are_told() -> None:
    """As where the column of users is one of measurements."""
    frame = pd.DataFrame(
        {"who": np.arange(300) / 7, "x": np.arange(300) % 11, "ill": np.arange(300) % 2}
    )
    with pytest.raises(DataError, match=r"nobody can learn .*; and so on, for 297 more$"):
        users_from_table(frame, user_column="who", target="ill")
