"""Files as they come: a file for each user, no header, signs for unknown values, dates, free text."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data import Preparation, from_table, read_table, users_from_table
from coterie.data.columns import with_dates
from coterie.errors import DataError

COLUMNS: dict[str, Any] = {"user_column": "ward", "target": "ill", "me": "a"}


def visits(n: int = 90, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 9, n).round(3)
    seen = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D")
    return pd.DataFrame(
        {"ward": np.resize(["a", "b", "c"], n), "age": age, "seen": seen.strftime("%Y-%m-%d")}
    ).assign(ill=np.where(age + rng.normal(0, 9, n) > 50, "yes", "no"))


def files(folder: Path) -> str:
    """Write a file for each ward, without header, with signs for what is unknown."""
    for ward, rows in visits().groupby("ward"):
        some = rows.drop(columns="ward").astype({"age": object})
        some.iloc[0, 0], some.iloc[1, 0] = "?", -9
        some.to_csv(folder / f"ward.{ward}.data", index=False, header=False)
    return str(folder / "ward.{user}.data")


def test_a_file_for_each_user_without_header_is_read_by_command_and_function(
    tmp_path: Path,
) -> None:
    data, form = files(tmp_path), {"header": "age,seen,ill", "na_values": "?,-9"}
    table = read_table(data, user_column="ward", **form)
    assert list(table) == ["age", "seen", "ill", "ward"]
    assert table["ward"].tolist() == ["a"] * 30 + ["b"] * 30 + ["c"] * 30
    assert table.index.is_unique
    unknown = table["age"].isna()
    assert table.index[unknown].tolist() == [0, 1, 30, 31, 60, 61]
    np.testing.assert_array_equal(
        table["age"][~unknown],
        visits().sort_values("ward", kind="stable")["age"].to_numpy()[~unknown],
    )
    same = read_table(
        data, user_column="ward", header=["age", "seen", "ill"], na_values=["?", "-9"]
    )
    pd.testing.assert_frame_equal(table, same)
    words = ["train", "--data", data, "--user-column", "ward", "--target", "ill", "--me", "b"]
    words += ["--header", form["header"], "--na-values", "?,-9", "--dates", "seen"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    visits().drop(columns=["ill", "ward"]).head(3).to_csv(
        tmp_path / "new.dat", index=False, header=False
    )
    new = ["predict", str(tmp_path / "run"), str(tmp_path / "new.dat"), "--header", "age,seen"]
    told = CliRunner().invoke(app, new)
    assert told.exit_code == 0, told.output
    assert len(told.stdout.splitlines()) == 4


def test_what_is_wrong_with_such_files_is_said_with_the_remedy(tmp_path: Path) -> None:
    data = files(tmp_path)
    for options, words in (
        ({"header": "age,ill"}, "`header` names 2 columns, but .* has 3 in its first line"),
        ({"header": "age,age,ill"}, "`header` has 2 columns called 'age'"),
        ({"na_values": 3}, "`na_values` must be texts, in a list or between commas, got 3"),
    ):
        with pytest.raises(DataError, match=words):
            read_table(data, user_column="ward", **options)
    with pytest.raises(DataError, match=r"`user_column` must name their column"):
        read_table(data)
    with pytest.raises(DataError, match=r"there is no file .*whatever stands for {user}"):
        read_table(str(tmp_path / "{user}.csv"), user_column="ward")
    with pytest.raises(
        DataError, match=r"has a column 'age', and {user} says whose its rows are too"
    ):
        read_table(data, user_column="age", header="age,seen,ill")
    with pytest.raises(DataError, match="`na_values` is for CSV files, and this is a DataFrame"):
        from_table(visits(), **COLUMNS, na_values="?")
    one = tmp_path / "one.csv"
    read_table(data, user_column="ward", header="age,seen,ill").to_csv(one, index=False)
    with pytest.raises(
        DataError, match=r"or where .* unknown say `na_values='\?'` \(`--na-values '\?'`\)"
    ):
        from_table(one, **COLUMNS, dates=["seen"])
    one.write_text("63.0,1.0,1.0\n67.0,1.0,4.0\n")
    with pytest.raises(DataError, match=r"the first line is data: .* `header` \(`--header a,b"):
        read_table(one)


def test_dates_become_year_month_weekday_and_days_as_the_calendar_says(tmp_path: Path) -> None:
    days = [dt.date(2019, 12, 31), dt.date(2024, 2, 29), dt.date(1969, 7, 20)]
    for form in ("%Y-%m-%d", "%d.%m.%Y", "%Y%m%d", "%Y-%m-%d 23:59:59"):
        table = with_dates(
            pd.DataFrame({"day": [*[d.strftime(form) for d in days], None]}), ["day"]
        )
        for row, day in zip(table.to_dict("records"), days, strict=False):
            assert row["day (year)"] == day.year
            assert (row["day (month)"], row["day (weekday)"]) == (f"{day:%B}", f"{day:%A}")
            assert row["day (days)"] == (day - dt.date(1970, 1, 1)).days
        assert table.iloc[3, 1:].isna().all()
    task = from_table(visits(), **COLUMNS, dates=["seen"])
    assert task.preparation.numeric == ("age", "seen (year)", "seen (days)")
    task.preparation.save(tmp_path)
    again = Preparation.load(tmp_path)
    assert torch.equal(again.inputs(visits()), task.preparation.inputs(visits()))
    everyone = users_from_table(visits(), user_column="ward", target="ill", dates=["seen"])
    assert everyone.preparation.dates == ("seen",)
    with pytest.raises(
        DataError, match=r"predict from their parts: `dates=\['seen'\]` \(`--dates seen`"
    ):
        from_table(visits(), **COLUMNS)
    with pytest.raises(DataError, match="'seen' should hold dates, but it is '3/4/2024' in row 3 "):
        from_table(
            visits().assign(seen=lambda f: f["seen"].where(f.index != 3, "3/4/2024")),
            **COLUMNS,
            dates=["seen"],
        )


def test_a_peers_bad_date_leaves_out_the_peer_only() -> None:
    table = visits()
    table.loc[1, "seen"] = "soon"
    with pytest.warns(
        UserWarning, match="the peer 'b' is left out: column 'seen' should hold dates"
    ):
        task = from_table(table, **COLUMNS, dates=["seen"])
    assert [peer.name for peer in task.peers] == ["c"]


def test_free_text_is_refused_with_advice_and_short_text_is_not() -> None:
    rng = np.random.default_rng(0)
    words = np.array(["pain", "in", "the", "left", "knee", "since", "may"])
    note = [" ".join(rng.permutation(words)) for _ in range(90)]
    with pytest.raises(DataError, match="column 'note' holds free text, of 7 words in the mean"):
        from_table(visits().drop(columns="seen").assign(note=note), **COLUMNS)
    diagnosis = np.resize(["pain in the left knee", "a broken arm, left side"], 90)
    task = from_table(visits().drop(columns="seen").assign(note=diagnosis), **COLUMNS)
    assert task.preparation.categorical == ("note",)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    table = visits().drop(columns="seen")
    for options, words in (
        ({"user_column": "Wards"}, "no column 'Wards'; it has .*; did you mean 'ward'"),
        ({"drop": ["agee"]}, "no column 'agee'; it has .*; did you mean 'age'"),
        ({"target": "il"}, "did you mean 'ill'"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(table, **(COLUMNS | options))
    named = table.replace({"ward": {"b": "Geneva"}})
    with pytest.raises(DataError, match=r"names no user: .*got 'Genf'; did you mean 'Geneva'"):
        from_table(named, **(COLUMNS | {"me": "Genf"}))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--rule", "adaptiv"], "did you mean 'adaptive'?"),
        (["--rule", "fedprx"], "did you mean 'fedprox'?"),
        (["--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["--rule", "wga", "--knob", "alhpa=0.1"], "did you mean 'alpha'?"),
        (["--model", "liner"], "did you mean 'linear'?"),
        (["--taget", "x"], "'--target'"),
    ],
)
def test_the_command_answers_a_wrong_word_with_the_right_one(
    tmp_path: Path, words: list[str], hint: str
) -> None:
    visits().drop(columns="seen").to_csv(tmp_path / "t.csv", index=False)
    given = ["--data", str(tmp_path / "t.csv"), "--user-column", "ward", "--target", "ill"]
    result = CliRunner().invoke(
        app, ["train", *given, "--me", "a", "--out", str(tmp_path / "run"), *words]
    )
    assert result.exit_code == 2
    assert hint in " ".join(result.output.split())
