"""Fine-tuning: FedAvg, then every user's exact path alone."""

from __future__ import annotations

import pytest
import torch
from tests.support.least_squares import (
    EYE,
    LOCAL_STEPS,
    PROBLEM,
    D,
    N,
    path_of,
    pull,
    same_models,
    weights_of,
)

from coterie.methods import FedAvg, FineTuning

A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
def test_fine_tuning_is_fedavg_then_the_exact_path_alone(local_steps: int) -> None:
    method = FineTuning(5, FedAvg(local_steps))
    together = weights_of(PROBLEM.train(FedAvg(local_steps), rounds=5, lr=0.1))
    before = path_of(PROBLEM, method, rounds=6, lr=0.1)[4]
    assert torch.equal(before, together)
    run = PROBLEM.train(method, rounds=9, lr=0.1)
    kept = EYE - pull(A, 4 * local_steps, 0.1)
    assert same_models(run, [O[k] + kept[k] @ (together - O[k]) for k in range(N)])
    assert run.record.end.costs["user 1"].numbers_sent == 5 * D
