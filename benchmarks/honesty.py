"""Is the loss that adaptive averaging tells of itself the one that fresh examples give?

    python benchmarks/honesty.py [--repetitions 60] [--steps 200] [--jobs 1]

Linear regression in ten dimensions with noise of variance 1, so that no honest loss is below 1; 19 peers with 50
examples each; 200 steps of Adam; no validation examples. What is told is the cross-validated loss in the record's
account, corrected for the choice; the fresh loss of the model served is exact, 1 + ‖w − w*‖² + b². The difference
is the mean over repetitions, ± one standard error. *Alone*: the fresh loss of the model trained alone beside it,
whose look is chosen by the same examples; *served − last*: that of what is served less that of Alone's last point.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import coterie

D, PEERS, SPREAD = 10, 19, 0.3
PROBLEMS = {
    "related peers, 20 own examples": ("related", 20),
    "half of them wrong, 20": ("half wrong", 20),
    "strangers, 60": ("strangers", 60),
    "strangers, 30": ("strangers", 30),
    "strangers, 15": ("strangers", 15),
    "another intercept, 15": ("shifted", 15),
}


def examples(
    truth: torch.Tensor, n: int, random: torch.Generator, intercept: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n examples of a linear function with noise of variance 1."""
    inputs = torch.randn(n, D, generator=random)
    return inputs, inputs @ truth.unsqueeze(1) + torch.randn(n, 1, generator=random) + intercept


def once(kind: str, own: int, seed: int, steps: int) -> tuple[float, float, float, float]:
    """Return the loss told, and fresh losses: of what is served, of Alone beside it, of Alone's last point."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(seed)
    truth = torch.randn(D, generator=random)
    me = coterie.User("me", *examples(truth, own, random))
    peers = []
    for k in range(PEERS):
        other = torch.randn(D, generator=random)
        near = truth + SPREAD * other
        its = {"related": near, "strangers": other, "half wrong": near if k % 2 else -truth, "shifted": truth}
        intercept = 3.0 if kind == "shifted" else 0.0
        peers.append(coterie.User(f"peer {k}", *examples(its[kind], 50, random, intercept)))
    model = nn.Linear(D, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    settings: dict[str, Any] = {"lr": 0.05, "steps": steps, "batch_size": 100, "measure": False, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, alone = (
            coterie.train(model, mse_loss, me, peers, rule, seed=seed, **settings)
            for rule in (None, coterie.Alone())
        )

    def fresh(served: nn.Module | None) -> float:
        assert isinstance(served, nn.Linear)
        off = (served.weight.detach()[0] - truth).square().sum() + served.bias.detach().square().sum()
        return float(1 + off)

    return float(run.record.end.account["crossed_loss"]), fresh(run.model), fresh(run.alone), fresh(alone.model)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.repetitions)
    print("| problem | told | fresh | told − fresh | Alone, fresh | served − last |\n|---|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for name, (kind, own) in PROBLEMS.items():
            repetitions = pool.starmap(once, [(kind, own, seed, options.steps) for seed in seeds], chunksize=1)
            told, fresh, alone, last = np.array(repetitions).T
            losses = f"{told.mean():.3f} | {fresh.mean():.3f} | {_mean(told - fresh)} | {alone.mean():.3f}"
            print(f"| {name} | {losses} | {_mean(fresh - last)} |", flush=True)


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
