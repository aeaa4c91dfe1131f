"""Is the loss that adaptive averaging tells of itself that of fresh examples, and is what it serves better?

    python benchmarks/honesty.py [--repetitions 60] [--steps 200] [--jobs 1] [--problems
    classes,network]

Users in ten dimensions: 19 peers with 50 examples each; 200 steps of Adam; no validation examples.
Regression has noise of variance 1, so that no honest loss is below 1. Classes are three, by the
largest of three linear functions with noise of Gumbel's kind. Models are linear, or a network of 32
hidden units.

What is told is the cross-validated loss in the record's account, corrected for the choice. The
fresh loss is exact, 1 + ‖w − w*‖² + b², for linear regression, and that on 4,000 fresh examples for
the others. The difference is the mean over repetitions, ± one standard error; *covered*: in how
many repetitions it is within two of the errors told. *Alone*: the fresh loss of the model trained
alone beside it, whose look is chosen by the same examples; *served − last*: that of what is served
less that of Alone's last point, and the same of the accuracy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie

D, PEERS, SPREAD, CLASSES, FRESH = 10, 19, 0.3, 3, 4000


class Problem(NamedTuple):
    """Who the peers are, how many examples user 0 has, and what is learned."""

    kind: str
    own: int
    classes: bool = False
    network: bool = False


PROBLEMS = {
    "related peers, 20 own examples": Problem("related", 20),
    "half of them wrong, 20": Problem("half wrong", 20),
    "strangers, 60": Problem("strangers", 60),
    "strangers, 30": Problem("strangers", 30),
    "strangers, 15": Problem("strangers", 15),
    "another intercept, 15": Problem("shifted", 15),
    "classes, related peers, 30": Problem("related", 30, classes=True),
    "classes, strangers, 30": Problem("strangers", 30, classes=True),
    "network, related peers, 40": Problem("related", 40, network=True),
    "network, strangers, 40": Problem("strangers", 40, network=True),
    "network, classes, strangers, 40": Problem("strangers", 40, classes=True, network=True),
}


class Once(NamedTuple):
    """What one repetition gives; losses but for the error that is told and the accuracies."""

    told: float
    error: float
    fresh: float
    alone: float
    last: float
    accuracy: float
    last_accuracy: float


def examples(
    truth: Tensor, n: int, random: torch.Generator, intercept: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return n examples of a linear function with noise of variance 1, or of classes by the largest of several."""
    inputs = torch.randn(n, D, generator=random)
    if truth.shape[1] == 1:
        return inputs, inputs @ truth + torch.randn(n, 1, generator=random) + intercept
    noise = -torch.rand(n, CLASSES, generator=random).clamp(min=1e-12).log().neg().log()
    return inputs, (inputs @ truth + noise).argmax(1)


def users(
    problem: Problem, truth: Tensor, random: torch.Generator
) -> tuple[coterie.User, list[coterie.User]]:
    """Return user 0 and the peers."""
    me = coterie.User("me", *examples(truth, problem.own, random))
    peers = []
    for k in range(PEERS):
        other = torch.randn(truth.shape, generator=random)
        near = truth + SPREAD * other
        its = {
            "related": near,
            "strangers": other,
            "half wrong": near if k % 2 else -truth,
            "shifted": truth,
        }
        intercept = 3.0 if problem.kind == "shifted" else 0.0
        peers.append(coterie.User(f"peer {k}", *examples(its[problem.kind], 50, random, intercept)))
    return me, peers


def once(problem: Problem, seed: int, steps: int) -> Once:
    """Train once by adaptive averaging and once alone, and compare what is told with fresh losses."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(seed)
    outputs = CLASSES if problem.classes else 1
    truth = torch.randn(D, outputs, generator=random)
    me, peers = users(problem, truth, random)
    inputs, targets = examples(truth, FRESH, random)
    model: nn.Module = nn.Linear(D, outputs)
    if problem.network:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(D, 32), nn.Tanh(), nn.Linear(32, outputs))
    else:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    loss = cross_entropy if problem.classes else mse_loss
    settings: dict[str, Any] = {
        "lr": 0.05,
        "steps": steps,
        "batch_size": 100,
        "measure": False,
        "progress": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, alone = (
            coterie.train(model, loss, me, peers, rule, seed=seed, **settings)
            for rule in (None, coterie.Alone())
        )

    def fresh(served: nn.Module | None) -> tuple[float, float]:
        assert served is not None
        with torch.no_grad():
            if isinstance(served, nn.Linear) and not problem.classes:
                return float(
                    1 + (served.weight.T - truth).square().sum() + served.bias.square().sum()
                ), np.nan
            given = served(inputs)
            right = (given.argmax(1) == targets).float().mean() if problem.classes else np.nan
            return float(loss(given, targets)), float(right)

    account = run.record.end.account
    (ours, accuracy), (beside, _), (last, last_accuracy) = map(
        fresh, (run.model, run.alone, alone.model)
    )
    return Once(
        account["crossed_loss"],
        account["crossed_error"],
        ours,
        beside,
        last,
        accuracy,
        last_accuracy,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--problems", default="", help="parts of names; all when left out")
    options = parser.parse_args()
    seeds = range(options.repetitions)
    wanted = {
        name: one
        for name, one in PROBLEMS.items()
        if any(p in name for p in options.problems.split(","))
    }
    print(
        "| problem | told | fresh | told − fresh | covered | Alone, fresh | served − last | in accuracy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for name, problem in wanted.items():
            all_of = pool.starmap(
                once, [(problem, seed, options.steps) for seed in seeds], chunksize=1
            )
            told, error, fresh, alone, last, accuracy, last_accuracy = np.array(all_of).T
            covered = np.mean(np.abs(told - fresh) <= 2 * error)
            losses = (
                f"{told.mean():.3f} | {fresh.mean():.3f} | {_mean(told - fresh)} | {covered:.2f}"
            )
            better = f"{_mean(fresh - last)} | {_mean(accuracy - last_accuracy) if problem.classes else '–'}"
            print(f"| {name} | {losses} | {alone.mean():.3f} | {better} |", flush=True)


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
