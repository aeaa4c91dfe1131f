"""Many small runs as one program over the same runs one after the other, both sides timed in one run.

The runs: each of the 14 writer segments of scikit-learn's digits as user 0, with the 13 others as
peers, for five seeds. Both sides do all that `train` does without a guard: copies and checks,
batches, steps, evaluations, test. CPU time, so that other work on the machine counts less.

    python benchmarks/many.py [--device cuda] [--threads 1] [--steps 1000] [--seeds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields, replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import coterie


def model(hidden: int) -> nn.Module:
    """Return softmax regression, or a network with a hidden layer."""
    torch.manual_seed(0)
    if not hidden:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def specs(
    start: nn.Module, rule: coterie.Rule, options: argparse.Namespace
) -> list[coterie.RunSpec]:
    """Return every writer segment as user 0, for every seed."""
    settings = {"lr": 0.01, "steps": options.steps, "device": options.device}
    return [
        coterie.RunSpec(start, cross_entropy, task.me, task.peers, rule, seed=seed, **settings)
        for seed in range(options.seeds)
        for task in (coterie.data.digits_by_writer(me=k, seed=seed) for k in range(14))
    ]


def measured(hidden: int, rule: coterie.Rule, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of both sides, their ratio, and the largest difference of a final validation loss."""
    runs = specs(model(hidden), rule, options)
    clock = time.process_time if options.device == "cpu" else time.perf_counter

    def one(spec: coterie.RunSpec) -> coterie.Run:
        asked = {field.name: getattr(spec, field.name) for field in fields(spec)}
        return coterie.train(**{**asked, "guard": "off", "measure": False, "progress": False})

    short = [replace(spec, steps=2) for spec in runs[:2]]
    one(short[0])  # what torch imports and sets up once
    coterie.train_many(short, progress=False)
    began = clock()
    together = coterie.train_many(runs, progress=False)
    between = clock()
    apart = [one(spec) for spec in runs]
    ended = clock()
    losses = [
        [run.record.points[-1].validation["loss"] for run in side] for side in (together, apart)
    ]
    return {
        "runs": len(runs),
        "many_s": between - began,
        "one_by_one_s": ended - between,
        "ratio": (ended - between) / (between - began),
        "largest_difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each of the 14 users")
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[0, 16, 64], help="hidden units; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rules: dict[str, coterie.Rule] = {
        "alone": coterie.Alone(),
        "wga": coterie.WeightedAveraging(0.5),
        "bc": coterie.BiasCorrection(0.5, 0.1),
    }
    if not options.json:
        print(
            f"{'hidden':>6} {'rule':<6}{'runs':>5}{'many s':>9}{'one by one s':>14}{'ratio':>8}{'difference':>12}"
        )
    for hidden in options.hidden:
        for name, rule in rules.items():
            result = measured(hidden, rule, options)
            if options.json:
                print(
                    json.dumps({"hidden": hidden, "rule": name, "device": options.device} | result),
                    flush=True,
                )
            else:
                shown = f"{result['many_s']:>9.2f}{result['one_by_one_s']:>14.1f}{result['ratio']:>8.1f}"
                print(
                    f"{hidden:>6} {name:<6}{result['runs']:>5}{shown}{result['largest_difference']:>12.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
