"""Per-FedAvg: fixed points in closed form, automatic differentiation and a plain loop."""

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
from torch import Tensor

from coterie.methods import PerFedAvg

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


def meta_curvatures(inner_lr: float, *, hessian: bool) -> Tensor:
    """Return B_k, of which the steps of Per-FedAvg are x − ηB_k(x − o_k)."""
    adapted = A @ (EYE - inner_lr * A)
    return (EYE - inner_lr * A) @ adapted if hessian else adapted


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("difference", [None, 1e-2])
def test_per_fedavg_ends_at_its_fixed_point(local_steps: int, difference: float | None) -> None:
    b = meta_curvatures(0.1, hessian=difference is not None)
    meta = balance(EQUAL, pull(b, local_steps, 0.1), O)
    models = EXACT.play(PerFedAvg(local_steps, 0.1, difference), rounds=600, lr=0.1)
    assert torch.allclose(
        models, meta - 0.1 * EXACT.gradients(meta.expand(N, -1), 0), rtol=0, atol=1e-9
    )


def test_per_fedavg_without_hessian_products_minimises_the_meta_objective() -> None:
    """Autograd says so, of mean f_k(x − a∇f_k(x)); the first-order variant's point is another."""

    def slope(difference: float | None) -> float:
        state = PerFedAvg(1, 0.1, difference).init(EXACT, START)
        for _ in range(600):
            state = PerFedAvg(1, 0.1, difference).round(EXACT, state, 0.1)
        x = state["x"].clone().requires_grad_()
        adapted = x - 0.1 * EXACT.gradients(x.expand(N, -1), 0)
        objective = torch.einsum("ki,kij,kj->", adapted - O, A, adapted - O) / (2 * N)
        return float(torch.autograd.grad(objective, x)[0].norm())

    assert slope(1e-2) < 1e-9
    assert slope(None) > 1e-3


@pytest.mark.parametrize("difference", [None, 1e-2])
def test_per_fedavg_against_a_plain_loop(difference: float | None) -> None:
    x = START
    for _ in range(2):
        ends = []
        for k in range(N):
            y = x
            for _ in range(3):
                outer = PROBLEM.gradient(k, y - 0.2 * PROBLEM.gradient(k, y))
                product = A[k] @ outer if difference else 0.0
                y = y - 0.1 * (outer - 0.2 * product)
            ends.append(y)
        x = torch.stack(ends).mean(0)
    run = PROBLEM.train(PerFedAvg(3, 0.2, difference), rounds=2, lr=0.1)
    assert same_models(run, [x - 0.2 * PROBLEM.gradient(k, x) for k in range(N)])


def test_per_fedavg_takes_a_fresh_batch_for_every_gradient() -> None:
    """One round at batches of 4: batch 0 adapts, batch 1 steps, batch 2 makes the personal model."""

    def batch_gradient(k: int, x: Tensor, step: int) -> Tensor:
        return PROBLEM.gradient(k, x, step, batch_size=4)

    moved = [
        START - 0.1 * batch_gradient(k, START - 0.2 * batch_gradient(k, START, 0), 1)
        for k in range(N)
    ]
    x = torch.stack(moved).mean(0)
    run = PROBLEM.train(PerFedAvg(1, 0.2), rounds=1, lr=0.1, batch_size=4)
    assert same_models(run, [x - 0.2 * batch_gradient(k, x, 2) for k in range(N)])
