"""No command shows a traceback: each bad input is one message, and leaves nothing."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
from tests.support.bad_commands import BAD_COMMANDS, table, train
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import KnobError
from coterie.registry import IMPORTS

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORTS, "")  # which `--import` adds to


@pytest.mark.parametrize("words", BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_a_bad_command_is_one_message_and_leaves_nothing(
    tmp_path: Path, words: Callable[[Path], list[str]]
) -> None:
    command = words(tmp_path)
    before = set(tmp_path.rglob("*"))
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "not foreseen" not in result.output
    assert result.stderr.strip()
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("seed", ["-1", str(2**40)])
def test_any_seed_and_markup_in_names_will_do(tmp_path: Path, seed: str) -> None:
    frame = table().replace({"ward": {"b": "[/blue]", "a": "[red]"}})
    command = train(
        tmp_path, frame, ["--me", "[red]", "--seed", seed, "--rule", "wga", "--model", "mlp"]
    )
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "ill for [red], classification, 2 peers" in result.output


def test_peers_that_are_left_out_are_told(tmp_path: Path) -> None:
    frame = table()
    frame.loc[frame.ward == "c", "ill"] = "yes"
    result = RUNNER.invoke(app, train(tmp_path, frame, []))
    assert result.exit_code == 0, result.output
    assert (
        "coterie: the peer 'c' is left out: its rows are of one class only ('yes')" in result.stderr
    )
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "Who was left out" in page
    assert "its rows are of one class only" in page


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    command = train(tmp_path, table(), ["--lr", "nan"])
    assert isinstance(RUNNER.invoke(app, command).exception, SystemExit)
    assert isinstance(RUNNER.invoke(app, ["--debug", *command]).exception, KnobError)


def test_an_error_that_nobody_foresaw_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.tables.fit.train", lambda *_, **__: 1 / 0)
    result = RUNNER.invoke(app, train(tmp_path, table(), []))
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "coterie: an error that was not foreseen, ZeroDivisionError: division by zero;"
    )
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["", "train", "list", "federate init", "federate run"])
def test_a_flag_does_not_look_as_if_it_took_a_value(command: str) -> None:
    shown = RUNNER.invoke(app, [*command.split(), "--help"]).output
    assert "--help" in shown
    assert "<bool>" not in shown


def test_the_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"coterie {metadata.version('coterie')}\n"
    assert "coterie[flare]" in " ".join(RUNNER.invoke(app, ["federate", "--help"]).output.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--id", "ward"], "`--user-column` and `--id` name the same column, 'ward'"),
        (["--leave-out", "z"], "`--leave-out` names no user"),
        (["--features", "age", "--drop", "age"], "`--features` and `--drop` both name 'age'"),
        (["--test", "0"], "`--test` must be above 0 and below 1, got 0.0"),
        (
            ["--validation", "0.5", "--test", "0.5"],
            "0 cannot be for training: 2 are needed, hold out less",
        ),
        (
            ["--model", "operator:not_"],
            "'operator:not_'(4, 2), which makes the model, raised TypeError",
        ),
    ],
)
def test_a_message_speaks_of_options_as_they_are_written(
    tmp_path: Path, options: list[str], told: str
) -> None:
    assert told in RUNNER.invoke(app, train(tmp_path, table(), options)).stderr


def test_a_file_that_is_not_in_utf_8_says_what_to_do(tmp_path: Path) -> None:
    command = train(tmp_path, table(), [])
    table().replace({"sex": {"f": "Zürich"}}).to_csv(
        tmp_path / "visits.csv", index=False, encoding="latin-1"
    )
    told = RUNNER.invoke(app, command).stderr
    assert "visits.csv is not in UTF-8: byte 0xfc is no part of it; save it again as UTF-8" in told


def test_the_last_line_is_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text("from torch.nn import Linear\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    named = [
        "--model",
        "nets:Linear",
        "--rule",
        "wga",
        "--leave-out",
        "c",
        "--out",
        str(tmp_path / "a run"),
    ]
    result = RUNNER.invoke(app, train(tmp_path, table(), named))
    assert "classification, 1 peer\n" in re.sub(r" +\n", "\n", result.stdout)
    command = shlex.split(result.stdout.splitlines()[-1].partition("coterie ")[2])
    applied = RUNNER.invoke(
        app, [word.replace("FILE", str(tmp_path / "visits.csv")) for word in command]
    )
    assert applied.stdout.startswith("prediction,probability_no,probability_yes\n")


def test_who_reads_no_further_is_told_nothing(tmp_path: Path) -> None:
    assert RUNNER.invoke(app, train(tmp_path, table(), ["--rule", "wga"])).exit_code == 0
    pd.concat([table()] * 100).to_csv(tmp_path / "many.csv", index=False)
    words = [
        sys.executable,
        "-m",
        "coterie",
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "many.csv"),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("prediction,")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 128 + signal.SIGPIPE
