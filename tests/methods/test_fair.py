"""AFL and q-FFL: the minimisers of their objectives by SciPy, FedAvg as a limit, and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, SHARES, START, D, N, same_models, weights_of
from torch import Tensor

from coterie.methods import AFL, QFFL, FedAvg
from coterie.methods.fair import _on_simplex


def losses_at(x: Any) -> Any:
    """Return every user's loss at a point, by SciPy's arrays."""
    point = torch.from_numpy(x)
    return np.array([float(PROBLEM.loss(k, point)) for k in range(N)])


def minimum(objective: Any, start: Any, **more: Any) -> Any:
    """Return the minimiser that SciPy finds."""
    return minimize(objective, start, **more).x


def test_afl_ends_at_the_least_largest_loss_with_weights_on_those_who_have_it() -> None:
    """min t subject to f_k(x) ≤ t, by sequential quadratic programming."""
    start = np.append(np.zeros(D), losses_at(np.zeros(D)).max())
    worst = {"type": "ineq", "fun": lambda z: z[-1] - losses_at(z[:-1])}
    *point, largest = minimum(
        lambda z: z[-1], start, constraints=worst, method="SLSQP", options={"ftol": 1e-14}
    ).tolist()
    method = AFL(weight_lr=0.1)
    state = method.init(EXACT, START)
    for _ in range(700):
        state = method.round(EXACT, state, 0.2)
    x: Tensor = state["x"]
    weights: Tensor = state["weights"]
    assert weights.min() >= 0
    assert float(weights.sum()) == pytest.approx(1)
    assert x.numpy() == pytest.approx(point, abs=1e-5)
    pulls = torch.stack([PROBLEM.gradient(k, x) for k in range(N)])
    # no descent for the mixture, one for each
    assert (weights @ pulls).norm() < 1e-5 < pulls.norm(dim=1).min()
    below = torch.from_numpy(losses_at(x.numpy()) < largest - 1e-3)
    assert below.any()
    assert not weights[below].any()


def test_the_mean_of_afls_iterates_equals_a_plain_loop() -> None:
    """A plain loop of the mean, beside the last iterate."""
    last, mean = AFL(2, weight_lr=0.5), AFL(2, weight_lr=0.5, averaged=True)
    state, seen = last.init(EXACT, START), []
    for _ in range(60):
        state = last.round(EXACT, state, 0.1)
        seen.append(state["x"])
    by_hand = torch.zeros_like(START)
    for x in seen:
        by_hand = by_hand + x / len(seen)
    assert torch.allclose(EXACT.play(mean, rounds=60, lr=0.1), by_hand[None], rtol=0, atol=1e-12)
    assert torch.equal(EXACT.play(last, rounds=60, lr=0.1)[0], seen[-1])


def test_afl_projects_on_the_simplex_as_a_solver_does() -> None:
    """A round at a large γ, beside the nearest point of the simplex by sequential quadratic programming."""
    aim = SHARES.numpy() + 0.7 * losses_at(np.zeros(D))
    whole = {"type": "eq", "fun": lambda w: w.sum() - 1}
    start, bounds = SHARES.numpy(), [(0, 1)] * N
    nearest = minimum(
        lambda w: ((w - aim) ** 2).sum(), start, bounds=bounds, constraints=whole, tol=1e-14
    )
    run = PROBLEM.train(AFL(weight_lr=0.7), rounds=1, lr=0.1)
    assert run.state["weights"].numpy() == pytest.approx(nearest, abs=1e-6)
    assert run.record.end.tau["user 1"] == pytest.approx(nearest[1] / nearest[1:].sum(), abs=1e-6)


@pytest.mark.parametrize("losses", [[3e9, 2e9, 1.0], [1e30, 1e30, 0.0]])
def test_losses_of_a_run_that_diverges_give_all_weight_to_the_largest(losses: list[float]) -> None:
    largest = torch.tensor(losses) == max(losses)
    torch.testing.assert_close(_on_simplex(torch.tensor(losses)), largest / largest.sum())


def test_afl_with_weights_at_rest_is_fedavg() -> None:
    fair, plain = (
        PROBLEM.train(method, rounds=5, lr=0.1) for method in (AFL(3, weight_lr=1e-300), FedAvg(3))
    )
    assert torch.allclose(weights_of(fair), weights_of(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("q", [0.5, 3.0])
def test_q_ffl_ends_at_the_minimiser_of_the_power_of_the_losses(q: float) -> None:
    def objective(x: Any) -> float:
        return float((SHARES.numpy() * losses_at(x) ** (q + 1)).sum() ** (1 / (q + 1)))

    models = EXACT.play(QFFL(q=q), rounds=700, lr=0.2)
    assert models[0].numpy() == pytest.approx(minimum(objective, np.zeros(D), tol=1e-12), abs=2e-5)


def test_q_ffl_without_q_is_fedavg() -> None:
    fair, plain = (
        PROBLEM.train(method, rounds=5, lr=0.1, batch_size=4)
        for method in (QFFL(3, q=0.0), FedAvg(3))
    )
    assert torch.allclose(weights_of(fair), weights_of(plain), rtol=0, atol=1e-12)


def test_q_ffl_against_a_plain_loop() -> None:
    x, lr, q = START, 0.1, 1.5
    for _ in range(2):
        above, below = torch.zeros(D, dtype=torch.float64), 0.0
        for k in range(N):
            move, loss = (x - PROBLEM.walk(k, x, 3, lr)) / lr, float(PROBLEM.loss(k, x))
            above = above + SHARES[k] * loss**q * move
            below += float(SHARES[k]) * (q * loss ** (q - 1) * float(move @ move) + loss**q / lr)
        x = x - above / below
    assert same_models(PROBLEM.train(QFFL(3, q), rounds=2, lr=lr), [x] * N)
