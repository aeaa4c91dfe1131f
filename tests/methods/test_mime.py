"""Mime and MimeLite: fixed points in closed form, FedAvg as a special case, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import (
    EQUAL,
    LOCAL_STEPS,
    PROBLEM,
    START,
    N,
    balance,
    pull,
    weights_of,
)

from coterie.methods import FedAvg, Mime


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_mime_ends_at_the_minimiser_whatever_the_local_steps(
    local_steps: int, momentum: float
) -> None:
    models = EXACT.play(Mime(local_steps, momentum), rounds=240 // local_steps + 60, lr=0.1)
    assert torch.allclose(models[0], PROBLEM.minimiser(EQUAL), rtol=0, atol=1e-9)


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_mimelite_ends_where_its_drifts_balance(local_steps: int, momentum: float) -> None:
    """Where the mean of (1 − S_k^K)(x − o_k + β/(1 − β) A_k⁻¹ m) is 0, m = mean A_k (x − o_k)."""
    pulls = pull(PROBLEM.curvatures, local_steps, 0.1 * (1 - momentum))
    lead = pulls @ torch.linalg.inv(PROBLEM.curvatures) * momentum / (1 - momentum)
    expected = balance(EQUAL, pulls + lead.mean(0) @ PROBLEM.curvatures, PROBLEM.optima)
    models = EXACT.play(
        Mime(local_steps, momentum, lite=True), rounds=240 // local_steps + 60, lr=0.1
    )
    assert torch.allclose(models[0], expected, rtol=0, atol=1e-9)
    assert torch.allclose(expected, PROBLEM.minimiser(EQUAL), rtol=0, atol=1e-6) == (
        local_steps == 1
    )


def test_mimelite_without_momentum_is_federated_averaging() -> None:
    mime, fedavg = Mime(4, 0.0, lite=True), FedAvg(4, "equal")
    runs = [PROBLEM.train(method, rounds=7, lr=0.05, batch_size=3) for method in (mime, fedavg)]
    assert torch.allclose(weights_of(runs[0]), weights_of(runs[1]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("lite", [False, True])
def test_mime_against_a_plain_loop(lite: bool) -> None:
    """Two rounds of three local steps on batches, written out."""
    x, m, lr, beta = START, START, 0.05, 0.7
    for first in (0, 3):
        whole = sum(PROBLEM.curvatures[k] @ (x - PROBLEM.optima[k]) for k in range(N)) / N
        ends = []
        for k in range(N):
            y = x
            for step in range(first, first + 3):
                d = PROBLEM.gradient(k, y, step, 3)
                if not lite:
                    d = d - PROBLEM.gradient(k, x, step, 3) + whole
                y = y - lr * ((1 - beta) * d + beta * m)
            ends.append(y)
        x, m = sum(ends) / N, (1 - beta) * whole + beta * m  # type: ignore[assignment]
    run = PROBLEM.train(Mime(3, beta, lite), rounds=2, lr=lr, batch_size=3)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)
