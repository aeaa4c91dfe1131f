"""Peers that lie in their gradients, and none of user 0's rows held out for validation: is Alone safe?

    python benchmarks/lying_gradients.py [--seeds 20] [--steps 60] [--attacks drift,late]
    python benchmarks/lying_gradients.py --e-steps [--seeds 20]

Three classes of five columns; user 0 has 30 rows, ten peers have 60 each, a fifth of their truth is
their own. One or four of them lie. A row of the table is the log loss on 2,000 fresh rows of what
adaptive averaging serves, less that of the same run's mixture of candidates that ask nobody: the
mean over seeds, ± one standard error, for a linear model by gradient steps alone and for a network.
A last line says in how many cells it is worse by more than three.

With `--e-steps` they lie in their answers to the closed form of a linear model: four columns and a
number, user 0 has 30 rows and ten peers of its own kind 50; the squared error on 2,000 fresh rows
less that of the same fit without peers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines import attacks
from coterie.evaluation.evaluate import evaluate


@dataclass(frozen=True)
class Late:
    """Behave while peers are judged, and lie then."""

    first: int

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return what n peers send."""
        return attacks.Scaled(1.0 if step < self.first else -10.0)(honest, n, step)


@dataclass(frozen=True)
class Noise:
    """Send noise as long as honest gradients."""

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return what n peers send."""
        draws = torch.randn((n, honest.shape[1]), generator=torch.Generator().manual_seed(step)).to(
            honest
        )
        length = honest.norm(dim=1).mean() / draws.norm(dim=1, keepdim=True)
        return draws.mul_(length)


def all_attacks(steps: int) -> dict[str, attacks.Attack]:
    """Return ten ways to lie."""
    return {
        "sign flip": attacks.sign_flip(),
        "-2 x": attacks.Scaled(-2.0),
        "-10 x": attacks.Scaled(-10.0),
        "100 x": attacks.Scaled(100.0),
        "inner product": attacks.inner_product(0.5),
        "little is enough": attacks.LittleIsEnough(),
        "drift": attacks.AlternatingDrift(z=1.5, period=max(2, steps // 4)),
        "mimic": attacks.Mimic(),
        "noise": Noise(),
        "late": Late(steps // 2),
    }


def users(seed: int) -> tuple[coterie.User, list[coterie.User], coterie.User]:
    """Return user 0, ten peers, and fresh rows of user 0."""
    random = np.random.default_rng(seed)
    truth = 1.5 * random.normal(size=(5, 3))

    def one(name: str, n: int, of: Any) -> coterie.User:
        x = random.normal(size=(n, 5))
        y = (x @ of + random.gumbel(size=(n, 3))).argmax(1)
        return coterie.User(name, torch.from_numpy(x).float(), torch.from_numpy(y))

    mine = truth + 0.3 * random.normal(size=truth.shape)
    peers = [one(str(k), 60, truth + 0.3 * random.normal(size=truth.shape)) for k in range(10)]
    return one("me", 30, mine), peers, one("fresh", 2000, mine)


def excess(attack: attacks.Attack, liars: int, seed: int, steps: int, *, network: bool) -> float:
    """Return the log loss of what is served, less that of Alone's mixture."""
    me, peers, fresh = users(seed)
    names = [peer.name for peer in peers[:liars]]

    def engine(*problem: Any, **settings: Any) -> coterie.Engine:
        return attacks.Attacked(coterie.InProcess(*problem, **settings), names, attack)

    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    if network:
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))  # type: ignore[assignment]
    rule = coterie.AdaptiveAveraging(linear=network)
    settings: dict[str, Any] = {"lr": 0.03, "steps": steps, "seed": seed, "engine": engine}
    run = coterie.train(
        model, cross_entropy, me, peers, rule, measure=False, progress=False, **settings
    )
    if run.alone is None:
        raise AssertionError("adaptive averaging trains alone beside")
    served, alone = (
        evaluate(each, cross_entropy, fresh.examples)["loss"] for each in (run.model, run.alone)
    )
    return float(served - alone)


def in_e_steps(seeds: int) -> None:
    """Print the table of lies about E-steps."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    support = importlib.import_module("tests.support.liars")
    worse = 0
    print("| lie | one of ten | four |")
    print("|---|---|---|")
    for lie in support.E_STEPS:
        shown = []
        for liars in (1, 4):
            each = np.array(
                [support.cost_in_e_steps(lie, 10, seed, liars) for seed in range(seeds)]
            )
            error = each.std(ddof=1) / len(each) ** 0.5
            worse += bool(each.mean() > 3 * error)
            shown.append(f"{each.mean():+.3f} ± {error:.3f}")
        print(f"| {lie} | {' | '.join(shown)} |", flush=True)
    print(
        f"\nworse than Alone by more than three standard errors in {worse} of {2 * len(support.E_STEPS)} cells"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attacks", default="")
    parser.add_argument("--e-steps", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.e_steps:
        in_e_steps(asked.seeds)
        return
    ways = all_attacks(asked.steps)
    names = asked.attacks.split(",") if asked.attacks else list(ways)
    worse = cells = 0
    print("| lie | linear, one of ten | linear, four | network, one of ten | network, four |")
    print("|---|---|---|---|---|")
    for name in names:
        shown = []
        for network in (False, True):
            for liars in (1, 4):
                each = np.array(
                    [
                        excess(ways[name], liars, seed, asked.steps, network=network)
                        for seed in range(asked.seeds)
                    ]
                )
                error = each.std(ddof=1) / len(each) ** 0.5
                worse, cells = worse + bool(each.mean() > 3 * error), cells + 1
                shown.append(f"{each.mean():+.3f} ± {error:.3f}")
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    print(f"\nworse than Alone by more than three standard errors in {worse} of {cells} cells")


if __name__ == "__main__":
    main()
