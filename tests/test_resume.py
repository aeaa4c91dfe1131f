"""A run that is killed at any moment resumes to the same bits as one that was never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

KILLS = 50


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Train, kill and resume in a process of its own; see `killed_runs.py`."""
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("runs")), str(KILLS), "0"]
    source = str(Path(coterie.__file__).parents[1])
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={"PYTHONPATH": source}
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_killed_runs_resume_to_the_same_bits(outcomes: list[dict[str, object]]) -> None:
    assert {outcome["run"] for outcome in outcomes} == {"batch dependent", "plain"}
    for outcome in outcomes:
        assert outcome["digest"] == outcome["wanted"], outcome
    assert len({outcome["wanted"] for outcome in outcomes}) == 2  # a digest that tells runs apart


def test_the_kills_hit_training_all_over(outcomes: list[dict[str, object]]) -> None:
    steps = [step for outcome in outcomes for step in outcome["killed_at"]]  # type: ignore[attr-defined]  # a list, by JSON
    assert len(steps) >= KILLS
    for third in (range(1, 21), range(21, 41), range(41, 60)):
        assert sum(step in third for step in steps) >= 5
