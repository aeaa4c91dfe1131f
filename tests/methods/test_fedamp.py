"""FedAMP: a plain loop, training alone where all are far, and weights that are a mean."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, START, N, same_models

from coterie.methods import FedAMP

BATCH = 4


@pytest.mark.parametrize(("scale", "step"), [(0.5, 0.1), (0.2, 3.0)])
def test_it_equals_a_plain_loop(scale: float, step: float) -> None:
    """The second has weights that sum to more than 1 at the start, and are divided by their sum."""
    lr, penalty = 0.05, 0.4
    run = PROBLEM.train(FedAMP(2, penalty, scale, step), rounds=4, lr=lr, batch_size=BATCH)
    x = [START.clone() for _ in range(N)]
    for t in range(4):
        after = []
        for k in range(N):
            weights = [
                step / scale * math.exp(-float(((x[k] - x[j]) ** 2).sum()) / scale)
                for j in range(N)
            ]
            weights[k] = 0.0
            over = max(1.0, sum(weights))
            weights = [weight / over for weight in weights]
            weights[k] = 1 - sum(weights)
            u = sum((weight * x[j] for j, weight in enumerate(weights)), START * 0)
            y = x[k]
            for j in range(2):
                y = y - lr * (PROBLEM.gradient(k, y, 2 * t + j, BATCH) + penalty / step * (y - u))
            after.append(y)
        x = after
    assert same_models(run, x)


def test_strangers_train_alone() -> None:
    """From the same start all are near; with hardly any scale they are strangers once they have moved."""
    models = EXACT.play(FedAMP(1, penalty=1e-3, scale=1e-9, step=1e-9), rounds=2000, lr=0.1)
    pulled = EXACT.play(FedAMP(1, penalty=20.0, scale=100.0, step=20.0), rounds=2000, lr=0.1)
    torch.testing.assert_close(models, PROBLEM.optima, rtol=0, atol=1e-6)
    assert (pulled - pulled.mean(0)).norm() < 0.9 * (models - models.mean(0)).norm()
