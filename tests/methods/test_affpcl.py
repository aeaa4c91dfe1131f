"""AffPCL: a plain loop over batches, what it converges to, and training alone as its limits."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, START, N

from coterie.methods import AffPCL

BATCH = 4


def test_it_equals_a_plain_loop() -> None:
    method, lr, rounds = AffPCL(2, alpha=0.7, beta=0.3), 0.05, 4
    run = PROBLEM.train(method, rounds=rounds, lr=lr, batch_size=BATCH)
    x, z, c = [START.clone() for _ in range(N)], START.clone(), [START * 0 for _ in range(N)]
    for t in range(2 * rounds):
        at_centre = [PROBLEM.gradient(k, z, t, BATCH) for k in range(N)]
        mean = sum(at_centre[1:], at_centre[0]) / N
        for k in range(N):
            bias = mean - at_centre[k]
            if t == 0:
                c[k] = bias
            x[k] = x[k] - lr * (
                PROBLEM.gradient(k, x[k], t, BATCH) - 0.7 * (at_centre[k] - (mean - c[k]))
            )
            rate = max(0.3, 1 / (t + 1))
            c[k] = (1 - rate) * c[k] + rate * bias
        z = z - lr * mean
    for k in range(N):
        found = next(iter(run.models[f"user {k}"].parameters())).flatten()
        torch.testing.assert_close(found, x[k], rtol=0, atol=1e-12)


def test_it_converges_to_every_users_own_optimum() -> None:
    models = EXACT.play(AffPCL(1, beta=0.1), rounds=1500, lr=0.2)
    torch.testing.assert_close(models, PROBLEM.optima, rtol=0, atol=1e-8)


@pytest.mark.parametrize("knobs", [{"alpha": 0.0}, {"beta": 1.0, "alpha": 0.0}])
def test_without_the_correction_it_is_training_alone(knobs: dict[str, float]) -> None:
    run = PROBLEM.train(AffPCL(1, **knobs), rounds=5, lr=0.05, batch_size=BATCH)
    x = START.clone()
    for t in range(5):
        x = x - 0.05 * PROBLEM.gradient(0, x, t, BATCH)
    own = next(iter(run.models["user 0"].parameters())).flatten()
    torch.testing.assert_close(own, x, rtol=0, atol=1e-12)


def test_users_alike_keep_a_part_of_the_noise() -> None:
    """Fresh noise at every step, one objective: the personal model's spread falls as the mean's does.

    Additive noise is the same at x and z, so that d = a(x − z) + ḡ − c, exactly.
    """
    torch.manual_seed(0)
    n, d, lr = 16, 400, 0.1

    class Noisy:
        names = tuple(map(str, range(n)))
        personal, present = n, None

        def gradients(self, points: torch.Tensor, step: int) -> torch.Tensor:
            noise = torch.randn(
                n, d, generator=torch.Generator().manual_seed(step), dtype=torch.float64
            )
            return points + noise

        def mean(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.mean(0)

        def moved(self, rows: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            return rows

        def exchange(self, down: int, up: int) -> None: ...

    spread = {}
    for alpha in (0.0, 1.0):
        method, users = AffPCL(1, alpha=alpha, beta=0.0), Noisy()
        state = method.init(users, torch.zeros(d, dtype=torch.float64))  # type: ignore[arg-type]
        for _ in range(3000):
            state = method.round(users, state, lr)  # type: ignore[arg-type]
        spread[alpha] = float(method.models(state).square().mean())
    assert spread[0.0] == pytest.approx(lr / (2 - lr), rel=0.1)
    assert spread[1.0] < 2 / n * spread[0.0]
