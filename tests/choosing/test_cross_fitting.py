"""Folds, fitted weights and cross-validation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.linear_users import TRUTH, D, alike, user
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie import User
from coterie.choosing.cross_fitting import cross_validate, fit_weights, split, training_masks
from coterie.learners.spec import RunSpec


def test_cross_validation_is_training_without_the_fold() -> None:
    me, peers = user("me", 12, TRUTH), alike(2)
    torch.manual_seed(0)
    model = nn.Linear(D, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    posed = RunSpec(model, mse_loss, me, peers, optimizer=optimizer, steps=20, batch_size=100)
    fold = split(me, 3, seed=0)
    losses = cross_validate(posed, fold, np.array([[0.4, 0.3, 0.3]]))
    inputs, targets = me.examples.take(torch.arange(12))
    for q in range(3):
        part = User("me", inputs[fold != q], targets[fold != q])
        rule = coterie.WeightedAveraging(0.6)
        run = coterie.train(model, mse_loss, part, peers, rule, lr=0.05, steps=20, batch_size=100, progress=False)
        expected = (run.model(inputs[fold == q]) - targets[fold == q]).square().flatten().detach()
        np.testing.assert_allclose(losses[-1, 0, (fold == q).numpy()], expected, rtol=1e-4)


def test_folds_are_even_in_size_and_in_targets() -> None:
    me = User("me", torch.zeros(33, 1), torch.arange(33) % 11)
    fold = split(me, 3, seed=1)
    assert fold.bincount().tolist() == [11, 11, 11]
    for label in range(11):
        assert fold[torch.arange(33) % 11 == label].sort().values.tolist() == [0, 1, 2]
    assert not torch.equal(fold, split(me, 3, seed=2))
    assert torch.equal(fold, split(me, 3, seed=1))
    numbers = User("me", torch.zeros(20, 1), torch.linspace(0, 1, 20)[:, None])
    means = [numbers.examples.take((split(numbers, 4, 0) == q).nonzero().flatten())[1].mean() for q in range(4)]
    assert max(means) - min(means) < 0.2
    assert training_masks(fold).sum(1).tolist() == [22, 22, 22]


def test_weights_are_equal_when_nobody_counts() -> None:
    """Own examples without noise need no peers: κ is all on the own gradient."""
    me = user("me", 60, TRUTH, noise=0.0)
    strangers = [user(f"stranger {k}", 60, -TRUTH * (k + 1), noise=0.0) for k in range(3)]
    model = nn.Linear(D, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    posed = RunSpec(model, mse_loss, me, strangers, optimizer=optimizer, steps=40, batch_size=100)
    fitted = fit_weights(posed, split(me, 5, 0))
    assert fitted.kappa[-1, 0] > 0.95
    assert fitted.tau.sum() == pytest.approx(1)
