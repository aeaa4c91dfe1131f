"""Ditto: the penalised minimiser in closed form, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import (
    EYE,
    LOCAL_STEPS,
    PROBLEM,
    SHARES,
    START,
    N,
    balance,
    pull,
    same_models,
    weights_of,
)

from coterie.methods import Ditto, FedAvg

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("penalty", [0.1, 2.0])
def test_ditto_ends_at_the_penalised_minimiser(local_steps: int, penalty: float) -> None:
    w = balance(SHARES, pull(A, local_steps, 0.1), O)
    method = Ditto(penalty, FedAvg(local_steps), personal_steps=local_steps)
    expected = [
        torch.linalg.solve(A[k] + penalty * EYE, A[k] @ O[k] + penalty * w) for k in range(N)
    ]  # argmin f_k(v) + (λ/2)‖v − w*‖²
    assert torch.allclose(
        EXACT.play(method, rounds=800, lr=0.1), torch.stack(expected), rtol=0, atol=1e-9
    )


def test_ditto_draws_fresh_batches_for_the_personal_models() -> None:
    own = PROBLEM.gradient(0, START, step=2, batch_size=4)
    run = PROBLEM.train(Ditto(0.5, FedAvg(2)), rounds=1, lr=0.1, batch_size=4)
    assert torch.allclose(weights_of(run), -0.1 * own, rtol=0, atol=1e-12)


def test_ditto_against_a_plain_loop() -> None:
    w, v = START, [START] * N
    for _ in range(2):
        for k in range(N):
            for _ in range(2):
                v[k] = v[k] - 0.1 * (PROBLEM.gradient(k, v[k]) + 0.5 * (v[k] - w))
        w = sum((SHARES[k] * PROBLEM.walk(k, w, 3, 0.1) for k in range(N)), START)
    assert same_models(PROBLEM.train(Ditto(0.5, FedAvg(3), 2), rounds=2, lr=0.1), v)
