"""Where a training may be called from: threads, a forked child, an event loop. Each must give the same bits."""

from __future__ import annotations

import asyncio
import os
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from tests.support.processes import ended, forked
from torch import nn
from torch.nn.functional import cross_entropy

import coterie


def model_of(seed: int) -> torch.Tensor:
    """Return the parameters of a small run with dropout by the default rule."""
    random = torch.Generator().manual_seed(seed)
    me, *peers = (
        coterie.User(name, torch.randn(24, 4, generator=random), torch.arange(24) % 2)
        for name in ("me", "a", "b")
    )
    layers = [nn.utils.skip_init(nn.Linear, *shape) for shape in ((4, 6), (6, 2))]  # type: ignore[no-untyped-call]  # draws nothing
    net = nn.Sequential(layers[0], nn.ReLU(), nn.Dropout(0.2), layers[1])
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 2)
    run = coterie.train(
        net, cross_entropy, me, peers, steps=12, lr=0.05, seed=seed, measure=False, progress=False
    )
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def in_threads(n: int) -> int:
    """Train n runs in four threads; return how many gave other bits, or left generators or filters altered."""
    expected = [model_of(seed) for seed in range(n)]
    torch.manual_seed(5)
    state, filters, python = torch.get_rng_state(), list(warnings.filters), random.getstate()
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(model_of, range(n)))
    altered = not torch.equal(state, torch.get_rng_state()) or filters != list(warnings.filters)
    altered = altered or python != random.getstate()
    return sum(not torch.equal(a, b) for a, b in zip(models, expected, strict=True)) + altered


def in_forks(n: int) -> int:
    """Train n runs in forked children; return how many failed or gave other bits."""
    failed = 0
    for seed in range(n):
        expected = model_of(seed)

        def child(seed: int = seed, expected: torch.Tensor = expected) -> None:
            if not torch.equal(model_of(seed), expected):
                os._exit(3)

        failed += ended(forked(child), patience=120) != 0
    return failed


def in_event_loop(n: int) -> int:
    """Train n runs inside a running event loop, as in a notebook; return how many gave other bits."""

    async def notebook() -> int:
        return sum(not torch.equal(model_of(seed), expected[seed]) for seed in range(n))

    expected = [model_of(seed) for seed in range(n)]
    return asyncio.run(notebook())


SURROUNDINGS: dict[str, Callable[[int], int]] = {
    "threads": in_threads,
    "fork": in_forks,
    "event loop": in_event_loop,
}
