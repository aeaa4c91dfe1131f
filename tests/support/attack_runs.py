"""Training under attack: digits by writer, k of ten peers attack. For `benchmarks/campaign.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines import attacks
from coterie.engines.engine import MakeEngine
from coterie.users.examples import InMemory

PEERS, WRITERS = 10, (0, 3, 5, 9, 12)
"""How many peers there are, and which writer is user 0 under each seed."""


@dataclass(frozen=True)
class Noise:
    """Send noise as long as the good peers' gradients."""

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n rows of noise, the same for all."""
        random = torch.randn(honest.shape[1], generator=torch.Generator().manual_seed(step)).to(
            honest
        )
        row: Tensor = random / random.norm() * honest.norm(dim=1).median()
        return row.expand(n, -1).clone()


@dataclass(frozen=True)
class Late:
    """Behave until a step, then send −10 × the good peers' mean."""

    first: int = 100

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n times what is sent at a step."""
        return attacks.Scaled(1.0 if step < self.first else -10.0)(honest, n, step)


@dataclass(frozen=True)
class NotANumber:
    """Send what is not a number."""

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n rows of it."""
        return torch.full_like(honest[:1], torch.nan).expand(n, -1).clone()


GRADIENTS: dict[str, attacks.Attack] = {
    "sign flip": attacks.sign_flip(),
    "−2 ×": attacks.Scaled(-2.0),
    "−10 ×": attacks.Scaled(-10.0),
    "100 ×": attacks.Scaled(100.0),
    "10⁶ ×": attacks.Scaled(1e6),
    "not a number": NotANumber(),
    "inner product": attacks.inner_product(0.5),
    "little is enough": attacks.LittleIsEnough(),
    "drift": attacks.AlternatingDrift(z=1.5, period=50),
    "mimic": attacks.Mimic(),
    "noise": Noise(),
    "late −10 ×": Late(),
}
ATTACKS = (*GRADIENTS, "wrong labels", "leak")
"""All 14: twelve on gradients, and two on data: labels c → 9 − c, and copies of user 0's validation examples."""

RULES: dict[str, Callable[[], Any]] = {
    "wga": lambda: coterie.WeightedAveraging(0.5),
    "bc": lambda: coterie.BiasCorrection(0.5, 0.1),
    "adaptive": coterie.AdaptiveAveraging,
}


@cache
def users(seed: int) -> tuple[coterie.User, tuple[coterie.User, ...]]:
    """Return user 0 and its ten peers."""
    task = coterie.data.digits_by_writer(
        me=WRITERS[seed % len(WRITERS)], own_examples=30, seed=seed
    )
    return task.me, task.peers[:PEERS]


def accuracy(
    rule: str, attack: str, k: int, seed: int, *, guarded: bool, steps: int = 200
) -> float:
    """Return the accuracy on user 0's test examples where k peers attack; rule "alone" asks nobody."""
    me, peers = users(seed)
    names = [peer.name for peer in peers[:k]]
    if attack not in GRADIENTS and k:
        peers = tuple(_bad(peer, me, attack) if peer.name in names else peer for peer in peers)
    torch.manual_seed(seed)
    run = coterie.train(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        *(cross_entropy, me, peers, coterie.Alone() if rule == "alone" else RULES[rule]()),
        lr=0.03,
        steps=steps,
        seed=seed,
        engine=under(GRADIENTS.get(attack), names),
        guard="held-out" if guarded and rule != "alone" else "off",
        measure=False,
        progress=False,
    )
    return float(run.test["accuracy"])


def under(attack: attacks.Attack | None, names: Sequence[str]) -> MakeEngine:
    """Return what makes an engine in this process in which these peers attack; nobody does where there is none."""

    def engine(*problem: Any, **settings: Any) -> coterie.Engine:
        inside = coterie.InProcess(*problem, **settings)
        return inside if attack is None else attacks.Attacked(inside, names, attack)

    return engine


def _bad(peer: coterie.User, me: coterie.User, attack: str) -> coterie.User:
    if attack == "wrong labels":
        return attacks.flip_labels(peer, n_classes=10)
    assert me.validation is not None
    leaking = copy.copy(peer)
    leaking.examples = InMemory(*me.validation.take(torch.arange(len(me.validation))))
    return leaking
