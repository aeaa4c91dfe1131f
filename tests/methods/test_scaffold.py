"""SCAFFOLD: the minimiser of the mean whatever the local steps, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import EQUAL, LOCAL_STEPS, PROBLEM, START, N, weights_of

from coterie.methods import Scaffold


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_ends_at_the_minimiser_whatever_the_local_steps(
    local_steps: int, option: int
) -> None:
    models = EXACT.play(Scaffold(local_steps, option), rounds=600, lr=0.05)  # type: ignore[arg-type]
    assert torch.allclose(models[0], PROBLEM.minimiser(EQUAL), rtol=0, atol=1e-8)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_against_a_plain_loop(option: int) -> None:
    """Two rounds written out, with a server step other than 1."""
    x, c = START, [START] * N
    for _ in range(2):
        mean = torch.stack(c).mean(0)
        ends = [PROBLEM.walk(k, x, 3, 0.05, mean - c[k]) for k in range(N)]
        moved = [c[k] - mean + (x - ends[k]) / (3 * 0.05) for k in range(N)]
        c = [PROBLEM.gradient(k, x) for k in range(N)] if option == 1 else moved
        x = x + 0.7 * (torch.stack(ends).mean(0) - x)
    run = PROBLEM.train(Scaffold(3, option, server_lr=0.7), rounds=2, lr=0.05)  # type: ignore[arg-type]
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)
