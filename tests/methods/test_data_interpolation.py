"""Data interpolation: the minimiser of a mixture of the own and the pooled loss."""

from __future__ import annotations

import pytest
import torch
from tests.support.least_squares import PROBLEM, SHARES, D, weights_of
from torch import nn

import coterie
from coterie.methods import data_interpolation


@pytest.mark.parametrize("mixing", [0.0, 0.4, 1.0])
def test_data_interpolation_minimises_the_mixture_of_own_and_pooled(mixing: float) -> None:
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    run = coterie.train(
        model,
        nn.functional.mse_loss,
        me,
        peers,
        data_interpolation(me, peers, mixing),
        optimizer=torch.optim.SGD,
        lr=0.3,
        steps=300,
        evaluate_every=300,
    )
    own = torch.tensor([1.0, 0, 0, 0]).double()
    assert torch.allclose(
        weights_of(run), PROBLEM.minimiser(mixing * own + (1 - mixing) * SHARES), rtol=0, atol=1e-7
    )
