"""Tables: what user 0 may see, and what becomes of numbers, categories and missing values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.data import Preparation, from_table
from coterie.data.checking import distinct_targets
from coterie.data.reading import FileForm, read_rows, read_table, users_in
from coterie.data.statistics import Statistics
from coterie.errors import DataError, few_of

COLUMNS: dict[str, Any] = {"user_column": "ward", "target": "ill", "me": "a"}


def visits(seed: int = 0, n: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frames = []
    for k, ward in enumerate("abc"):
        age, colour = rng.normal(50 + 10 * k, 5 + k, n), rng.choice(["red", "green", "blue"], n)
        age[rng.random(n) < 0.2] = np.nan
        frames.append(
            pd.DataFrame(
                {
                    "ward": ward,
                    "row": np.arange(n) + 1000 * k,
                    "age": age,
                    "colour": colour,
                    "ill": rng.choice(["no", "yes"], n, p=[0.6, 0.4]),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def rows_of(task: coterie.data.TableTask, frame: pd.DataFrame) -> dict[str, set[float]]:
    """Find the table's rows behind each part of user 0's examples by the prepared column `row`."""
    prepared = task.preparation.inputs(frame)[:, 0]
    parts = {"training": task.me.examples, "validation": task.me.validation, "test": task.me.test}
    rows: dict[str, set[float]] = {}
    for name, examples in parts.items():
        assert examples is not None
        column = examples.take(torch.arange(len(examples)))[0][:, 0]
        rows[name] = {float(frame["row"].iloc[int((prepared == v).nonzero()[0])]) for v in column}
    return rows


def test_parts_of_user_0_are_disjoint_and_complete_and_stratified() -> None:
    frame = visits()
    task = from_table(frame, features=["row"], **COLUMNS)
    parts = rows_of(task, frame)
    assert [len(parts[p]) for p in ("training", "validation", "test")] == [24, 8, 8]
    assert set.union(*parts.values()) == set(frame.loc[frame.ward == "a", "row"])
    share = (frame.loc[frame.ward == "a", "ill"] == "yes").mean()
    for rows in parts.values():
        mine = (frame.loc[frame["row"].isin(rows), "ill"] == "yes").mean()
        assert mine == pytest.approx(share, abs=1 / len(rows))


def test_numbers_are_filled_centred_and_scaled_as_by_hand_with_user_0s_training_rows() -> None:
    frame = visits()
    task = from_table(frame, features=["row", "age"], **COLUMNS)
    training = frame[frame["row"].isin(rows_of(task, frame)["training"])]
    median = training["age"].median()
    filled = training["age"].fillna(median)
    b = frame[frame.ward == "b"]
    wanted = (b["age"].fillna(median) - filled.mean()) / filled.std(ddof=0)
    inputs = task.peers[0].examples.take(torch.arange(len(b)))[0]
    np.testing.assert_allclose(inputs[:, 1], wanted.clip(-10, 10), rtol=1e-5)
    indicator = training["age"].isna()
    wanted = (b["age"].isna() - indicator.mean()) / indicator.std(ddof=0)
    np.testing.assert_allclose(inputs[:, 2], wanted, rtol=1e-5)


def test_user_0s_inputs_do_not_depend_on_peers_nor_on_what_is_held_out() -> None:
    frame = visits()
    task = from_table(frame, features=["row", "age", "colour"], **COLUMNS)
    held_out = set.union(
        *(rows for part, rows in rows_of(task, frame).items() if part != "training")
    )
    other = frame.copy()
    changed = other["row"].isin(held_out) | (other["ward"] != "a")
    other.loc[changed, "age"] *= 3
    other.loc[changed, "colour"] = "mauve"
    again = from_table(other, features=["row", "age", "colour"], **COLUMNS)
    mine = [t.me.examples.take(torch.arange(len(t.me)))[0] for t in (task, again)]
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)


def test_categories_are_one_hot_missing_is_one_and_unknown_ones_are_zero() -> None:
    frame = pd.DataFrame({"c": ["x", "y", None, "x"]})
    targets = pd.Series([0, 1, 0, 1])
    preparation = Preparation.fit(frame, targets, targets, "classification")
    new = pd.DataFrame({"c": ["y", None, "z"]})
    assert preparation.inputs(new).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]  # (missing), x, y


@pytest.mark.parametrize("other", ["", "7", "1.5", "unknown", "TRUE", "9" * 30], ids=str)
@pytest.mark.parametrize("codes", [["1", "2"], ["1.0", "2.0"], ["01", "02"]], ids=str)
def test_no_row_changes_what_another_is(codes: list[str], other: str, tmp_path: Path) -> None:
    """What pandas makes of a column depends on all its rows; a private site promises that one changes little."""
    fitted = pd.DataFrame({"c": [1, 2, 1]})
    targets = pd.Series([0, 1, 0])
    preparation = Preparation.fit(fitted, targets, targets, "classification", ["c"])
    (tmp_path / "rows.csv").write_text(
        "\n".join(["c,d", *(f"{code},0" for code in (*codes, other))])
    )
    assert preparation.inputs(read_table(tmp_path / "rows.csv")).tolist() == [
        [1, 0],
        [0, 1],
        [0, 0],
    ]


def test_numbers_named_as_categories_are() -> None:
    frame = visits().assign(code=lambda f: np.tile([1, 2], len(f) // 2))
    task = from_table(frame, features=["code"], categorical=["code"], **COLUMNS)
    assert sorted(torch.unique(task.me.examples.take(torch.arange(9))[0]).tolist()) == [0, 1]
    assert task.n_inputs == 2


def test_a_column_that_user_0_has_no_value_of_is_left_out() -> None:
    frame = visits()
    frame["lab"] = np.where(frame["ward"] == "a", np.nan, 7.0)
    task = from_table(frame, **COLUMNS)
    assert "lab" not in task.preparation.numeric + task.preparation.categorical


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["yes", "no"], "classification"),
        ([True, False], "classification"),
        ([0, 1, 2], "classification"),
        ([0.0, 1.0], "classification"),
        (list(range(40)), "regression"),
        ([0.5, 1.5], "regression"),
    ],
)
def test_the_kind_is_told_by_the_target(values: list[Any], kind: str) -> None:
    n = 120
    frame = pd.DataFrame(
        {
            "ward": ["a", "b"] * (n // 2),
            "x": np.arange(n) / 7,
            "ill": np.resize(np.array(values), n),
        }
    )
    if kind == "classification":
        frame["ill"] = np.repeat(frame["ill"].to_numpy()[: n // 2], 2)  # every user has every class
    assert from_table(frame, **COLUMNS).preparation.kind == kind
    if all(isinstance(v, int | float) for v in values):
        assert from_table(frame, kind="regression", **COLUMNS).preparation.kind == "regression"


def test_regression_targets_are_in_user_0s_units_and_predictions_in_the_tables() -> None:
    frame = visits().assign(ill=lambda f: 100 + 35 * np.arange(len(f)) % 211 + 0.5)
    task = from_table(frame, features=["row"], **COLUMNS)
    training = frame[frame["row"].isin(rows_of(task, frame)["training"])]["ill"]
    targets = task.me.examples.take(torch.arange(len(task.me)))[1]
    assert targets.shape == (24, 1)
    assert float(targets.mean()) == pytest.approx(0, abs=1e-5)
    assert float(targets.std(correction=0)) == pytest.approx(1, abs=1e-5)
    back = task.preparation.predictions(task.preparation.targets(training))
    np.testing.assert_allclose(back["prediction"], training, rtol=1e-5)


def test_predictions_name_the_class_and_every_probability() -> None:
    task = from_table(visits(), **COLUMNS)
    predictions = task.preparation.predictions(torch.tensor([[0.0, 0.0], [0.0, np.log(3)]]))
    assert predictions["prediction"].tolist() == ["no", "yes"]
    assert list(predictions) == ["prediction", "probability_no", "probability_yes"]
    np.testing.assert_allclose(predictions["probability_no"], [0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(predictions["probability_yes"], [0.5, 0.75], rtol=1e-6)


def test_csv_parquet_and_dataframe_are_the_same(tmp_path: Path) -> None:
    frame = visits()
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    tasks = [
        from_table(data, **COLUMNS)
        for data in (frame, tmp_path / "t.csv", str(tmp_path / "t.parquet"))
    ]
    for task in tasks[1:]:
        for user, other in zip((tasks[0].me, *tasks[0].peers), (task.me, *task.peers), strict=True):
            assert user.fingerprint() == other.fingerprint()


def test_preparation_comes_back_from_disk(tmp_path: Path) -> None:
    frame = visits()
    task = from_table(frame, **COLUMNS)
    task.preparation.save(tmp_path)
    again = Preparation.load(tmp_path)
    assert torch.equal(again.inputs(frame), task.preparation.inputs(frame))
    assert torch.equal(again.targets(frame["ill"]), task.preparation.targets(frame["ill"]))


def test_preparation_travels_as_text() -> None:
    rows = pd.DataFrame({"age": [3.0, 5.0]})
    preparation = Preparation.fit(rows, pd.Series([1, 0]), pd.Series([1, 0]), "classification")
    assert Preparation.from_plain(json.loads(json.dumps(preparation.to_plain()))).inputs(
        rows
    ).tolist() == [
        [-1],
        [1],
    ]


def test_users_and_their_rows_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    pd.DataFrame({"ward": ["b", "a", "b"], "age": [3, 4, 5]}).to_csv(path)
    assert users_in(path, "ward", FileForm()) == ["b", "a"]
    assert len(read_rows(path, "ward", "b", FileForm())) == 2
    assert few_of(["a", "b", "c"], most=2) == "'a', 'b' and 1 more"
    assert distinct_targets(pd.Series([1, 0, 1]), "auto") == [0, 1]
    assert distinct_targets(pd.Series([0.5, 1.5]), "auto") is None


def test_own_examples_leave_out_and_seed() -> None:
    frame = visits()
    task = from_table(frame, own_examples=10, leave_out=["b"], **COLUMNS)
    assert (len(task.me), [peer.name for peer in task.peers]) == (10, ["c"])
    same, other = (from_table(frame, own_examples=10, seed=seed, **COLUMNS) for seed in (0, 1))
    assert task.me.fingerprint() == same.me.fingerprint() != other.me.fingerprint()


def test_users_may_be_numbers() -> None:
    frame = visits().assign(ward=lambda f: f["ward"].map({"a": 1, "b": 2, "c": 3}))
    assert from_table(frame, user_column="ward", target="ill", me=2).me.name == "2"


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"target": "ail"}, ["'ail'", "'ill'"]),
        ({}, {"user_column": "word"}, ["'word'", "'ward'"]),
        ({}, {"features": ["aeg"]}, ["'aeg'", "'age'"]),
        ({}, {"me": "z"}, ["'z'", "'a', 'b', 'c'"]),
        ({}, {"own_examples": 39}, ["39", "24"]),
        ({}, {"test": 1.5}, ["`test`", "1.5"]),
        ({"ill": None}, {}, ["'ill'", "row 3", "drop the rows"]),
        ({"ward": None}, {}, ["'ward'", "row 3"]),
        ({"age": np.inf}, {}, ["'age'", "infinite"]),
    ],
)
def test_bad_tables_are_named_with_the_remedy(
    change: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    frame = visits()
    for column, value in change.items():
        frame.loc[3, column] = value
    with pytest.raises(DataError) as caught:
        from_table(frame, **{**COLUMNS, **options})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (pd.Timestamp("2020-01-01"), "dates"),
        (pd.Timestamp("2020-01-01", tz="UTC"), "dates"),
        (pd.Timedelta(1), "durations"),
    ],
)
def test_dates_are_refused_also_in_a_file_that_knows_them(
    tmp_path: Path, value: Any, words: str
) -> None:
    frame = visits().assign(when=value)
    frame.to_parquet(tmp_path / "visits.parquet")
    for table in (frame, tmp_path / "visits.parquet"):
        with pytest.raises(DataError, match=f"'when' holds {words}; .* leave it out .`drop`"):
            from_table(table, **COLUMNS)


def test_a_date_in_the_place_of_a_number_is_no_number() -> None:
    preparation = from_table(visits(), **COLUMNS).preparation
    column = preparation.numeric[0]
    with pytest.raises(
        DataError, match=f"column '{column}' should hold numbers, but it is '2020-01-01"
    ):
        preparation.inputs(visits().assign(**{column: pd.Timestamp("2020-01-01")}))


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        from_table(tmp_path / "none.csv", **COLUMNS)
    (tmp_path / "empty.csv").write_text("a,b\n", encoding="utf-8")
    with pytest.raises(DataError, match="no rows"):
        from_table(tmp_path / "empty.csv", **COLUMNS)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as a table"):
        from_table(tmp_path / "bad.parquet", **COLUMNS)


def test_a_table_to_predict_from_must_have_the_columns() -> None:
    task = from_table(visits(), **COLUMNS)
    with pytest.raises(DataError, match="no column 'age'"):
        task.preparation.inputs(visits().drop(columns="age"))


def test_what_training_did_not_see_is_told_and_what_it_saw_is_not() -> None:
    rows = visits()
    preparation = from_table(rows, **COLUMNS, features=["age", "colour"]).preparation
    own = rows[rows["ward"] == "a"]
    assert preparation.unfamiliar(own) == []
    other = own.assign(
        age=own["age"].where(own.index != own.index[0], 1e6),
        colour=own["colour"].where(own["colour"] != "red", "violet"),
    )
    number, category = preparation.unfamiliar(other)
    assert "'age' has 1 of 40" in number
    assert f"'colour' has {(own['colour'] == 'red').sum()} of 40" in category
    assert "'violet'" in category


def test_each_input_comes_from_the_column_that_changes_it() -> None:
    rows = visits()
    everybody = Statistics.of(rows[["colour", "age"]], rows["ill"], "classification").preparation(
        [0, 1]
    )
    alone = from_table(rows, **COLUMNS, features=["age", "row", "colour"]).preparation
    for preparation in (alone, everybody):
        sources = preparation.columns_of_inputs
        assert len(sources) == preparation.n_inputs
        for column in {*preparation.numeric, *preparation.categorical}:
            other = rows.assign(**{column: rows[column].to_numpy()[::-1]})
            changed = (preparation.inputs(rows) != preparation.inputs(other)).any(0).tolist()
            assert {source for source, has in zip(sources, changed, strict=True) if has} == {column}
