"""Selfish learning: the minimiser of the internal users, SCAFFOLD as a special case, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import LOCAL_STEPS, PROBLEM, START, LeastSquares, N, weights_of

from coterie.methods import Scaffold, Selfish


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("internal", [(), ("user 2",)])
def test_selfish_ends_at_the_minimiser_of_the_internal_users(
    local_steps: int, alpha: float | None, internal: tuple[str, ...]
) -> None:
    models = EXACT.play(
        Selfish(local_steps, internal, alpha), rounds=400 // local_steps + 70, lr=0.1
    )
    inside = torch.tensor([1.0, 0.0, float(bool(internal)), 0.0], dtype=torch.float64)
    assert torch.allclose(models[0], PROBLEM.minimiser(inside), rtol=0, atol=1e-6)


def test_selfish_against_a_plain_loop() -> None:
    x, c = START, [START] * N
    weights = [0.35, 0.15, 0.35, 0.15]
    for _ in range(3):
        wanted = (c[0] + c[2]) / 2
        points = [PROBLEM.walk(k, x, 3, 0.05, wanted - c[k]) for k in range(N)]
        c = [c[k] - wanted + (x - points[k]) / (3 * 0.05) for k in range(N)]
        x = sum((weights[k] * points[k] for k in range(N)), START)
    run = PROBLEM.train(Selfish(3, ("user 2",), 0.3), rounds=3, lr=0.05)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(weights)


def test_selfish_without_the_others_is_scaffold_among_the_internal_users() -> None:
    few = LeastSquares(PROBLEM.users[:2], PROBLEM.curvatures[:2], PROBLEM.optima[:2])
    selfish = PROBLEM.train(Selfish(3, ("user 1",), 0.0), rounds=6, lr=0.05, batch_size=5)
    scaffold = few.train(Scaffold(3), rounds=6, lr=0.05, batch_size=5)
    assert torch.allclose(weights_of(selfish), weights_of(scaffold), rtol=0, atol=1e-12)
