"""The README's five lines in Python against `coterie train` on the same table, each in a fresh interpreter.

Both sides take turns, so that they see the same machine, and take the same steps to the same model.
Compared are the seconds that the record of the run tells (set-up, steps and evaluations), those of
the whole process, imports and files included, and those of its processors. Python keeps the threads
that torch takes by itself.

    python benchmarks/five_lines.py [--steps 1000] [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from sklearn.datasets import load_digits

import coterie
from coterie.data.handwriting import BOUNDS

PYTHON = """
import torch, coterie

task = coterie.data.from_table("digits.csv", user_column="writer", target="digit", me="w3", own_examples=30)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(task.n_inputs, task.n_outputs))
loss = torch.nn.functional.cross_entropy
run = coterie.train(model, loss, task.me, task.peers, lr=1e-2, steps={steps}, out="python")
run.report("python/index.html")
"""
COMMAND = (
    "-m coterie train --data digits.csv --user-column writer --target digit --me w3 --own-examples 30 --lr 0.01 "
    "--out command --steps {steps}"
)


def write_digits(path: Path) -> None:
    """Write the digits of scikit-learn as a table, a writer segment a user."""
    bunch = load_digits()
    table = pd.DataFrame(bunch.data / 16, columns=[f"pixel {i}" for i in range(64)])
    owners = [f"w{k}" for k in range(14) for _ in range(BOUNDS[k], BOUNDS[k + 1])]
    table.assign(writer=owners, digit=bunch.target).to_csv(path, index=False)


def process_seconds(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Return how long a fresh interpreter takes, and how long it keeps processors busy."""
    paths = [str(Path(coterie.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began, busy = time.perf_counter(), _busy()
    subprocess.run(  # noqa: S603  # our own code
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - began, _busy() - busy


def _busy() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs a side")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    sides = {
        "python": ["-c", PYTHON.format(steps=options.steps)],
        "command": COMMAND.format(steps=options.steps).split(),
    }
    times: dict[str, list[tuple[float, ...]]] = {side: [] for side in sides}
    for turn in range(options.repeats + 1):
        with tempfile.TemporaryDirectory() as name:
            folder, losses = Path(name), []
            write_digits(folder / "digits.csv")
            for side, arguments in sides.items():
                whole, busy = process_seconds(arguments, folder)
                end = coterie.Record.load(folder / side / "record.jsonl").end
                losses.append(end.test["loss"])
                if turn:  # the first turn fills the disk's cache
                    times[side].append((end.seconds, whole, busy))
            assert losses[0] == losses[1], losses  # the same bits
    result = {}
    for i, what in enumerate(("run", "process", "processors")):
        python, command = ([pair[i] for pair in times[side]] for side in ("python", "command"))
        ratio = statistics.median(a / b for a, b in zip(python, command, strict=True))
        result[what] = {
            "python_s": statistics.median(python),
            "command_s": statistics.median(command),
            "ratio": ratio,
        }
    if options.json:
        print(json.dumps(result))
        return
    for what, one in result.items():
        print(
            f"{what}: Python {one['python_s']:.2f} s, command {one['command_s']:.2f} s, ratio {one['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
