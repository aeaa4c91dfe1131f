"""FedAvg: its biased point in closed form, and an aggregator in the place of the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import (
    EQUAL,
    LOCAL_STEPS,
    PROBLEM,
    SHARES,
    START,
    N,
    balance,
    pull,
    weights_of,
)
from torch import Tensor

from coterie.methods import FedAvg


def fedavg_point(shares: Tensor, local_steps: int, lr: float) -> Tensor:
    """Return where Σ p_k (1 − (1 − ηA_k)^K)(x − o_k) = 0."""
    return balance(shares, pull(PROBLEM.curvatures, local_steps, lr), PROBLEM.optima)


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("shares", ["examples", "equal"])
def test_fedavg_ends_at_its_biased_point(local_steps: int, shares: str) -> None:
    models = EXACT.play(FedAvg(local_steps, shares), rounds=400, lr=0.1)  # type: ignore[arg-type]
    expected = fedavg_point(SHARES if shares == "examples" else EQUAL, local_steps, 0.1)
    assert torch.allclose(models[0], expected, rtol=0, atol=1e-9)
    minimiser = PROBLEM.minimiser(SHARES if shares == "examples" else EQUAL)
    assert torch.allclose(expected, minimiser, rtol=0, atol=1e-9) == (local_steps == 1)


def test_fedavg_pools_the_moves() -> None:
    def median(rows: Tensor) -> Tensor:
        return rows.quantile(0.5, dim=0)

    x = START
    for _ in range(2):
        moves = [(PROBLEM.walk(k, x, 3, 0.1) - x).tolist() for k in range(N)]
        x = x + torch.from_numpy(np.median(moves, axis=0))
    run = PROBLEM.train(FedAvg(3, aggregator=median), rounds=2, lr=0.1)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)
    mean = PROBLEM.train(FedAvg(3, aggregator=lambda rows: rows.mean(0)), rounds=2, lr=0.1)
    assert torch.allclose(
        weights_of(mean), weights_of(PROBLEM.train(FedAvg(3, "equal"), rounds=2, lr=0.1))
    )
