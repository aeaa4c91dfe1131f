"""`coterie demo`, and the help of every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.benchmark import demo
from coterie.cli import app

RUNNER = CliRunner()


def test_demo_prints_a_table_and_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    result = RUNNER.invoke(
        app, ["demo", "--out", str(tmp_path), "--seeds", "2", "--steps", "20", "--me", "3"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [(r["seed"], r["method"]) for r in rows] == [
        (s, m) for s in (0, 1) for m in demo.METHODS
    ]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    found = demo.table([demo.Result(**row) for row in rows])
    assert [row["method"] for row in found] == list(demo.METHODS)
    for row in found:
        for cell in row.values():
            assert cell in result.output
            assert cell in page
    first = demo.conclusion([demo.Result(**row) for row in rows], 3).sentence
    assert " ".join(result.output.split()).startswith(first.replace("`", ""))
    assert page.index('class="lead') < page.index("<main>")
    assert "<svg" in page
    assert (tmp_path / "whom.svg").read_text(encoding="utf-8").startswith("<svg")
    assert not any(word in page for word in ("<script", "<link", 'src="', "@import"))


def test_demo_says_what_is_wrong(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["demo", "--out", str(tmp_path), "--me", "14"])
    assert result.exit_code == 2
    assert "from 0 to 13, got 14" in result.stderr


@pytest.mark.parametrize(
    "command",
    ["demo", "train", "predict", "plan", "explore", "reproduce", "bench", "list", "worker"],
)
def test_every_command_explains_itself(command: str) -> None:
    result = RUNNER.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output) > 400
