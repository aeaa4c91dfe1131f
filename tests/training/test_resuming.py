"""A run that is killed at any moment resumes to the same bits as one that was never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import coterie

KILLS = 50 if os.environ.get("COTERIE_SLOW") else 15


def test_killed_runs_resume_to_the_same_bits(tmp_path: Path) -> None:
    """Train, kill and resume in a process of its own; see `killed_runs.py`."""
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "killed_runs.py"),
        str(tmp_path),
        str(KILLS),
        "0",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(coterie.__file__).parents[1])}
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert process.returncode == 0, process.stderr
    outcomes = [json.loads(line) for line in process.stdout.splitlines()]
    for outcome in outcomes:
        assert outcome["digest"] == outcome["wanted"], outcome
    # two kinds of runs, which the digest tells apart
    assert len({outcome["wanted"] for outcome in outcomes}) == 2
    steps = [step for outcome in outcomes for step in outcome["killed_at"]]
    assert len(steps) >= KILLS
    for third in (range(1, 21), range(21, 41), range(41, 60)):
        assert sum(step in third for step in steps) >= KILLS // 10
