"""Adaptive averaging beside training alone and fixed weights, at one step size and without validation examples.

    python benchmarks/adaptive.py [--data DIR] [--sets digits] [--models linear,mlp]
        [--users 8] [--jobs 1]

Users of a set are user 0 in turn, with few examples to learn from and the rest of theirs for the
test; the others are peers with all of theirs. All methods take the same steps of Adam, and the last
model counts. Conditions, as in `coterie bench`: *honest*; *wrong-labels*, half the peers are wrong;
*permuted*, nobody differs. Differences to Alone are paired by user, ± one standard error. Time is
that of adaptive averaging over that of `WeightedAveraging(0.6)`, on one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import numpy as np
import torch
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.benchmark.sets import SETS
from coterie.evaluation.evaluate import example_errors

RULES: dict[str, coterie.Rule | coterie.AdaptiveAveraging] = {
    "alone": coterie.Alone(),
    **{f"alpha {alpha:g}": coterie.WeightedAveraging(alpha) for alpha in (0.1, 0.3, 0.6, 0.9)},
    "adaptive": coterie.AdaptiveAveraging(),
}


def scores(name: str, condition: str, me: str, settings: argparse.Namespace) -> dict[str, float]:
    """Return each rule's score and seconds for one user, and `wrong`: the weight on wrong peers."""
    torch.set_num_threads(1)
    task, model = problem_of(name, me, settings.data, settings.model, condition)
    task.me.validation = None
    regression = task.n_outputs == 1
    measured: dict[str, float] = {}
    for rule_name, rule in RULES.items():
        began = time.perf_counter()
        run = coterie.train(
            model,
            torch.nn.functional.mse_loss if regression else torch.nn.functional.cross_entropy,
            task.me,
            task.peers,
            rule,
            lr=settings.lr,
            steps=settings.steps,
            batch_size=SETS[name].batch_size,
            progress=False,
            measure=False,
        )
        measured[f"{rule_name}, seconds"] = time.perf_counter() - began
        if task.me.test is None:
            raise AssertionError("a task has test examples")
        cost = float(example_errors(run.model, task.me.test, 1 / task.spread).mean())
        measured[rule_name] = -(cost**0.5) if regression else 1 - cost
        if run.record.end.account:
            measured["wrong"] = sum(
                run.record.end.account["tau"].get(peer, 0.0) for peer in task.wrong
            )
    return measured


def row(label: str, by_user: list[dict[str, float]]) -> str:
    """Return one line of the table."""
    table = {column: np.array([user[column] for user in by_user]) for column in by_user[0]}
    times = np.median(table["adaptive, seconds"] / table["alpha 0.6, seconds"])
    gain = table["adaptive"] - table["alone"]
    best = max(
        (rule for rule in RULES if rule.startswith("alpha")),
        key=lambda rule: float(table[rule].mean()),
    )
    behind = table["adaptive"] - table[best]
    shown = " | ".join(f"{table[rule].mean():.3f}" for rule in RULES)
    changes = (f"{c.mean():+.3f} ± {c.std(ddof=1) / len(c) ** 0.5:.3f}" for c in (gain, behind))
    return f"| {label} | {shown} | {' | '.join(changes)} | {table['wrong'].mean():.1%} | {times:.1f} × |"


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--models", default="linear")
    parser.add_argument("--conditions", default="honest,wrong-labels,permuted")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--jobs", type=int, default=1)
    settings = parser.parse_args()
    columns = (
        "set, model, condition",
        *RULES,
        "adaptive − alone",
        "adaptive − best alpha",
        "on wrong peers",
        "time",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    with multiprocessing.get_context("spawn").Pool(settings.jobs) as aggregator:
        under_way = {}
        for name in settings.sets.split(","):
            for model in settings.models.split(","):
                chosen = argparse.Namespace(**(vars(settings) | {"model": model}))
                for condition in settings.conditions.split(","):
                    tasks = [(name, condition, me, chosen) for me in users_of(name, settings)]
                    under_way[f"{name}, {model}, {condition}"] = aggregator.starmap_async(
                        scores, tasks, chunksize=1
                    )
        for label, waiting in under_way.items():
            print(row(label, waiting.get()), flush=True)


if __name__ == "__main__":
    main()
