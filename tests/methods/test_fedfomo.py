"""FedFomo: copies and strangers, and a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.least_squares import (
    COPIES_AND_STRANGERS,
    HELD_OUT,
    LOCAL_STEPS,
    PROBLEM,
    START,
    TRUTH,
    N,
    last_of,
    path_of,
)
from torch import Tensor

from coterie.errors import DataError
from coterie.methods import FedFomo


def validation_loss(x: Tensor) -> float:
    assert HELD_OUT.users[0].validation is not None
    inputs, targets = HELD_OUT.users[0].validation.take(torch.arange(30))
    return float((inputs @ x - targets.flatten()).square().mean())


@pytest.mark.parametrize("start", ["own", "mine"])
def test_fedfomo_against_a_plain_loop(start: str) -> None:
    points, chosen = [START] * N, []
    for _ in range(3):
        x = points[0]
        points = [PROBLEM.walk(k, points[k], 3, 0.02) for k in range(N)]
        gains = [
            max(
                0.0,
                (validation_loss(x) - validation_loss(point))
                / math.dist(point.tolist(), x.tolist()),
            )
            for point in points
        ]
        chosen = [gain / sum(gains) for gain in gains]
        x = x + sum(w * (point - x) for w, point in zip(chosen, points, strict=True))
        points = [x] * N if start == "mine" else [x, *points[1:]]
    run = HELD_OUT.train(FedFomo(3, start), rounds=3, lr=0.02)  # type: ignore[arg-type]
    assert min(chosen) == 0 < chosen[0] < 1  # somebody is shut out, and somebody is not
    assert torch.allclose(last_of(run), torch.stack(points), rtol=0, atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(chosen)
    assert run.state["weight"] == pytest.approx(sum(chosen[1:]))


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("start", ["own", "mine"])
def test_fedfomo_follows_copies_and_no_strangers(local_steps: int, start: str) -> None:
    weights: list[Tensor] = []
    problem = COPIES_AND_STRANGERS
    for rounds in (1, 2, 4):
        method = FedFomo(local_steps, start)  # type: ignore[arg-type]
        weights.append(problem.train(method, rounds=rounds, lr=0.02).state["weights"])
    for learned in weights:
        assert learned[2] == 0  # whose truth is the opposite
        assert float(learned[[0, 1, 3]].sum()) > 0.9
        assert float(learned[[0, 1, 3]].min()) > 0.03  # a copy that lags behind user 0 says little


def test_fedfomo_stays_where_nobody_is_better_and_needs_examples_to_judge_by() -> None:
    path = path_of(COPIES_AND_STRANGERS, FedFomo(1), rounds=150, lr=0.1)
    assert torch.equal(path[-1], path[-2])
    assert float((path[-1] - TRUTH).norm()) < 0.1
    with pytest.raises(DataError, match="validation"):
        PROBLEM.train(FedFomo(1), rounds=1, lr=0.1)
