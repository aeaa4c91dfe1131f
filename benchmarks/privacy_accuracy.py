"""Accuracy against ε: adaptive averaging with private peers beside training alone.

    python benchmarks/privacy_accuracy.py [--data DIR] [--sets digits,wisdm] [--users 8] [--jobs 16]
    python benchmarks/privacy_accuracy.py --short    # half a minute: two users of digits, few ε

Users of a set are user 0 in turn, with the examples and peers of `coterie bench`, and a linear
model. Every peer promises (ε, δ) for each of its examples, and its noise is the least with which ε
lasts for the run; ∞ is no promise, with gradients that are neither clipped nor noisy. *Guarded* is
the default, *free* the same with `guard="off"`. The step size of each line is that of the least
mean validation loss over the users. Differences to Alone are in test accuracy, paired by user, ±
one standard error; *worse* is more than two of them below.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.engines import PrivatePeers
from coterie.privacy import Privacy

RATES = (0.01, 0.03, 0.1)
KINDS = ("guarded", "free")


def scores(
    name: str, me: str, epsilon: float | None, settings: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return for each step size validation loss and test accuracy by kind; of Alone where ε is None."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task, model = problem_of(name, me, settings.data, "linear", settings.condition)
    how: dict[str, Any] = {
        "steps": settings.steps,
        "batch_size": settings.batch,
        "measure": False,
        "progress": False,
    }
    if epsilon is not None and math.isfinite(epsilon):
        promise = Privacy(epsilon, settings.delta, settings.clip)
        how["engine"] = functools.partial(
            PrivatePeers, privacy=promise, gradients=math.ceil(4.5 * settings.steps)
        )
    by_rate: list[dict[str, Any]] = [{} for _ in settings.rates]
    for at_rate, lr in zip(by_rate, settings.rates, strict=True):
        for each in ["alone"] if epsilon is None else KINDS:
            rule = coterie.Alone() if epsilon is None else None
            how |= {"lr": lr, "guard": "off" if each == "free" else "auto"}
            run = coterie.train(model, cross_entropy, task.me, task.peers, rule, **how)
            assert task.me.validation is not None
            loss = coterie.evaluate(run.model, cross_entropy, task.me.validation)["loss"]
            account = (run.record.end.account if run.record.end else None) or {}
            at_rate[each] = {
                "loss": loss,
                "accuracy": run.test["accuracy"],
                "path": account.get("path", "alone"),
            }
    return by_rate


def tuned(by_user: list[list[dict[str, Any]]], kind: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the place of the step size of the least mean validation loss, and what each user has there."""
    losses = np.array([[at_rate[kind]["loss"] for at_rate in user] for user in by_user])
    best = int(np.nan_to_num(losses, nan=np.inf).mean(0).argmin())
    return best, [user[best][kind] for user in by_user]


def lines(name: str, by_epsilon: dict[float | None, Any], rates: list[float]) -> None:
    """Print the lines of a set."""
    alone = np.array([user["accuracy"] for user in tuned(by_epsilon[None], "alone")[1]])
    for epsilon, kind in itertools.product([e for e in by_epsilon if e is not None], KINDS):
        best, users = tuned(by_epsilon[epsilon], kind)
        change = np.array([user["accuracy"] for user in users]) - alone
        error = change.std(ddof=1) / len(change) ** 0.5
        served = sum(user["path"] == "alone" for user in users)
        said = (
            "better" if change.mean() > 2 * error else "worse" if change.mean() < -2 * error else ""
        )
        print(
            f"| {name} | {'∞' if math.isinf(epsilon) else f'{epsilon:g}'} | {kind} | {rates[best]:g} | "
            f"{alone.mean():.3f} | {alone.mean() + change.mean():.3f} | {change.mean():+.4f} ± {error:.4f} | "
            f"{served} of {len(users)} | {said} |",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--condition", default="honest", help="of the peers, as in `coterie bench`")
    parser.add_argument("--epsilons", default="inf,8,4,2,1")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1000, help="all examples of who has fewer")
    parser.add_argument(
        "--rates", default=",".join(f"{rate:g}" for rate in RATES), help="step sizes to choose from"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    settings = parser.parse_args()
    if settings.short:
        settings.users, settings.epsilons, settings.rates = 2, "inf,4", "0.03"
    settings.rates = [float(rate) for rate in settings.rates.split(",")]
    epsilons = [None, *(float(epsilon) for epsilon in settings.epsilons.split(","))]
    print(
        f"δ = {settings.delta:g}, clipped to {settings.clip:g}, {settings.steps} steps, batches of {settings.batch}"
    )
    print("| set | ε | | step size | Alone | adaptive | change | Alone served | |")
    print("|---" * 9 + "|")
    with multiprocessing.get_context("spawn").Pool(settings.jobs) as pool:
        under_way: dict[str, dict[float | None, Any]] = {}
        for name in settings.sets.split(","):
            names = users_of(name, settings)
            under_way[name] = {
                epsilon: pool.starmap_async(
                    scores, [(name, me, epsilon, settings) for me in names], chunksize=1
                )
                for epsilon in epsilons
            }
        for name, by_epsilon in under_way.items():
            lines(
                name, {epsilon: each.get() for epsilon, each in by_epsilon.items()}, settings.rates
            )


if __name__ == "__main__":
    main()
