"""L2GD: its penalised solution on average, and a plain loop of coins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag
from tests.support.exact_users import EXACT
from tests.support.least_squares import LOCAL_STEPS, PROBLEM, START, D, N, last_of, same_models
from torch import Tensor

from coterie.methods import L2GD
from coterie.methods.personal import heads_in_a_row
from coterie.users.sampling import uniform

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


def penalised(penalty: float) -> Tensor:
    """Return the minimiser of Σ f_k(x_k) + (λ/2)‖x_k − mean x‖², by one linear system in all x_k."""
    matrix = penalty * np.kron(np.eye(N) - 1 / N, np.eye(D)) + block_diag(*A.numpy())
    solution = np.linalg.solve(matrix, (A @ O.unsqueeze(2)).flatten().numpy())
    return torch.from_numpy(solution).reshape(N, D)


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize(("penalty", "probability"), [(1.0, 0.3), (0.3, 0.7)])
def test_l2gd_is_its_penalised_solution_on_average(
    local_steps: int, penalty: float, probability: float
) -> None:
    """Affine steps that are unbiased keep the mean over time exact; a round ends after an own step."""
    lr, method = 0.05, L2GD(local_steps, penalty, probability)
    state, rows = method.init(EXACT, START), []
    for _ in range(8000 // local_steps):
        state = method.round(EXACT, state, lr)
        rows.append(state["x"])
    path = torch.stack(rows)[len(rows) // 8 :]
    batches = torch.stack([part.mean(0) for part in path.chunk(20)])
    error = batches.std(0) / len(batches) ** 0.5
    solution = penalised(penalty)
    after_own_step = solution - lr / (1 - probability) * EXACT.gradients(solution, 0)
    assert ((batches.mean(0) - after_own_step).abs() < 4 * error).all()
    assert error.max() < 0.1 * (solution - O).abs().max()


def test_l2gd_against_a_plain_loop_of_coins() -> None:
    x, p, lr, penalty, exchanges = [START] * N, 0.6, 0.1, 2.0, 0
    for step in range(6):
        left, exchanged = 1 - uniform(0, "coin", step), False
        while left <= p:  # heads
            left /= p
            mean = torch.stack(x).mean(0)
            x = [row - lr * penalty / p * (row - mean) for row in x]
            exchanged = True
        exchanges += exchanged
        x = [row - lr / (1 - p) * PROBLEM.gradient(k, row) for k, row in enumerate(x)]
    run = PROBLEM.train(L2GD(3, penalty, p), rounds=2, lr=lr)
    assert same_models(run, x)
    assert 0 < exchanges < 6
    assert run.record.end.costs["user 1"].numbers_sent == D * exchanges
    assert torch.equal(last_of(run), last_of(PROBLEM.train(L2GD(1, penalty, p), rounds=6, lr=lr)))


def test_heads_in_a_row_are_geometric() -> None:
    shares = (
        np.bincount([heads_in_a_row(0.6, 0, step) for step in range(20000)], minlength=6) / 20000
    )
    expected = 0.4 * 0.6 ** np.arange(6)
    assert (abs(shares[:6] - expected) < 4 * np.sqrt(expected / 20000)).all()


def test_l2gd_never_pulls_beyond_the_mean() -> None:
    models = EXACT.play(L2GD(1, penalty=1e9, probability=0.99), rounds=300, lr=0.001)
    # one own step apart at most: heads nearly always
    assert (models - models.mean(0)).abs().max() < 1
