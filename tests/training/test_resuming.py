"""A run that is killed at any moment resumes to the same bits as one that was never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

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


def test_a_resumed_record_differs_in_saved_lines_and_seconds_only(tmp_path: Path) -> None:
    """As docs/reliability.md says; the chain of lines is over what was written."""
    torch.manual_seed(0)
    x, model = torch.randn(60, 3), torch.nn.Linear(3, 1)
    y = x.sum(1, keepdim=True)
    me = coterie.User("me", x[:20], y[:20], validation=(x[50:], y[50:]))
    peers = [coterie.User("peer", x[20:50], y[20:50])]
    settings: dict[str, Any] = {"lr": 0.1, "steps": 12, "measure": False, "trackers": ()}

    def train(folder: str, **options: Any) -> None:
        out = tmp_path / folder
        rule = coterie.WeightedAveraging(0.5)
        coterie.train(model, mse_loss, me, peers, rule, out=out, **settings, **options)

    def lines(folder: str) -> list[Any]:
        text = (tmp_path / folder / "record.jsonl").read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()[1:]]
        for line in found:
            line.pop("chain")
            for part in (line, line.get("end", {})):
                part.pop("seconds", None)
        return [line for line in found if "saved" not in line]

    train("whole")
    train("stopped", hooks=[lambda step: step.step == 5])
    assert (tmp_path / "stopped" / "record.jsonl").exists()
    train("stopped", resume=True)
    assert lines("stopped") == lines("whole")
