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
from tests.support import processes
from tests.support.heart import hospitals
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data import Preparation
from coterie.engines.mutual.processes import LAST_THREAD
from coterie.errors import DataError, FileError
from coterie.recording import files
from coterie.recording.record import Record
from coterie.tables.everyone import FILE
from coterie.tables.predict import predict

RUNNER = CliRunner()
SLOW = pytest.mark.skipif(not os.environ.get("COTERIE_SLOW"), reason="takes seconds: COTERIE_SLOW=1 runs it")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("all")
    table = hospitals(folder / "heart.csv")
    command = ["train", "--data", str(folder / "heart.csv"), "--user-column", "hospital", "--target", "ill"]
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


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=SLOW)], ids=["one table", "a file each"])
def test_processes_of_their_own_train_the_same_models(
    each: bool, trained: tuple[Path, pd.DataFrame], tmp_path: Path
) -> None:
    """Each reads its own rows; what all prepare by, and the folders' names, are those of one process."""
    out, table = trained
    names = list(dict.fromkeys(table["hospital"]))
    data = tmp_path / ("{rank}.csv" if each else "heart.csv")
    for rank, name in enumerate(names):
        _written(table[table["hospital"] == name] if each else table, Path(str(data).format(rank=rank)))
    command = ["train", "--engine", "torch", "--data", str(data), "--user-column", "hospital", "--target", "ill"]
    command += ["--me", "all", "--out", str(tmp_path / "run"), "--steps", "30"]

    def work() -> None:
        result = RUNNER.invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "3 peers" in result.output
        for thread in threading.enumerate():
            if thread.name == LAST_THREAD:  # as the interpreter would at its end
                thread.join()

    assert processes.Started([work] * 4).end(60) == [0] * 4
    for place in files.read_json(out / FILE, "")["folders"].values():
        ours, theirs = (
            torch.load(folder / place / "model.pt", weights_only=True) for folder in (tmp_path / "run", out)
        )
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
        inputs = [Preparation.load(folder / place).inputs(table) for folder in (tmp_path / "run", out)]
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
    by_model = {name: predict(out / place, rows) for name, place in {**places, "pooled": "pooled"}.items()}
    assert any((one["prediction"] != by_model["Bern"]["prediction"]).any() for one in by_model.values())
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
    again = ["train", "--data", str(out.parent / "heart.csv"), "--user-column", "hospital", "--target", "ill"]
    result = RUNNER.invoke(app, [*again, "--me", "all", "--out", str(out), "--steps", "30", "--resume"])
    assert result.exit_code == 0, result.output
    pd.testing.assert_frame_equal(predict(out, table), before)
    about = files.read_json(out / FILE, "")
    for place in ("../elsewhere", "/etc", ".."):
        files.write_json(out / FILE, about | {"folders": {"Bern": place}})
        with pytest.raises(FileError, match="which folders are whose"):
            predict(out, table)
    files.write_json(out / FILE, about)


def test_a_user_who_is_called_all_is_meant(tmp_path: Path) -> None:
    table = hospitals(tmp_path / "heart.csv").replace({"hospital": {"Basel": "all"}})
    path = _written(table, tmp_path / "heart.csv")
    command = ["train", "--data", str(path), "--user-column", "hospital", "--target", "ill", "--me", "all"]
    result = RUNNER.invoke(app, [*command, "--out", str(tmp_path / "run"), "--steps", "5", "--rule", "wga"])
    assert result.exit_code == 0, result.output
    assert Record.load(tmp_path / "run" / "record.jsonl").configuration.me.name == "all"
    assert Preparation.load(tmp_path / "run")


def _written(table: pd.DataFrame, path: Path) -> Path:
    table.to_csv(path, index=False)
    return path
