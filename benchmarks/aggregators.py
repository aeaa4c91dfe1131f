"""The time of every robust aggregator beside that of `byzfl`, on one thread, both sides in one run.

Processor time, not time passed: what else the machine does would weigh on the longer calls more.
Medians of calls by turns.

    pip install --no-deps byzfl
    python benchmarks/aggregators.py [--rows 20] [--columns 100000] [--json]

`byzfl` asks for torchvision and seaborn, for experiments of its own; its aggregators need neither,
and only they are imported here. Its geometric median takes three steps and stops; the line
“converged” gives it as many as it needs to come as near as ours does, to 1e-6 of the rows' spread.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coterie import aggregators

Sides: TypeAlias = dict[str, tuple[aggregators.Aggregator, Callable[[Tensor], Tensor]]]


def byzfl_aggregators() -> Any:
    """Return `byzfl.aggregators` without running the package's `__init__`, which imports torchvision."""
    package = importlib.util.find_spec("byzfl")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("this compares with byzfl: pip install --no-deps byzfl")
    sys.modules["byzfl"] = importlib.util.module_from_spec(package)
    return importlib.import_module("byzfl.aggregators")


def sides(n: int, f: int, radius: float, steps: int) -> Sides:
    """Return ours and theirs, by what they do."""
    theirs = byzfl_aggregators()

    def clipping(rows: Tensor, iterations: int) -> Tensor:
        # A new one each time: it would start where the last call ended.
        clipped: Tensor = theirs.CenteredClipping(L=iterations, tau=radius)(rows)
        return clipped

    trimmed, krum, mixing = theirs.TrMean(f), theirs.Krum(f), theirs.NNM(f)
    buckets, median = theirs.Bucketing(2), theirs.Median()
    least = theirs.GeometricMedian(nu=1e-9, T=steps)
    return {
        "mean": (aggregators.Mean(), theirs.Average()),
        "coordinate median": (aggregators.CoordinateMedian(), median),
        "trimmed mean": (aggregators.TrimmedMean(f), trimmed),
        "geometric median": (aggregators.GeometricMedian(), theirs.GeometricMedian()),
        f"… converged ({steps} steps)": (aggregators.GeometricMedian(), least),
        "Krum": (aggregators.Krum(f), krum),
        "Multi-Krum": (aggregators.MultiKrum(f), theirs.MultiKrum(f)),
        "centred clipping, 1": (
            aggregators.CentredClipping(radius, 1),
            partial(clipping, iterations=1),
        ),
        "centred clipping, 10": (
            aggregators.CentredClipping(radius, 10),
            partial(clipping, iterations=10),
        ),
        "mixing, Krum": (
            aggregators.NearestNeighbourMixing(f, then=aggregators.Krum(f)),
            lambda rows: krum(mixing(rows)),
        ),
        "mixing, trimmed mean": (
            aggregators.NearestNeighbourMixing(f, then=aggregators.TrimmedMean(f)),
            lambda rows: trimmed(mixing(rows)),
        ),
        "mixing, geometric median": (
            aggregators.NearestNeighbourMixing(f, then=aggregators.GeometricMedian()),
            lambda rows: least(mixing(rows)),
        ),
        "bucketing, median": (
            aggregators.Bucketing(2, then=aggregators.CoordinateMedian()),
            lambda rows: median(buckets(rows)),
        ),
    }


def enough_steps(rows: Tensor) -> int:
    """Return how many steps byzfl's geometric median takes to come near the one that ours finds."""
    wanted, spread = aggregators.GeometricMedian()(rows), (rows - rows.mean(0)).norm(dim=1).median()
    for steps in (3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000):
        median = byzfl_aggregators().GeometricMedian(nu=1e-9, T=steps)(rows)
        if (median - wanted).norm() <= 1e-6 * spread:
            return steps
    return 1000


def timed(aggregator: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """Return the milliseconds of processor time of one call."""
    start = time.process_time()
    aggregator(rows)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--columns", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=4, help="time to spend on each line")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    n, f = options.rows, options.rows // 4
    rows = torch.randn(n, options.columns, generator=torch.Generator().manual_seed(0)) + 0.5
    rows[:f] -= 2.0
    radius = float(rows[f:].norm(dim=1).mean())
    if not options.json:
        print(f"{'pool':<30}{'coterie ms':>12}{'byzfl ms':>12}{'ratio':>8}")
    for name, (ours, theirs) in sides(n, f, radius, enough_steps(rows)).items():
        times: tuple[list[float], list[float]] = ([], [])
        timed(ours, rows), timed(theirs, rows)
        end = time.monotonic() + options.seconds
        # by turns, so that both see the same machine
        while time.monotonic() < end or len(times[0]) < 5:
            times[0].append(timed(ours, rows))
            times[1].append(timed(theirs, rows))
        mine, other = (statistics.median(each) for each in times)
        if options.json:
            print(
                json.dumps({"aggregator": name, "coterie_ms": mine, "byzfl_ms": other}), flush=True
            )
        else:
            print(f"{name:<30}{mine:>12.2f}{other:>12.2f}{other / mine:>7.1f}×", flush=True)


if __name__ == "__main__":
    main()
