"""pFedMe: where its envelopes balance, in closed form, and a plain loop."""

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

from coterie.methods import PFedMe

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("inner_steps", [1, 6])
def test_pfedme_ends_where_its_envelopes_balance(local_steps: int, inner_steps: int) -> None:
    penalty, inner_lr, lr = 1.5, 0.1, 0.2
    near = pull(A + penalty * EYE, inner_steps, inner_lr) @ torch.linalg.solve(A + penalty * EYE, A)
    w = balance(EQUAL, pull(penalty * near, local_steps, lr), O)
    method = PFedMe(local_steps, penalty, inner_steps, inner_lr)
    state = method.init(EXACT, START)
    for _ in range(800 // local_steps):
        state = method.round(EXACT, state, lr)
    assert torch.allclose(state["w"], w, rtol=0, atol=1e-9)


def test_with_an_exact_inner_solution_it_ends_at_the_minimiser_of_the_mean_envelope() -> None:
    """The envelope of f_k has the curvature λ(A + λ)⁻¹A, and the personal model is its proximal point."""
    penalty = 2.0
    near = torch.linalg.solve(A + penalty * EYE, A)
    w = balance(EQUAL, penalty * near, O)
    expected = [w - near[k] @ (w - O[k]) for k in range(N)]
    models = EXACT.play(PFedMe(1, penalty, inner_steps=100, inner_lr=0.15), rounds=300, lr=0.3)
    assert torch.allclose(models, torch.stack(expected), rtol=0, atol=1e-9)


def test_pfedme_against_a_plain_loop() -> None:
    """Every local step has its batch, on which all inner steps are taken; β moves w part of the way."""
    w, theta = START, [START] * N

    def gradient(k: int, x: Tensor, step: int) -> Tensor:
        return PROBLEM.gradient(k, x, step, batch_size=4)

    for t in range(2):
        ends = []
        for k in range(N):
            local = w
            for step in (2 * t, 2 * t + 1):
                theta[k] = local
                for _ in range(3):
                    theta[k] = theta[k] - 0.1 * (
                        gradient(k, theta[k], step) + 0.5 * (theta[k] - local)
                    )
                local = local - 0.2 * 0.5 * (local - theta[k])
            ends.append(local)
        w = 0.3 * w + 0.7 * torch.stack(ends).mean(0)
    method = PFedMe(2, penalty=0.5, inner_steps=3, inner_lr=0.1, server_lr=0.7)
    assert same_models(PROBLEM.train(method, rounds=2, lr=0.2, batch_size=4), theta)
