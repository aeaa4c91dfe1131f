"""MAPPER: where it ends, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import LOCAL_STEPS, PROBLEM, SHARES, START, N, same_models
from torch import Tensor

from coterie.methods import Mapper


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
def test_mapper_ends_at_the_pooled_minimiser_or_at_the_own_optima(local_steps: int) -> None:
    pooled = EXACT.play(Mapper(local_steps, (0.0,)), rounds=200, lr=0.3)
    assert torch.allclose(pooled, PROBLEM.minimiser(SHARES).expand(N, -1), rtol=0, atol=1e-9)
    own = EXACT.play(Mapper(local_steps, (0.5, 0.9)), rounds=1000 // local_steps, lr=0.3)
    assert torch.allclose(own, PROBLEM.optima, rtol=0, atol=1e-9)


def test_mapper_against_a_plain_loop() -> None:
    w, v, a, chosen = START, [START] * N, [0.0] * N, set()
    for _ in range(2):
        slope = START
        for k in range(N):
            tried: list[tuple[float, float, Tensor]] = []
            for mixing in (0.3, 0.6, 0.9):
                own = v[k]
                for _ in range(2):
                    own = own - 0.6 * mixing * PROBLEM.gradient(k, mixing * own + (1 - mixing) * w)
                tried.append((float(PROBLEM.loss(k, mixing * own + (1 - mixing) * w)), mixing, own))
            _, a[k], v[k] = min(tried, key=lambda trial: trial[0])
            slope = slope + SHARES[k] * (1 - a[k]) * PROBLEM.gradient(
                k, a[k] * v[k] + (1 - a[k]) * w
            )
        w = w - 0.6 * slope
        chosen |= set(a)
    run = PROBLEM.train(Mapper(2, (0.3, 0.6, 0.9)), rounds=2, lr=0.6)
    assert same_models(run, [a[k] * v[k] + (1 - a[k]) * w for k in range(N)])
    assert len(chosen) > 1  # else the choice is not tested
