"""Running the benchmark: every cell once, in one process or several, and nothing finished is lost."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.support.folders import claimed_elsewhere
from typer.testing import CliRunner

from coterie import benchmark
from coterie.benchmark.sets import SETS
from coterie.benchmark.tuning import Tuning
from coterie.cli import app
from coterie.errors import FileError, KnobError
from coterie.rules import Alone

RUNNER = CliRunner()


SMALL = [
    "bench",
    "--sets",
    "digits",
    "--methods",
    "wga-0.3,pooled",
    "--conditions",
    "honest,stranger",
]
SMALL += ["--users", "2", "--steps", "3"]


def results(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "results.parquet").drop(columns="seconds")


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "serial"
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_a_row_for_every_set_condition_user_seed_and_method(serial: Path) -> None:
    frame = results(serial)
    assert len(frame) == 2 * 2 * 4
    assert not frame.duplicated(["set", "model", "condition", "user", "seed", "method"]).any()
    written = json.loads((serial / "results.json").read_text(encoding="utf-8"))
    pd.testing.assert_frame_equal(pd.DataFrame(written["rows"]).drop(columns="seconds"), frame)
    assert written["settings"]["steps"] == 3
    page = (serial / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "Condition: stranger" in page
    assert "<script" not in page


def test_resuming_measures_only_what_is_missing_and_gives_the_same_table(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again"
    store = benchmark.Store(out, 3)
    selection = benchmark.Selection(["digits"], ["wga-0.3"], ["stranger"], None, 1, 1)
    cells = list(selection.cells(None))
    assert [cell.method for cell in cells] == ["alone", "sklearn-alone", "wga-0.3"]
    for _ in benchmark.measure_cells(cells[2:], selection, store, None):
        pass
    before = {path: path.stat().st_mtime_ns for path in store.cells.iterdir()}
    assert len(before) == 1
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    pd.testing.assert_frame_equal(results(out), results(serial))
    # nothing is left to measure
    monkeypatch.setattr("coterie.benchmark.running.measure_task", None)
    assert RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)]).exit_code == 0


def test_ctrl_c_loses_nothing_that_is_finished(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Tuning.outcome, []

    def interrupted(self: Tuning, tried: Any) -> Any:
        calls.append(tried)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, tried)

    monkeypatch.setattr(Tuning, "outcome", interrupted)
    out = tmp_path / "stopped"
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert len(results(out)) == len(list((out / "cells").iterdir())) == 6
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len(calls) == 5 + 8
    pd.testing.assert_frame_equal(results(out), results(serial))


def test_processes_that_are_stopped_and_one_that_goes_on_give_its_table(
    serial: Path, tmp_path: Path
) -> None:
    store = benchmark.Store(tmp_path / "parallel", 3)
    selection = benchmark.Selection(
        ["digits"], ["wga-0.3", "pooled"], ["honest", "stranger"], None, 2, 1
    )
    cells = list(selection.cells(None))
    running = benchmark.measure_cells(cells, selection, store, None, jobs=2)
    first = next(running)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt())
    assert not multiprocessing.active_children()
    assert all(cell in store for cell in first)
    kept = store.rows()  # every file is whole
    assert len(first) <= len(kept) <= len(cells)
    for _ in benchmark.measure_cells(cells, selection, store, None):
        pass
    benchmark.write_results(store, tmp_path)
    pd.testing.assert_frame_equal(results(tmp_path), results(serial))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sets", "letters"], "unknown set 'letters'; the sets are digits, mnist"),
        (
            ["--sets", "digits", "--methods", "magic"],
            "unknown method 'magic'; the methods are alone, pooled",
        ),
        (
            ["--sets", "digits", "--conditions", "rain"],
            "unknown condition 'rain'; the conditions are honest",
        ),
        (
            ["--sets", "digits", "--models", "oracle"],
            "unknown model 'oracle'; the models are cnn, gru",
        ),
        (["--sets", "digits", "--users", "0"], "`--users` must be at least 1, got 0"),
        (["--sets", "digits", "--steps", "0"], "`--steps` must be at least 1, got 0"),
        (["--sets", "digits", "--jobs", "0"], "--jobs"),
        (["--sets", "vowels"], "name it with `--data`"),
        (
            ["--sets", "vowels", "--data", "nowhere"],
            "vowels needs nowhere/vowel_deterding/vowel-context.data",
        ),
        (["--sets", "digits", "--models", "gru"], "nothing to measure"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    options: list[str], words: str, tmp_path: Path
) -> None:
    result = RUNNER.invoke(app, ["bench", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_begun_with_other_settings_is_refused(serial: Path) -> None:
    result = RUNNER.invoke(app, [*SMALL, "--steps", "4", "--out", str(serial)])
    assert result.exit_code == 2
    assert "was begun with steps = 3, not 4" in result.output


def test_sets_that_are_not_there_are_left_out_with_a_word_about_each(tmp_path: Path) -> None:
    options = [
        "--data",
        str(tmp_path),
        "--methods",
        "pooled",
        "--conditions",
        "honest",
        "--users",
        "1",
    ]
    result = RUNNER.invoke(
        app, ["bench", *options, "--steps", "1", "--jobs", "1", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    for name in SETS:
        assert (f"left out: {name} needs" in result.output) == (name != "digits")
    assert set(results(tmp_path / "out")["set"]) == {"digits"}


def test_a_folder_that_another_process_measures_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with claimed_elsewhere(tmp_path) as child:
        with pytest.raises(FileError, match=rf"is in use by process {child} on"):
            benchmark.run(tmp_path, methods=["wga-0.3"], users=1, steps=3)
        result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(tmp_path)])
    assert (result.exit_code, f"in use by process {child} on" in result.output) == (2, True)
    with pytest.raises(KnobError, match=r"`out` must be a folder, .* is a file"):
        benchmark.run(tmp_path / "file", methods=["wga-0.3"], users=1, steps=3)


def test_alone_by_itself_is_measured(tmp_path: Path) -> None:
    few = [
        "--sets",
        "digits",
        "--methods",
        "alone",
        "--conditions",
        "honest",
        "--users",
        "1",
        "--steps",
        "1",
    ]
    result = RUNNER.invoke(app, ["bench", *few, "--jobs", "1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "Only Alone is measured yet" in (tmp_path / "out" / "index.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("option", ["sets", "methods", "conditions", "models"])
def test_one_name_is_no_list_of_names(option: str, tmp_path: Path) -> None:
    with pytest.raises(
        KnobError, match=rf"`{option}` must be a list of names, got 'one'; write `\['one'\]`"
    ):
        benchmark.run(tmp_path / "out", **{option: "one"})  # type: ignore[arg-type]


def test_a_rule_is_no_contender_and_a_contender_tries_something(tmp_path: Path) -> None:
    with pytest.raises(
        KnobError, match=r"`methods` are names or contenders, got Alone\(\); write `benchmark"
    ):
        benchmark.run(tmp_path / "out", methods=[Alone()])  # type: ignore[list-item]
    with pytest.raises(KnobError, match="the contender 'mine' has nothing to try"):
        benchmark.Contender.of("mine")
