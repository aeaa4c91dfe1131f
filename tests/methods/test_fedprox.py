"""FedProx: FedAvg without a penalty, and its point in closed form with one."""

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

from coterie.methods import FedAvg, FedProx


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("penalty", [0.3, 3.0])
def test_fedprox_ends_where_the_penalised_moves_balance(local_steps: int, penalty: float) -> None:
    """x_K − x = −(1 − (1 − ηM)^K) M⁻¹A (x − o), since K steps go towards the centre M⁻¹(Ao + μx)."""
    held_back = PROBLEM.curvatures + penalty * EYE
    moves = pull(held_back, local_steps, 0.1) @ torch.linalg.solve(held_back, PROBLEM.curvatures)
    expected = balance(SHARES, moves, PROBLEM.optima)
    models = EXACT.play(FedProx(local_steps, penalty=penalty), rounds=2000, lr=0.1)
    assert torch.allclose(models, expected.expand_as(models), rtol=0, atol=1e-9)


def test_fedprox_without_a_penalty_is_fedavg_to_the_bit() -> None:
    runs = [
        PROBLEM.train(method, rounds=4, lr=0.1, batch_size=4)
        for method in (FedProx(3, penalty=0.0), FedAvg(3))
    ]
    assert torch.equal(weights_of(runs[0]), weights_of(runs[1]))


def test_fedprox_against_a_plain_loop() -> None:
    x = START
    for _ in range(3):
        ends = []
        for k in range(N):
            y = x
            for _ in range(2):
                y = y - 0.1 * (PROBLEM.gradient(k, y) + 0.7 * (y - x))
            ends.append(SHARES[k] * y)
        x = torch.stack(ends).sum(0)
    assert same_models(PROBLEM.train(FedProx(2, penalty=0.7), rounds=3, lr=0.1), [x] * N)
