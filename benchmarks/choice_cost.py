"""Adaptive averaging, choice and training together, over `WeightedAveraging` of the same steps, in one run.

    python benchmarks/choice_cost.py [--device cuda] [--models digits,mlp,cnn] [--steps 1000]
        [--rounds 3] [--json]

*digits*: softmax regression on scikit-learn's digits, 13 peers; *mlp* (159,010 parameters) and
*cnn* (1,663,370): 10 peers, random images, 128 examples a user, batches of 32. One thread on a CPU.
On a GPU steps are captured. The times are those of whole calls of `train`, in turns: on a CPU the
processor's, so that other work on the machine counts less, on a GPU those of the clock. The ratio
is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from step_cost import MODELS, Setting
from torch import nn
from torch.nn.functional import cross_entropy

import coterie


def users(kind: str) -> tuple[nn.Module, coterie.User, list[coterie.User]]:
    """Return a model, user 0 and the peers."""
    torch.manual_seed(0)
    if kind == "digits":
        task = coterie.data.digits_by_writer(me=0, seed=0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), task.me, list(task.peers)
    make, shape = MODELS[kind]
    me, *peers = Setting.of(make, shape, 10, 32, torch.device("cpu")).everyone
    return make(), me, peers


def seconds(
    kind: str,
    rule: coterie.Rule | coterie.AdaptiveAveraging,
    options: argparse.Namespace,
    steps: int,
) -> tuple[float, str]:
    """Return the time of one call of `train`, and how its steps were taken."""
    model, me, peers = users(kind)
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    began = clock()
    run = coterie.train(
        model.to(options.device),
        cross_entropy,
        me,
        peers,
        rule,
        lr=0.01,
        steps=steps,
        guard="off",
        measure=False,
        progress=False,
    )
    if options.device == "cuda":
        torch.cuda.synchronize()
    return clock() - began, run.record.configuration.capture


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="digits,mlp,cnn")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in options.models.split(","):
        rules: dict[str, coterie.Rule | coterie.AdaptiveAveraging] = {
            "weighted": coterie.WeightedAveraging(0.5),
            "adaptive": coterie.AdaptiveAveraging(),
        }
        times: dict[str, list[float]] = {name: [] for name in rules}
        how = {}
        for rule in rules.values():
            # what libraries set up once
            seconds(kind, rule, options, 40 if options.device == "cuda" else 8)
        for _ in range(options.rounds):
            for name, rule in rules.items():
                took, how[name] = seconds(kind, rule, options, options.steps)
                times[name].append(took)
        ratios = [a / w for a, w in zip(times["adaptive"], times["weighted"], strict=True)]
        row = {
            "model": kind,
            **{f"{name}, s": round(statistics.median(each), 3) for name, each in times.items()},
            "ratio": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
            "steps": how,
        }
        print(
            json.dumps(row) if options.json else "  ".join(f"{k}: {v}" for k, v in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
