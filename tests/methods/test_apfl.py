"""APFL: where its mixture stands still, in closed form, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import (
    EQUAL,
    EYE,
    LOCAL_STEPS,
    PROBLEM,
    START,
    N,
    balance,
    pull,
    same_models,
)

from coterie.methods import APFL

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("mixing", [0.3, 0.8])
def test_apfl_ends_where_its_mixture_stands_still(local_steps: int, mixing: float) -> None:
    """In a round v ← Mv + b with M = 1 − ηa²A and w_k on its way from w to o_k; K = 1: the own optimum."""
    lr, expected = 0.3, []
    w = balance(EQUAL, pull(A, local_steps, lr), O)
    for k in range(N):
        m = EYE - lr * mixing**2 * A[k]
        b = START
        for j in range(local_steps):
            on_the_way = O[k] + torch.linalg.matrix_power(EYE - lr * A[k], j) @ (w - O[k])
            b = m @ b - lr * mixing * A[k] @ ((1 - mixing) * on_the_way - O[k])
        v = torch.linalg.solve(EYE - torch.linalg.matrix_power(m, local_steps), b)
        expected.append(mixing * v + (1 - mixing) * w)
    models = EXACT.play(APFL(local_steps, mixing, learned=False), rounds=5000 // local_steps, lr=lr)
    assert torch.allclose(models, torch.stack(expected), rtol=0, atol=1e-9)
    assert torch.allclose(models, O, rtol=0, atol=1e-9) == (local_steps == 1)


def test_apfl_with_learned_mixing_ends_at_the_own_optimum_too() -> None:
    assert torch.allclose(EXACT.play(APFL(1), rounds=4000, lr=0.2), O, rtol=0, atol=1e-9)


@pytest.mark.parametrize("learned", [False, True])
def test_apfl_against_a_plain_loop(learned: bool) -> None:
    w, v, a = START, [START] * N, [0.4] * N
    seen = []
    for _ in range(3):
        ends = []
        for k in range(N):
            y = w
            for j in range(2):
                mixed, difference = PROBLEM.gradient(k, a[k] * v[k] + (1 - a[k]) * y), v[k] - y
                v[k], y = v[k] - 0.3 * a[k] * mixed, y - 0.3 * PROBLEM.gradient(k, y)
                if learned and j == 0:
                    a[k] = min(1.0, max(0.0, a[k] - 0.3 * float(difference @ mixed)))
            ends.append(y)
        w = torch.stack(ends).mean(0)
        seen += a
    run = PROBLEM.train(APFL(2, 0.4, learned), rounds=3, lr=0.3)
    assert same_models(run, [a[k] * v[k] + (1 - a[k]) * w for k in range(N)])
    assert (0.0 in seen or 1.0 in seen) == learned  # the clamp is met
