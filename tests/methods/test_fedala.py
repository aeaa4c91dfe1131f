"""FedALA: a plain loop over numbers, and FedAvg and training alone as its ends."""

from __future__ import annotations

import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, SHARES, START, D, N, same_models

from coterie.methods import FedALA, FedAvg

BATCH = 4


def test_it_equals_a_plain_loop() -> None:
    lr, rate = 0.05, 3.0
    run = PROBLEM.train(
        FedALA(2, weight_lr=rate, weight_steps=3), rounds=4, lr=lr, batch_size=BATCH
    )
    x, w, share = [START.clone() for _ in range(N)], START.clone(), [[1.0] * D for _ in range(N)]
    for t in range(4):
        step = 3 * t
        for k in range(N):
            for _ in range(3):
                y = torch.stack([x[k][i] + (w[i] - x[k][i]) * share[k][i] for i in range(D)])
                g = PROBLEM.gradient(k, y, step, BATCH)
                share[k] = [
                    min(1.0, max(0.0, share[k][i] - rate * float(g[i] * (w[i] - x[k][i]))))
                    for i in range(D)
                ]
            y = torch.stack([x[k][i] + (w[i] - x[k][i]) * share[k][i] for i in range(D)])
            for j in (1, 2):
                y = y - lr * PROBLEM.gradient(k, y, step + j, BATCH)
            x[k] = y
        w = sum((SHARES[k] * x[k] for k in range(N)), START)
    assert same_models(run, x)
    assert sum(value < 1 for row in share for value in row) > 0


def test_with_weights_at_rest_it_is_fedavg() -> None:
    """After a round FedAvg's common model is the mean of what FedALA's users have."""
    method = FedALA(3, weight_lr=1e-300)
    state = method.init(EXACT, START)
    for _ in range(5):
        state = method.round(EXACT, state, 0.1)
    torch.testing.assert_close(
        state["common"], EXACT.play(FedAvg(3), rounds=5, lr=0.1)[0], rtol=0, atol=1e-12
    )
