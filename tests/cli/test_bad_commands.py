"""No command shows a traceback: each bad input is one message, and leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

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
    command = train(tmp_path, frame, ["--me", "[red]", "--seed", seed, "--rule", "wga", "--model", "mlp"])
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "ill for [red], classification, 2 peers" in result.output


def test_peers_that_are_left_out_are_told(tmp_path: Path) -> None:
    frame = table()
    frame.loc[frame.ward == "c", "ill"] = "yes"
    result = RUNNER.invoke(app, train(tmp_path, frame, []))
    assert result.exit_code == 0, result.output
    assert "coterie: the peer 'c' is left out: its rows are of one class only ('yes')" in result.stderr
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "Who was left out" in page
    assert "its rows are of one class only" in page


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    command = train(tmp_path, table(), ["--lr", "nan"])
    assert isinstance(RUNNER.invoke(app, command).exception, SystemExit)
    assert isinstance(RUNNER.invoke(app, ["--debug", *command]).exception, KnobError)


def test_an_error_that_nobody_foresaw_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.tables.fit.train", lambda *_, **__: 1 / 0)
    result = RUNNER.invoke(app, train(tmp_path, table(), []))
    assert result.exit_code == 1
    assert result.stderr.startswith("coterie: an error that was not foreseen, ZeroDivisionError: division by zero;")
    assert "Traceback" not in result.output


def test_the_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"coterie {metadata.version('coterie')}\n"
    assert "coterie[flare]" in " ".join(RUNNER.invoke(app, ["federate", "--help"]).output.split())
