"""Folds of user 0's examples, and losses of copies that lack one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie import User
from coterie.choosing.adaptive import AdaptiveAveraging
from coterie.choosing.adaptive.evaluations import HeldOutEvaluations, split
from coterie.choosing.adaptive.stopping import hellinger
from coterie.evaluation.losses import per_example
from coterie.learners.spec import RunSpec


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


@pytest.mark.parametrize(
    ("loss", "squared"),
    [
        (functional.mse_loss, True),
        (nn.MSELoss(), True),
        (per_example(nn.MSELoss(reduction="none")), True),
        (functional.cross_entropy, False),
        (nn.BCEWithLogitsLoss(), False),
    ],
)
def test_burmans_correction_is_for_least_squares(loss: Any, squared: bool) -> None:
    """One example of two folds: .9 by the copy blind to it, .3 by the other, .5 by the one that sees all."""
    looks = SimpleNamespace(spec=SimpleNamespace(loss=loss))
    each = torch.tensor([[0.5], [0.9], [0.3]])
    told = HeldOutEvaluations.corrected(looks, torch.tensor([0.9]), each)  # type: ignore[arg-type]  # all that it needs of them
    assert told.tolist() == pytest.approx([0.9 + 0.5 - 0.6 if squared else 0.9])


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "bounded"),
    [
        (functional.cross_entropy, 3, torch.arange(8) % 3, True),
        (nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none"), 3, torch.arange(8) % 3, True),
        (nn.BCEWithLogitsLoss(), 1, torch.arange(8.0)[:, None] % 2, True),
        (
            per_example(nn.BCEWithLogitsLoss(reduction="none")),
            1,
            torch.arange(8.0)[:, None] % 2,
            True,
        ),
        (functional.mse_loss, 1, torch.arange(8.0)[:, None], False),
        (
            per_example(lambda output, target: (output - target).abs()),
            1,
            torch.arange(8.0)[:, None],
            False,
        ),
    ],
)
def test_looks_are_chosen_by_a_bounded_distance_where_the_loss_is_that_of_a_probability(
    loss: Any, outputs: int, targets: torch.Tensor, bounded: bool
) -> None:
    users = [User(name, torch.randn(8, 2), targets) for name in ("me", "a", "b")]
    spec = RunSpec(nn.Linear(2, outputs), loss, users[0], users[1:], steps=4).prepared()
    folds, _ = AdaptiveAveraging().parts(spec)
    chosen_by = HeldOutEvaluations(spec, None, folds, nested=True)._resampled.distance  # type: ignore[arg-type]  # no points yet
    losses = torch.tensor([0.0, 1.0, 50.0]).numpy()
    assert chosen_by(losses).tolist() == (hellinger(losses) if bounded else losses).tolist()
