"""On a GPU, each rule as the first run of a process: captured where it can be, and as on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

SCRIPT = """
import json, sys, warnings
import torch, coterie
from coterie.rules.similarity import CosineSimilarity
warnings.simplefilter("error", UserWarning)
rules = {
    "adaptive": coterie.AdaptiveAveraging(), "averaging": coterie.WeightedAveraging(0.5), "alone": coterie.Alone(),
    "correction": coterie.BiasCorrection(0.5, 0.1), "cosine": CosineSimilarity(0.5),
}
task = coterie.data.digits_by_writer(me=3, own_examples=30)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
told = {}
for device in ("cuda", "cpu"):
    run = coterie.train(
        model, torch.nn.functional.cross_entropy, task.me, task.peers, rules[sys.argv[1]], lr=0.01, steps=40,
        device=device, progress=False,
    )
    told[device] = [run.record.configuration.capture, run.test["loss"]]
print(json.dumps(told))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("rule", ["adaptive", "averaging", "alone", "correction", "cosine"])
def test_the_first_run_of_a_process(rule: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(coterie.__file__).parents[1]), *sys.path])
    }
    command = [sys.executable, "-c", SCRIPT, rule]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["cuda"][0] == "a CUDA graph"
    assert told["cuda"][1] == pytest.approx(told["cpu"][1], rel=1e-3)
