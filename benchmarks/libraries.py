"""The same rounds through `coterie` and through public libraries for federated learning, on one CPU thread.

    python benchmarks/libraries.py [--regimes paper,fedavg] [--libraries pfl,flower] [--turns 5]
        [--json]

Eleven users, user 0 and 10 peers, with 20 examples each; a network 784-100-10; plain gradient
steps. Two regimes:

- paper: in a round every user computes one gradient on 20 examples, and the model follows their
  mean;
- fedavg: in a round every user takes 20 such steps from the common model, and the mean of the
  models is the next.

Every gradient is over all of a user's examples, so that there is no order of batches in which
libraries could differ: after `CHECKED` rounds all must have the same parameters but for rounding,
or the benchmark fails. `coterie` is called as its users do, by `coterie.train`, with `WeightedAveraging` and
`methods.FedAvg`. The other libraries are used as their own guides do: `pfl` (Apple's pfl-research)
with its simulated backend in one process, tensors as data, no metrics printed; Flower by
`run_simulation` on Ray with one actor of one CPU that keeps its model and data.

Every side has a process of its own, in turn with the others, and is timed between rounds, so that
nobody's start counts; a ratio is between two turns that follow on each other. Times are the
processor's, which other work on the machine moves least; beside Flower, whose server and actor are
two processes on two cores, the clock's. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

USERS, EXAMPLES, LR = 11, 20, 0.1

CHECKED = 5
"""After how many rounds the parameters are compared."""

WARM_UP = 10
"""How many rounds a turn takes before those that are timed."""

LOCAL_STEPS = {"paper": 1, "fedavg": 20}

ROUNDS = {
    "coterie": {"paper": 1000, "fedavg": 60},
    "pfl": {"paper": 200, "fedavg": 60},
    "flower": {"paper": 40, "fedavg": 30},
}
"""How many rounds a turn times, by library and regime."""

BY_CLOCK = ("flower",)
"""Who has more than one process."""

LIBRARIES = {
    "pfl": ("pfl", "pip install 'pfl[pytorch]'"),
    "flower": ("flwr", "pip install 'flwr[simulation]'"),
}
"""By name: the package, and what installs it."""


def network() -> nn.Sequential:
    """Return the network that every side starts from: 79,510 parameters, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def examples(user: int) -> tuple[Tensor, Tensor]:
    """Return one user's examples, the same in every process."""
    generator = torch.Generator().manual_seed(1 + user)
    inputs = torch.randn(EXAMPLES, 784, generator=generator)
    return inputs, torch.randint(10, (EXAMPLES,), generator=generator)


@dataclass
class Watch:
    """Looks at processor and clock after every round, and at the parameters after `CHECKED` of them."""

    at: list[tuple[float, float]] = field(default_factory=list)
    parameters: Any = None

    def round(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """Note that a round has ended."""
        if len(self.at) + 1 == CHECKED:
            self.parameters = torch.cat(
                [p.detach().reshape(-1).clone() for p in parameters()]
            ).numpy()
        self.at.append((time.process_time(), time.perf_counter()))

    def milliseconds(self) -> list[float]:
        """Return the time of a round by processor and clock: the mean over all but the first ones."""
        first, last = self.at[WARM_UP - 1], self.at[-1]
        return [1e3 * (b - a) / (len(self.at) - WARM_UP) for a, b in zip(first, last, strict=True)]


def turn(library: str, regime: str, into: Path) -> None:
    """Be one library for one turn, by the `play` of its module, and write what came of it."""
    torch.set_num_threads(1)
    rounds = WARM_UP + ROUNDS[library][regime]
    watch: Watch = importlib.import_module(f"libraries_{library}").play(regime, rounds)
    np.savez(into, parameters=watch.parameters, milliseconds=watch.milliseconds())


def taken(library: str, regime: str, folder: Path) -> tuple[list[float], Any]:
    """Let a process take a turn, and return its milliseconds a round and the parameters it came to."""
    into = folder / "turn.npz"
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = [sys.executable, __file__, "--turn", library, regime, str(into)]
    done = subprocess.run(  # noqa: S603
        command,
        env=os.environ | quiet | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{library}, {regime}: failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    with np.load(into) as saved:
        return saved["milliseconds"].tolist(), saved["parameters"]


def measured(regime: str, libraries: list[str], turns: int) -> dict[str, Any]:
    """Return each side's milliseconds a round, its turns over ours, and how far its parameters are from ours."""
    sides = ["coterie", *libraries]
    times: dict[str, list[list[float]]] = {library: [] for library in sides}
    ends: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for library in sides:
                milliseconds, ends[library] = taken(library, regime, Path(folder))
                times[library].append(milliseconds)
    moved = np.linalg.norm(
        ends["coterie"] - nn.utils.parameters_to_vector(network().parameters()).detach().numpy()
    )
    by = {library: int(library in BY_CLOCK) for library in sides}
    medians = {
        library: statistics.median(each[by[library]] for each in times[library])
        for library in sides
    }
    apart = {
        library: float(np.linalg.norm(ends[library] - ends["coterie"]) / moved)
        for library in libraries
    }
    for library, distance in apart.items():
        assert distance < 1e-4, (
            f"{library} computes something else: {distance:.1e} of the way apart"
        )
    ratios = {
        library: sorted(
            theirs[by[library]] / ours[by[library]]
            for theirs, ours in zip(times[library], times["coterie"], strict=True)
        )
        for library in libraries
    }
    return {"regime": regime, "ms": medians, "ratios": ratios, "apart": apart}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regimes", default="paper,fedavg")
    parser.add_argument("--libraries", default="pfl,flower")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        library, regime, into = options.turn
        turn(library, regime, Path(into))
        return
    libraries = []
    for name in options.libraries.split(","):
        package, install = LIBRARIES[name]
        if importlib.util.find_spec(package):
            libraries.append(name)
        else:
            print(f"{name} is left out, since it is not installed: {install}", file=sys.stderr)
    for regime in options.regimes.split(","):
        result = measured(regime, libraries, options.turns)
        if options.json:
            print(json.dumps(result), flush=True)
            continue
        print(f"{regime}: coterie {result['ms']['coterie']:.2f} ms a round", flush=True)
        for name in libraries:
            ratios = result["ratios"][name]
            spread = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}–{ratios[-1]:.1f})"
            shown = f"{result['ms'][name]:.2f} ms, {spread} × coterie's"
            print(
                f"{regime}: {name} {shown}; parameters apart: {result['apart'][name]:.0e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
