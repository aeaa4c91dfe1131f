"""`coterie train --me all`: a model for each user in one folder, one page, and one `predict` that sends rows on."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
import torch.utils.tensorboard.writer
from click.testing import Result
from tests.support import processes
from tests.support.heart import hospitals
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data import Preparation
from coterie.engines.processes.processes import LAST_THREAD
from coterie.errors import DataError, FileError
from coterie.everyone.folders import folder_names
from coterie.recording import files
from coterie.recording.record import Record
from coterie.tables.predict import FILE, predict

RUNNER = CliRunner()
SLOW = pytest.mark.skipif(
    not os.environ.get("COTERIE_SLOW"), reason="takes seconds: COTERIE_SLOW=1 runs it"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("all")
    table = hospitals(folder / "heart.csv")
    command = [
        "train",
        "--data",
        str(folder / "heart.csv"),
        "--user-column",
        "hospital",
        "--target",
        "ill",
    ]
    options = ["--me", "all", "--out", str(folder / "run"), "--steps", "30"]
    result = RUNNER.invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "Of 4 users" in result.output
    return folder / "run", table


def test_every_user_has_a_model_a_record_and_a_page(trained: tuple[Path, pd.DataFrame]) -> None:
    out, table = trained
    places = files.read_json(out / FILE, "")["folders"]
    assert set(places) == set(table["hospital"])
    index = (out / "index.html").read_text(encoding="utf-8")
    inputs = []
    for name, place in places.items():
        record = Record.load(out / place / "record.jsonl")
        assert record.configuration.me.name == name
        assert record.end.verdict in (out / place / "index.html").read_text(encoding="utf-8")
        assert f'href="{place}/index.html"' in index
        inputs.append(Preparation.load(out / place).inputs(table))
    assert all(torch.equal(inputs[0], others) for others in inputs)  # one preparation for all


def test_where_alone_is_served_to_all_no_sentence_says_that_it_is_not_known(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    signs = np.repeat([1.0, -1.0], 80)  # two users who learn the opposite
    x = rng.normal(size=160)
    table = pd.DataFrame(
        {"who": np.repeat(["a", "b"], 80), "x": x, "y": signs * x + 0.1 * rng.normal(size=160)}
    )
    command = [
        "train",
        "--data",
        str(_written(table, tmp_path / "t.csv")),
        "--user-column",
        "who",
        "--target",
        "y",
    ]
    result = RUNNER.invoke(
        app,
        [*command, "--me", "all", "--out", str(tmp_path / "run"), "--rule", "wga", "--steps", "40"],
    )
    assert "Of 2 users: 2 served a model trained alone." in result.output, result.output
    assert result.output.count("nobody") == 2  # whom they listen to
    index = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert (
        "The model trained alone is served to everybody: there is no difference to show." in index
    )


@pytest.mark.parametrize(
    "each", [False, pytest.param(True, marks=SLOW)], ids=["one table", "a file each"]
)
def test_processes_of_their_own_train_the_same_models(
    each: bool, trained: tuple[Path, pd.DataFrame], tmp_path: Path
) -> None:
    """Each reads its own rows; what all prepare by, and the folders' names, are those of one process."""
    out, table = trained
    names = list(dict.fromkeys(table["hospital"]))
    data = tmp_path / ("{rank}.csv" if each else "heart.csv")
    for rank, name in enumerate(names):
        _written(
            table[table["hospital"] == name] if each else table, Path(str(data).format(rank=rank))
        )
    command = [
        "train",
        "--engine",
        "torch",
        "--data",
        str(data),
        "--user-column",
        "hospital",
        "--target",
        "ill",
    ]
    command += ["--me", "all", "--out", str(tmp_path / "run"), "--steps", "30"]

    def work() -> None:
        result = RUNNER.invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "3 peers" in result.output
        for thread in threading.enumerate():
            if thread.name == LAST_THREAD:  # as the interpreter would at its end
                thread.join()

    assert processes.Started([work] * 4).end() == [0] * 4
    for place in files.read_json(out / FILE, "")["folders"].values():
        ours, theirs = (
            torch.load(folder / place / "model.pt", weights_only=True)
            for folder in (tmp_path / "run", out)
        )
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
        inputs = [
            Preparation.load(folder / place).inputs(table) for folder in (tmp_path / "run", out)
        ]
        assert torch.equal(*inputs)
        assert Record.load(tmp_path / "run" / place / "record.jsonl").end.left_out == {}


def test_rows_go_to_the_model_of_their_user_and_strangers_to_the_pooled_one(
    trained: tuple[Path, pd.DataFrame],
) -> None:
    out, table = trained
    rows = table.drop(columns="ill").iloc[::-1].copy()
    rows.iloc[3, 0], rows.iloc[7, 0], rows.iloc[8, 0] = "Davos", np.nan, np.nan
    found = RUNNER.invoke(app, ["predict", str(out), str(_written(rows, out.parent / "new.csv"))])
    assert found.exit_code == 0, found.output
    said = "3 of the rows go to the pooled model: 1 of users without a model ('Davos'), 2 whose 'hospital' is empty"
    assert said in " ".join(found.stderr.split())
    routed = pd.read_csv(io.StringIO(found.stdout))
    places = files.read_json(out / FILE, "")["folders"]
    by_model = {
        name: predict(out / place, rows) for name, place in {**places, "pooled": "pooled"}.items()
    }
    assert any(
        (one["prediction"] != by_model["Bern"]["prediction"]).any() for one in by_model.values()
    )
    for row, name in enumerate(rows["hospital"]):
        whose = name if name in places else "pooled"
        assert routed["model"][row] == whose
        assert routed["prediction"][row] == by_model[whose]["prediction"][row]
    assert (routed["model"] == "pooled").sum() == 3
    with pytest.raises(DataError, match="no column 'hospital'"):
        predict(out, rows.drop(columns="hospital"))


def test_a_folder_that_is_resumed_stays_as_it_is_and_a_planted_path_is_refused(
    trained: tuple[Path, pd.DataFrame],
) -> None:
    out, table = trained
    before = predict(out, table)
    answers = predict(out, table, coverage=0.9)  # each by the scores of its user's model
    assert list(answers.columns)[1] in {"set", "lower"}
    again = [
        "train",
        "--data",
        str(out.parent / "heart.csv"),
        "--user-column",
        "hospital",
        "--target",
        "ill",
    ]
    result = RUNNER.invoke(
        app, [*again, "--me", "all", "--out", str(out), "--steps", "30", "--resume"]
    )
    assert result.exit_code == 0, result.output
    pd.testing.assert_frame_equal(predict(out, table), before)
    pd.testing.assert_frame_equal(predict(out, table, coverage=0.9), answers)
    about = files.read_json(out / FILE, "")
    for place in ("../elsewhere", "/etc", ".."):
        files.write_json(out / FILE, about | {"folders": {"Bern": place}})
        with pytest.raises(FileError, match="which folders are whose"):
            predict(out, table)
    files.write_json(out / FILE, about)


def test_a_user_who_is_called_all_is_meant(tmp_path: Path) -> None:
    table = hospitals(tmp_path / "heart.csv").replace({"hospital": {"Basel": "all"}})
    path = _written(table, tmp_path / "heart.csv")
    command = [
        "train",
        "--data",
        str(path),
        "--user-column",
        "hospital",
        "--target",
        "ill",
        "--me",
        "all",
    ]
    result = RUNNER.invoke(
        app, [*command, "--out", str(tmp_path / "run"), "--steps", "5", "--rule", "wga"]
    )
    assert result.exit_code == 0, result.output
    assert Record.load(tmp_path / "run" / "record.jsonl").configuration.me.name == "all"
    assert Preparation.load(tmp_path / "run")


def test_users_with_numbers_for_names_are_found_where_one_field_is_empty(tmp_path: Path) -> None:
    table = hospitals(tmp_path / "heart.csv")
    table["hospital"] = pd.factorize(table["hospital"])[0] + 1
    few, one_class = (
        table.iloc[:2].assign(hospital=77),
        table.iloc[:30].assign(hospital=88, ill=table["ill"].iloc[0]),
    )
    path = _written(pd.concat([table, few, one_class]), tmp_path / "heart.csv")
    out, command = (
        tmp_path / "run",
        ["train", "--data", str(path), "--user-column", "hospital", "--target", "ill"],
    )
    command += ["--me", "all", "--out", str(out), "--steps", "5", "--rule", "wga"]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    index = (out / "index.html").read_text(encoding="utf-8")
    assert "77: left out: " in index  # not only in a warning, which nobody keeps
    assert "88: left out: " in index
    rows = table.astype({"hospital": float}).drop(columns="ill").iloc[:6].copy()
    rows.iloc[2, 0] = np.nan
    with pytest.warns(
        UserWarning, match="1 of the rows go to the pooled model: 1 whose 'hospital' is empty"
    ):
        found = predict(out, pd.read_csv(_written(rows, tmp_path / "new.csv")))
    whose = ["pooled" if np.isnan(each) else str(int(each)) for each in rows["hospital"]]
    assert found["model"].tolist() == whose
    with pytest.raises(DataError, match="no rows to predict for"):
        predict(out, rows.iloc[:0])
    refused = RUNNER.invoke(app, [*command, "--resume", "--tau", "1=1"])
    assert "`--tau` weighs the peers of one user" in " ".join(refused.stderr.split())


def test_names_are_read_as_they_are_written_and_a_table_is_told_of_once(tmp_path: Path) -> None:
    """In a column of numbers alone 001 would be 1, and beside one name 001 again."""
    table = hospitals(tmp_path / "heart.csv")
    names = dict(
        zip(dict.fromkeys(table["hospital"]), ("001", "002", "pooled", "004"), strict=True)
    )
    table = table.assign(hospital=table["hospital"].map(names), ward="north")
    numbered = _written(table[table["hospital"] != "pooled"], tmp_path / "numbered.csv")
    command = [
        "train",
        "--user-column",
        "hospital",
        "--target",
        "ill",
        "--me",
        "all",
        "--steps",
        "2",
        "--rule",
        "wga",
    ]
    for data in (numbered, _written(table, tmp_path / "heart.csv")):
        out = tmp_path / data.stem
        assert RUNNER.invoke(app, [*command, "--data", str(data), "--out", str(out)]).exit_code == 0
        places = files.read_json(out / FILE, "")["folders"]
        assert set(places) == set(pd.read_csv(data, dtype=str)["hospital"])
        rows = table.groupby("hospital").head(2).drop(columns="ill").assign(ward="south")
        rows = pd.concat([rows, rows.iloc[:1].assign(hospital="X9")])
        result = _piped(["predict", str(out)], rows)
        of_all = "pooled (all users)" if "pooled" in places else "pooled"
        wanted = [name if name in places else of_all for name in rows["hospital"]]
        assert pd.read_csv(io.StringIO(result.stdout), dtype=str)["model"].tolist() == wanted
        assert result.stderr.count(f"column 'ward' has {len(rows)} of {len(rows)} values that") == 1


def _piped(command: list[str], rows: pd.DataFrame) -> Result:
    """Run a command whose last argument is a pipe that holds a table."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        rows.to_csv(pipe, index=False)
    try:
        return RUNNER.invoke(app, [*command, f"/dev/fd/{reading}"])
    finally:
        os.close(reading)


def test_a_column_of_ids_is_not_written_over(tmp_path: Path) -> None:
    table = hospitals(tmp_path / "heart.csv")
    path = _written(table.assign(model=range(len(table))), tmp_path / "heart.csv")
    command = [
        "train",
        "--data",
        str(path),
        "--user-column",
        "hospital",
        "--target",
        "ill",
        "--id",
        "model",
    ]
    refused = RUNNER.invoke(
        app, [*command, "--me", "all", "--out", str(tmp_path / "run"), "--steps", "5"]
    )
    assert refused.exit_code == 2
    assert "names 'model', the column that says whose model made a prediction" in " ".join(
        refused.stderr.split()
    )


def test_models_that_are_of_no_use_end_the_command_with_their_names(tmp_path: Path) -> None:
    table = hospitals(tmp_path / "heart.csv")
    command = [
        "train",
        "--data",
        str(tmp_path / "heart.csv"),
        "--user-column",
        "hospital",
        "--target",
        "ill",
    ]
    command += ["--me", "all", "--out", str(tmp_path / "run"), "--steps", "5", "--lr", "3e37"]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert "are not finite: do not use those models" in said
    places = folder_names(list(table["hospital"].unique()))
    ended = {
        name: Record.load(tmp_path / "run" / place).end.stopped for name, place in places.items()
    }
    assert any(ended.values())
    assert {name for name in ended if repr(name) in said} == {
        name for name, why in ended.items() if why
    }


def _written(table: pd.DataFrame, path: Path) -> Path:
    table.to_csv(path, index=False)
    return path
