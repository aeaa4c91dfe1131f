"""Peers that answer the closed form or trees with a program of their own: what they cost user 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.mixture.answers import EStep, StackedUsers
from coterie.mixture.families import SQUARED, Array
from coterie.mixture.fit import fit_here

Lie = Callable[[Array, np.random.Generator], Array]


def _share(value: float) -> Lie:
    """Return a lie about the share alone, which all sums are divided by."""

    def lie(honest: Array, _: np.random.Generator) -> Array:
        return np.column_stack([np.full(len(honest), value), honest[:, 1:]])

    return lie


E_STEPS: dict[str, Lie] = {
    "NaN": lambda honest, _: np.full_like(honest, np.nan),
    "one NaN": lambda honest, _: np.where(
        np.arange(honest.size).reshape(honest.shape), honest, np.nan
    ),
    "infinite": lambda honest, _: np.full_like(honest, -np.inf),
    "huge": lambda honest, _: np.full_like(honest, 1e300),
    "least": lambda honest, _: np.full_like(honest, -1.0),
    "nothing": lambda honest, _: np.zeros_like(honest),
    "noise": lambda honest, rng: np.asarray(rng.uniform(-1, 1, honest.shape)),
    "turned round": lambda honest, _: -honest,
    "share -1": _share(-1.0),
    "share 0": _share(0.0),
    "share 1": _share(1.0),
}
"""Of the numbers of an E-step, each of which is to lie in [−1, 1]."""

HISTOGRAMS: dict[str, Lie] = {
    "NaN": lambda sums, _: sums * np.nan,
    "huge": lambda sums, _: sums * 1e6,
    "nothing": lambda sums, _: 0 * sums,
    "negative": lambda sums, _: -sums,
    "turned round": lambda sums, _: sums * [-1, 1, 1],
    "many rows": lambda sums, _: sums / max(1e-9, float(sums[..., 2].max())) / 4,
    "no curvature": lambda sums, _: sums * [1, 0, 1],
    "noise": lambda sums, rng: sums * [1, 1, 1] * rng.choice([-1, 1], sums.shape[1:]),
    "exchanged": lambda sums, _: sums[..., ::-1, :],
}
"""Of histograms, (bins, trees, nodes, 3). The last five may be true of some rows, and pass all checks."""


def cost_in_e_steps(lie: str, peers: int, seed: int = 0, liars: int = 1) -> float:
    """Return by how much the loss on new rows exceeds Alone's where the first of so many peers lie."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=4)

    def user(n: int) -> tuple[Array, Array]:
        x = rng.normal(size=(n, 4))
        return x, x @ truth + rng.normal(size=n)

    own, others, (x, y) = user(30), [user(50) for _ in range(peers)], user(2000)
    honest, asked = EStep.answers, list[int]()

    def answers(self: EStep, users: StackedUsers, *args: Any) -> Array:
        told = honest(self, users, *args)
        if len(told) != peers:
            raise AssertionError("peers with as many rows as each other answer together")
        for k in range(liars):
            asked.append(k)
            told[k] = E_STEPS[lie](told[k], rng)
        return told

    with mock.patch.object(EStep, "answers", answers):
        found = fit_here(*own, others, SQUARED)
    if not asked:
        raise AssertionError("nobody was asked")
    alone = fit_here(*own, [], SQUARED)
    inputs = np.column_stack([x, np.ones(len(x))])
    loss, without = (
        float(SQUARED.reported_losses(inputs @ one.served.parameters, y[:, None]).mean())
        for one in (found, alone)
    )
    return loss - without


def cost_in_trees(lie: str, peers: int, liars: int, seed: int = 0) -> float:
    """Return the same where the first of the peers lie about the histograms of their rows."""
    random, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def user(name: str, n: int) -> coterie.User:
        x = torch.randn(n, 3, generator=random)
        y = x[:, :1] * x[:, 1:2] + x[:, 2:] + 0.3 * torch.randn(n, 1, generator=random)
        return coterie.User(name, x, y)

    me, test = user("me", 40), user("test", 2000)
    others = [user(f"peer {k}", 60) for k in range(peers)]
    loss = torch.nn.functional.mse_loss
    held = {p.name: Peer(p, Passes(torch.nn.Linear(3, 1), loss)) for p in others}

    class Lying(LocalSites):
        def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> Any:
            replies = dict(super().ask(names, method, timeout, **arguments).wait())
            asked = arguments.get("request", {}).get("e_step") or {}
            for name in list(replies)[:liars] if asked.get("told") == "histograms" else ():
                given = replies[name]["gradients"]
                lanes = asked["values"].shape[1]
                sums = given.reshape(-1, lanes, asked["growing"].shape[1] + 1, 3)
                changed = np.ascontiguousarray(HISTOGRAMS[lie](sums, rng).reshape(given.shape))
                replies[name] = replies[name] | {"gradients": changed}
            return LocalReplies(replies)

    def lost(engine: Any) -> float:
        run = coterie.train(
            *(torch.nn.Linear(3, 1), loss, me, (), coterie.Mixture(trees=True)),
            engine=engine,
            measure=False,
            progress=False,
        )
        with torch.no_grad():
            inputs, targets = test.take(torch.arange(2000), seed=0, step=0)
            return float(loss(run.model(inputs), targets))

    there = partial(Remote, sites=Lying(held), names=list(held), misses=3)
    return lost(there) - lost(partial(Remote, sites=LocalSites({}), names=["nobody"]))
