"""WAFFLE: what it weighs, where it ends, and a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.least_squares import (
    COPIES_AND_STRANGERS,
    LOCAL_STEPS,
    OTHER,
    PROBLEM,
    START,
    TRUTH,
    D,
    LeastSquares,
    N,
    weights_of,
)
from torch import Tensor

import coterie
from coterie.methods import Waffle


def waffle_weights(points: list[Tensor], share: float) -> list[float]:
    far = [float((point - points[0]).square().sum()) for point in points]
    least, largest = min(far[1:]), max(far[1:])
    far[0] = least * (1 - (largest - least) / largest * (1 - share))
    raw = [max(share - (d - far[0]) / (largest - far[0]), 0.0) for d in far]
    return [w / sum(raw) for w in raw]


def test_waffle_against_a_plain_loop() -> None:
    """Six rounds of eight, more than the three that weights are averaged over."""
    x, c, c_k = START, START, [START] * N
    last: list[list[float]] = []
    for r in range(6):
        points = [PROBLEM.walk(k, x, 3, 0.05, c - c_k[k]) for k in range(N)]
        following = [c_k[k] - c + (x - points[k]) / (3 * 0.05) for k in range(N)]
        last = [*last, waffle_weights(points, 1 / (1 + math.exp(3.2 * (r / 4 - 1))))][-3:]
        a = [sum(column) / len(last) for column in zip(*last, strict=True)]
        x = x + sum(a[k] * (points[k] - x) for k in range(N))
        c = c + sum((a[k] * (following[k] - c_k[k]) for k in range(N)), START)
        c_k = following
    run = PROBLEM.train(Waffle(8, 3), rounds=6, lr=0.05)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(a)
    assert run.state["weight"] == pytest.approx(sum(a[1:]))


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
def test_waffle_ends_alone_with_a_correction_that_is_out_of_date(local_steps: int) -> None:
    rounds = 240 // local_steps
    run = PROBLEM.train(Waffle(rounds // 2, local_steps), rounds=rounds, lr=0.1)
    left = run.state["c_k"][0] - run.state["c"]
    assert torch.allclose(PROBLEM.gradient(0, weights_of(run)), left, rtol=0, atol=1e-3)
    assert float(left.norm()) > 0.05


def test_waffle_hears_copies_first_and_strangers_less() -> None:
    first = COPIES_AND_STRANGERS.train(Waffle(20, 2), rounds=1, lr=0.05).state["weights"]
    assert float(first[[1, 3]].min()) > 0.25
    assert float(first[2]) == 0 < float(first[4]) < 0.2


def test_waffle_cannot_tell_users_of_one_curvature_once_corrections_are_there() -> None:
    """Whose gradients differ by constants: from the second round on their updates, and so their c_k, move alike."""
    inputs = torch.randn(30, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    users = [
        coterie.User(f"user {k}", inputs, (inputs @ truth).unsqueeze(1))
        for k, truth in enumerate([TRUTH, -TRUTH, OTHER])
    ]
    problem = LeastSquares(users, torch.empty(0), torch.empty(0))
    one, two = (problem.train(Waffle(9, 1), rounds=r, lr=0.05).state["c_k"] for r in (1, 2))
    assert float((two - one).std(0).max()) < 1e-12
    assert float(one.std(0).min()) > 0.1
