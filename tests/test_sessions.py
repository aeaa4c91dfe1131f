"""A stranger's session of each kind runs as the documentation has it: a table, a loop, research, scikit-learn."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.support.hospitals import visits
from tests.test_examples import PAGES, ROOT
from typer.testing import CliRunner

from coterie.cli import app
from coterie.recording.record import Record


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_a_table_by_the_readmes_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = visits(90)[["hospital", "age", "pressure", "smoker", "ill"]]
    table.to_csv("visits.csv", index=False)
    table[:7].drop(columns="ill").to_csv("new_visits.csv", index=False)
    session = next(
        block for block in blocks(ROOT / "README.md", "console") if "coterie train --data" in block
    )
    for line in session.splitlines():
        command, _, file = line.removeprefix("$ coterie ").partition(" > ")
        result = CliRunner().invoke(app, shlex.split(command, comments=True))
        assert result.exit_code == 0, result.output
        if file:
            Path(file).write_text(result.stdout, encoding="utf-8")
    assert set(pd.read_csv("predictions.csv")["prediction"]) <= {"ill", "well"}
    assert "Geneva" in Path("run/index.html").read_text(encoding="utf-8")


def test_a_table_by_the_commands_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = visits(120).drop(columns="days").assign(patient=lambda f: [f"P{i}" for i in f.index])
    table.assign(discharged=table["ill"].map({"ill": "late", "well": "early"})).to_csv(
        "visits.csv", index=False
    )
    table[:7].drop(columns="ill").to_csv("new_visits.csv", index=False)
    session = blocks(ROOT / "docs" / "tables.md", "console")[0]
    for line in session.splitlines():
        result = CliRunner().invoke(app, shlex.split(line.removeprefix("$ coterie ")))
        assert result.exit_code == 0, result.output
        assert "looks like" not in result.stderr
        assert "alone tells" not in result.stderr
    predictions = pd.read_csv("predictions.csv")
    assert list(predictions) == [
        "patient",
        "prediction",
        "set",
        "probability_ill",
        "probability_well",
    ]
    assert predictions["patient"].tolist() == [f"P{i}" for i in range(7)]


def test_files_of_several_users_by_the_command_of_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = blocks(ROOT / "docs" / "tables.md", "console")[1]
    command = shlex.split(session.removeprefix("$ coterie ").replace("\\\n", " "))
    names = command[command.index("--header") + 1].split(",")
    rng = np.random.default_rng(0)
    for user in ("va", "cleveland", "hungarian"):
        numbers = rng.normal(size=(60, len(names))).round(3)
        numbers[:, -1] = (numbers[:, 0] + rng.normal(size=60) > 0) + 0  # `num`, of `age`
        cells = np.where(rng.random(numbers.shape) < 0.05, "?", numbers.astype(str))
        cells[:, -1] = numbers[:, -1].astype(int)
        pd.DataFrame(cells).to_csv(f"processed.{user}.data", index=False, header=False)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = Record.load(Path("run") / "record.jsonl").configuration
    assert (found.me.name, set(found.peers)) == ("va", {"cleveland", "hungarian"})


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("README.md", "direction, state = rule("),  # one's own loop
        ("docs/extending.md", "benchmark.run("),  # research: a rule of one's own against others
        ("docs/sklearn.md", "cross_val_score("),
    ],
)
def test_the_other_sessions_are_among_the_blocks_that_run(page: str, line: str) -> None:
    assert ROOT / page in PAGES
    assert any(line in block for block in blocks(ROOT / page, "python"))
