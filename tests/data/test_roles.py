"""What columns are for: features, ids, weights; and files that are written in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from coterie.data import Preparation, from_table, users_from_table
from coterie.errors import DataError

COLUMNS: dict[str, Any] = {"user_column": "ward", "target": "ill", "me": "a"}


def visits(n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"ward": np.resize(["a", "b"], n), "age": rng.normal(50, 9, n), "dose": rng.normal(5, 1, n)}
    )
    frame["patient"] = [f"p{i}" for i in range(n)]
    return frame.assign(
        count=np.resize([1.0, 2.5, 0.0], n),
        ill=np.where(frame["age"] + rng.normal(9, 3, n) > 55, "yes", "no"),
    )


def test_features_drop_ids_and_weights_say_what_is_predicted_from() -> None:
    said: dict[str, Any] = {"ids": "patient", "weights": "count"}
    assert from_table(visits(), **COLUMNS, **said).preparation.numeric == ("age", "dose")
    assert from_table(visits(), **COLUMNS, **said, drop=["age"]).preparation.numeric == ("dose",)
    assert from_table(visits(), **COLUMNS, **said, features=["age"]).preparation.numeric == ("age",)
    for options, words in (
        ({"features": ["age", "ill"]}, "`features` names 'ill', which is the `target`"),
        ({"drop": ["ward"]}, "`drop` names 'ward', which is the `user_column`"),
        (
            {"features": ["age"], "drop": ["dose"]},
            "`drop` names 'dose', which is not among `features`",
        ),
        (
            {"categorical": ["dose"], "drop": ["dose"]},
            "`categorical` names 'dose', which is no feature",
        ),
        ({"ids": "ward"}, "`user_column` and `ids` name the same column, 'ward'"),
        (
            {"ids": "prediction"},
            "`ids` names 'prediction', which is the name of a column of the predictions; rename it",
        ),
        ({"ids": "probability_a"}, "`ids` names 'probability_a', which is the name"),
        ({"weights": "size"}, "the table has no column 'size'"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(visits().assign(prediction=0, probability_a=0), **{**COLUMNS, **options})


def test_users_whose_rows_have_no_weight_where_it_counts_are_left_out_by_name() -> None:
    frame = pd.DataFrame(
        {"who": list("abcd" * 20), "x": np.arange(80.0) % 7, "y": np.arange(80) // 4 % 2, "w": 1.0}
    )
    frame.loc[frame["who"] == "b", "w"] = 0
    # one row of twenty is too few: those of weight 0 are not there
    frame.loc[frame.index[frame["who"] == "c"][1:], "w"] = 0
    frame.loc[frame.index[frame["who"] == "d"][3], "w"] = -1
    said: dict[str, Any] = {"user_column": "who", "target": "y", "weights": "w"}
    with pytest.warns(UserWarning, match="the user '[bcd]' is left out: "):
        table = users_from_table(frame, **said)
    assert [user.name for user in table.users] == ["a"]
    assert table.left_out["b"] == "column 'w' gives no row any weight; let some be above 0"
    few = "has 1 row, but 4 are needed: 2 for training, the others held out; add rows, or take"
    few += " the pooled model of `--me all`"
    assert table.left_out["c"] == f"'c' {few}"
    assert "it is -1.0 in row 15 " in table.left_out["d"]
    with pytest.raises(DataError, match=f"user 0 {few}"):
        from_table(frame, **said, me="c")


def test_weights_go_with_their_rows(tmp_path: Path) -> None:
    frame = visits()
    task = from_table(frame, **COLUMNS, weights="count", ids="patient")
    task.preparation.save(tmp_path)
    theirs = frame[(frame.ward == "b") & (frame["count"] > 0)]  # a row of weight 0 is not there
    targets = task.peers[0].examples.take(torch.arange(len(task.peers[0].examples)))[1]
    torch.testing.assert_close(
        targets["weight"], torch.tensor(theirs["count"].to_numpy(), dtype=torch.float32)
    )
    loaded = Preparation.load(tmp_path)
    torch.testing.assert_close(loaded.examples(theirs, "ill")[1]["weight"], targets["weight"])  # type: ignore[index]
    assert (loaded.ids, loaded.weights) == ("patient", "count")


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, "much"])
def test_a_weight_that_is_none_is_refused_and_a_peers_leaves_it_out(value: Any) -> None:
    for row, me in ((0, "a"), (1, "b")):
        frame = visits().astype({"count": object})
        frame.loc[row, "count"] = value
        with pytest.raises(
            DataError, match=f"column 'count' holds weights, but it is .* in row {row} "
        ):
            from_table(frame, **{**COLUMNS, "me": me}, weights="count", ids="patient")
    with pytest.warns(UserWarning, match="the peer 'b' is left out: column 'count' holds weights"):
        from_table(frame, **COLUMNS, weights="count", ids="patient")


def test_a_file_with_semicolons_and_decimal_commas_is_the_same_table(tmp_path: Path) -> None:
    frame = visits()
    frame.to_csv(tmp_path / "plain.csv", index=False)
    frame.to_csv(tmp_path / "commas.csv", index=False, sep=";", decimal=",")
    frame.to_csv(tmp_path / "tabs.csv", index=False, sep="\t")
    forms: dict[str, dict[str, str]] = {
        "plain": {},
        "commas": {"sep": ";", "decimal": ","},
        "tabs": {"sep": "tab"},
    }
    tasks = [
        from_table(tmp_path / f"{name}.csv", drop=["patient"], **COLUMNS, **form)  # type: ignore[arg-type]
        for name, form in forms.items()
    ]
    assert len({task.me.fingerprint() for task in tasks}) == 1
    with pytest.raises(
        DataError,
        match=r"has one column, .*; if ';' is between columns, say `sep=';'` .`--sep ';'`",
    ):
        from_table(tmp_path / "commas.csv", **COLUMNS)
    with pytest.raises(DataError, match=r"`sep='tab'` .`--sep tab`"):
        from_table(tmp_path / "tabs.csv", **COLUMNS)


def test_the_split_has_the_sizes_asked_for_and_the_test_rows_are_kept() -> None:
    task = from_table(visits(), **COLUMNS, drop=["patient"], validation=0.1, test=0.5)
    assert task.me.validation is not None
    assert task.me.test is not None
    assert (len(task.me), len(task.me.validation), len(task.me.test)) == (12, 3, 15)
    inputs = task.me.test.take(torch.arange(15))[0]
    torch.testing.assert_close(task.preparation.inputs(task.test_rows), inputs)
    assert "patient" in task.test_rows
