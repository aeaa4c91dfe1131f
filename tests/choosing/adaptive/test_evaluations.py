"""Folds of user 0's examples."""

from __future__ import annotations

import torch

from coterie import User
from coterie.choosing.adaptive.evaluations import split


def test_folds_are_even_in_size_and_in_targets() -> None:
    me = User("me", torch.zeros(33, 1), torch.arange(33) % 11)
    fold = split(me, 3, seed=1)
    assert fold.bincount().tolist() == [11, 11, 11]
    for label in range(11):
        assert fold[torch.arange(33) % 11 == label].sort().values.tolist() == [0, 1, 2]
    assert not torch.equal(fold, split(me, 3, seed=2))
    assert torch.equal(fold, split(me, 3, seed=1))
    numbers = User("me", torch.zeros(20, 1), torch.linspace(0, 1, 20)[:, None])
    means = [
        numbers.examples.take((split(numbers, 4, 0) == q).nonzero().flatten())[1].mean()
        for q in range(4)
    ]
    assert max(means) - min(means) < 0.2
    short = User(
        "me", torch.zeros(20, 1), torch.linspace(0, 1, 20)[:, None].bfloat16()
    )  # which NumPy does not have
    assert split(short, 4, 0).bincount().tolist() == [5] * 4
    labels = User("a", torch.zeros(6, 1), [0, 0, 0, 1, 1, 1])
    assert sorted(split(labels, 3, seed=0)[:3].tolist()) == [0, 1, 2]
