"""Fewer exchanges: what they cost in accuracy on real users, and what they save in time where messages are slow.

    python benchmarks/exchanges.py [--data DIR] [--sets digits,mnist] [--users 8] [--jobs 16]
    python benchmarks/exchanges.py --latency    # over NVFLARE on this machine: `exchanges_flare.py`
    python benchmarks/exchanges.py --short      # half a minute: two users of digits, few settings

*Accuracy.* Users of a set are user 0 in turn, with the examples and peers of `coterie bench`,
honest. All runs take the same number of own gradients, by plain SGD; the best model by validation
loss counts, on test examples. The step size of each line is that of the least mean validation loss
over the users. Differences to an exchange at every step are paired by user, ± one standard error; a
line is *as good* where it is not below by more than that.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.benchmark.sets import SETS
from coterie.choosing.adaptive.adaptive_learner import Schedule

RULES: dict[str, coterie.Rule | coterie.AdaptiveAveraging] = {
    "averaging": coterie.WeightedAveraging(0.6),
    "bias correction": coterie.BiasCorrection(0.9, 0.1, correction=0.5),
    "adaptive": coterie.AdaptiveAveraging(),  # stale peers only
}
KINDS = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (4, 4)]
RATES = (0.03, 0.1, 0.3, 1.0)


def scores(
    name: str, me: str, settings: argparse.Namespace
) -> dict[tuple[str, tuple[int, int], float], list[float]]:
    """Return the validation loss and the test accuracy of one user by rule, kind and step size."""
    torch.set_num_threads(1)
    task, model = problem_of(name, me, settings.data, "mlp" if name == "mnist" else "linear")
    measured = {}
    for (rule, each), lr in itertools.product(
        itertools.product(settings.rules, settings.kinds), settings.rates
    ):
        if rule == "adaptive" and each[1] > 1:
            continue
        run = coterie.train(
            model,
            cross_entropy,
            task.me,
            task.peers,
            RULES[rule],
            optimizer=torch.optim.SGD,
            lr=lr,
            steps=settings.gradients // each[1],
            evaluate_every=max(1, settings.gradients // each[1] // 15),
            batch_size=SETS[name].batch_size,
            exchange_every=each[0],
            local_steps=each[1],
            guard="off",
            progress=False,
            measure=False,
        )
        losses = [point.validation["loss"] for point in run.record.points]
        measured[rule, each, lr] = [float(np.nanmin(losses)), run.test["accuracy"]]
    return measured


def table(
    name: str, by_user: list[dict[tuple[str, tuple[int, int], float], list[float]]], gradients: int
) -> None:
    """Print the lines of a set."""
    for rule in dict.fromkeys(rule for rule, _, _ in by_user[0]):
        best: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        rates = {}
        for _, each in dict.fromkeys((r, k) for r, k, _ in by_user[0] if r == rule):
            by_rate = {
                lr: np.array([user[rule, each, lr] for user in by_user])
                for r, k, lr in by_user[0]
                if (r, k) == (rule, each)
            }
            rates[each] = min(
                by_rate, key=lambda lr: float(np.nan_to_num(by_rate[lr][:, 0], nan=np.inf).mean())
            )
            best[each] = by_rate[rates[each]][:, 1]
        for each, accuracy in best.items():
            change = accuracy - best[1, 1]
            error = change.std(ddof=1) / len(change) ** 0.5
            good = "as good" if change.mean() >= -error else ""
            exchanges = gradients // (each[0] * each[1])
            if rule == "adaptive":  # which also asks where it judges, and at the fork
                exchanges = sum(Schedule.of(gradients).exchanges(each[0]))
            print(
                f"| {name}, {rule} | {each[0]} | {each[1]} | {exchanges} | {rates[each]:g} | "
                f"{accuracy.mean():.3f} | {change.mean():+.4f} ± {error:.4f} | {good} |",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument("--gradients", type=int, default=240, help="own gradients of each run")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument(
        "--kinds",
        default=",".join(f"{k}x{s}" for k, s in KINDS),
        help="exchange_every x local_steps",
    )
    parser.add_argument(
        "--rates",
        default=",".join(f"{rate:g}" for rate in RATES),
        help="step sizes to choose among",
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument(
        "--latency", action="store_true", help="time to a loss over NVFLARE, instead"
    )
    settings = parser.parse_args()
    if settings.latency:
        from exchanges_flare import latency  # noqa: PLC0415  # NVFLARE need not be installed for the other part

        return latency(short=settings.short)
    if settings.short:
        settings.rules, settings.kinds, settings.rates, settings.users = (
            "averaging",
            "1x1,8x1,1x8",
            "0.1,0.3",
            2,
        )
    settings.rules = settings.rules.split(",")
    settings.kinds = [tuple(map(int, kind.split("x"))) for kind in settings.kinds.split(",")]
    settings.rates = [float(rate) for rate in settings.rates.split(",")]
    print(
        "| set, rule | exchange_every | local_steps | exchanges | step size | accuracy | change | |"
    )
    print("|---" * 8 + "|")
    with multiprocessing.get_context("spawn").Pool(settings.jobs) as pool:
        under_way = {}
        for name in settings.sets.split(","):
            names = users_of(name, settings)
            under_way[name] = pool.starmap_async(
                scores, [(name, me, settings) for me in names], chunksize=1
            )
        for name, waiting in under_way.items():
            table(name, waiting.get(), settings.gradients)


if __name__ == "__main__":
    main()
