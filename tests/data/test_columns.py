"""Columns that are not what they seem are refused, with row and value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from coterie.data import from_table
from coterie.data.reading import read_table
from coterie.errors import DataError

N = 420


def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.integers(20, 90, N)
    frame = pd.DataFrame(
        {"hospital": np.resize(["a", "b", "c"], N), "age": age, "dose": rng.normal(5, 1, N)}
    )
    return frame.assign(
        ill=np.where(age + rng.normal(0, 9, N) > 55, "yes", "no"), sex=rng.choice(["f", "m"], N)
    )


def written(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_csv(folder / "patients.csv", index=False)
    return folder / "patients.csv"


def stray(frame: pd.DataFrame, row: int = 69) -> pd.DataFrame:
    """Put a text among the ages: by default in a row of `a`."""
    return frame.astype({"age": object}).assign(
        age=lambda f: [*f.age[:row], "unknown", *f.age[row + 1 :]]
    )


SEEMING: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "a stray text": (
        stray,
        r"column 'age' holds numbers in 139 of 140 rows, but it is 'unknown' in row 69",
    ),
    "decimal commas": (
        lambda frame: frame.assign(dose=frame.dose.map("{:.2f}".format).str.replace(".", ",")),
        "column 'dose' holds numbers with decimal commas: '.,..' in row 0",
    ),
    "some decimal commas": (
        lambda frame: frame.assign(dose=["5,5", "3", "4"] * (N // 3)),
        "decimal commas: '5,5' in row 0",
    ),
    "commas before thousands": (
        lambda frame: frame.assign(cost=["1,234.50", "999", "12,345"] * (N // 3)),
        "column 'cost' holds commas between every three digits: '1,234.50' in row 0 .*; take them out if",
    ),
    "dates": (
        lambda frame: frame.assign(seen=pd.date_range("2020-01-01", periods=N).astype(str)),
        "column 'seen' holds dates as text: '2020-01-01' in row 0",
    ),
    "days": (lambda frame: frame.assign(seen="24.12.2021"), "holds dates as text: '24.12.2021'"),
    "two targets": (
        lambda frame: pd.concat([frame, frame[["ill"]]], axis=1),
        "has 2 columns called 'ill'; rename or drop all but one",
    ),
    "too many categories": (
        lambda frame: pd.concat([frame] * 30, ignore_index=True).assign(
            id=[f"p{i}" for i in range(30 * N)]
        ),
        "column 'id' has 2520 different values, each of which would be an input; leave it out",
    ),
}


@pytest.mark.parametrize("case", SEEMING.values(), ids=SEEMING)
def test_a_column_that_is_not_what_it_seems_is_refused(
    tmp_path: Path, case: tuple[Callable[[pd.DataFrame], pd.DataFrame], str]
) -> None:
    change, words = case
    with pytest.raises(DataError, match=words):
        from_table(
            written(change(patients()), tmp_path), user_column="hospital", target="ill", me="a"
        )
    if words != SEEMING["two targets"][1]:
        with pytest.raises(DataError, match=words):
            from_table(change(patients()), user_column="hospital", target="ill", me="a")


def test_what_is_said_to_be_a_category_is_taken_as_one(tmp_path: Path) -> None:
    path = written(stray(patients()), tmp_path)
    task = from_table(path, user_column="hospital", target="ill", me="a", categorical=["age"])
    assert task.preparation.categorical == ("age", "sex")


def test_rows_that_are_left_out_do_not_turn_numbers_into_text(tmp_path: Path) -> None:
    frame = stray(patients(), 70)
    path = written(frame, tmp_path)
    task = from_table(
        path, user_column="hospital", target="ill", me="a", leave_out=[frame.hospital[70]]
    )
    assert task.preparation.numeric == ("age", "dose")


def test_numbers_as_text_are_told() -> None:
    with pytest.warns(
        UserWarning, match="column 'age' holds numbers as text, which is taken as categories"
    ):
        from_table(patients().astype({"age": str}), user_column="hospital", target="ill", me="a")


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ([f"{v:.3f}".replace(".", ",") for v in range(N)], "auto", "decimal commas"),
        (
            ["x", *np.arange(N - 1) / 7],
            "auto",
            "holds numbers in 419 of 420 rows, but it is 'x' in row 0",
        ),
        (
            ["yes", "no"] * (N // 2),
            "regression",
            "is to be predicted as a number, but it is 'yes' in row 0",
        ),
        (
            [math.inf, *np.arange(N - 1) / 7],
            "auto",
            "is to be predicted as a number, but it is 'inf' in row 0",
        ),
        ([-math.inf, *np.arange(N - 1) / 7], "regression", "but it is '-inf' in row 0"),
        (
            np.arange(N) / 7,
            "classification",
            "has 420 different values in 420 rows, which are no classes",
        ),
        (
            [f"p{i}" for i in range(N)],
            "classification",
            "has 420 different values in 420 rows, which are no classes",
        ),
    ],
)
def test_a_target_that_does_not_fit_its_kind(target: list[object], kind: str, words: str) -> None:
    frame = patients().assign(ill=pd.Series(list(target)))
    with pytest.raises(DataError, match=words):
        from_table(frame, user_column="hospital", target="ill", me="a", kind=kind)  # type: ignore[arg-type]


def test_a_peer_of_one_class_is_left_out_with_a_sentence() -> None:
    frame = patients()
    frame.loc[frame.hospital == "c", "ill"] = "no"
    with pytest.warns(
        UserWarning, match=r"the peer 'c' is left out: its rows are of one class only \('no'\)"
    ):
        task = from_table(frame, user_column="hospital", target="ill", me="a")
    assert [peer.name for peer in task.peers] == ["b"]


def test_a_peer_whose_rows_cannot_be_prepared_is_left_out() -> None:
    frame = patients()
    frame.loc[frame.hospital == "b", "dose"] = math.inf
    with pytest.warns(
        UserWarning,
        match="the peer 'b' is left out: column 'dose' holds an infinite number: 'inf' in row 1 ",
    ):
        task = from_table(frame, user_column="hospital", target="ill", me="a")
    assert [peer.name for peer in task.peers] == ["c"]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_stray_value_of_a_peer_leaves_it_out_and_not_the_whole_run(
    tmp_path: Path, as_file: bool
) -> None:
    """Row 70 is of `b`, row 71 of `c`."""
    frame = stray(patients().assign(y=np.arange(N) / 7), 70).astype({"y": object})
    frame.loc[71, "y"] = "much"
    columns: dict[str, Any] = {"user_column": "hospital", "target": "y", "me": "a"}
    with pytest.warns(UserWarning, match="is left out") as told:
        task = from_table(written(frame, tmp_path) if as_file else frame, drop=["ill"], **columns)
    assert task.peers == ()
    messages = sorted(str(each.message) for each in told)
    assert "peer 'b' is left out: column 'age' should hold numbers, but it is '" in messages[0]
    assert (
        "peer 'c' is left out: column 'y' is to be predicted as a number, but it is 'much' in row 71"
        in messages[1]
    )
    assert task.preparation.numeric == ("age", "dose")
    frame.loc[71, "y"] = None
    with pytest.warns(
        UserWarning,
        match="'c' is left out: column 'y' is NaN or empty in 1 of 140 rows, first row 71",
    ):
        from_table(frame, drop=["ill"], leave_out=["b"], **columns)


@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_seed_splits(seed: int) -> None:
    task = from_table(patients(), user_column="hospital", target="ill", me="a", seed=seed)
    assert len(task.me) == 84


def test_a_good_table_is_taken_without_a_word(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = from_table(
            written(patients(), tmp_path), user_column="hospital", target="ill", me="a"
        )
    assert len(task.peers) == 2
    with pytest.raises(DataError, match="a table must be a DataFrame or the path of a file, got 3"):
        read_table(3)  # type: ignore[arg-type]
