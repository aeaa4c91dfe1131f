"""The comparison with a model trained alone: differences and standard errors against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from coterie.evaluation.evaluate import compare
from coterie.evaluation.metrics import less_is_better
from coterie.users.examples import InMemory


def linear(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs).double()


def test_accuracy_and_loss_have_the_usual_paired_error() -> None:
    torch.manual_seed(0)
    data = InMemory(torch.randn(80, 4).double(), torch.randint(0, 3, (80,)))
    ours, alone = linear(4, 3, seed=1), linear(4, 3, seed=2)
    comparison = compare(ours, alone, cross_entropy, data, on="some")
    with torch.no_grad():
        right = [(m(data.inputs).argmax(1) == data.targets).double().numpy() for m in (ours, alone)]
        losses = [
            cross_entropy(m(data.inputs), data.targets, reduction="none").numpy()
            for m in (ours, alone)
        ]
    assert list(comparison.measures) == ["accuracy", "loss"]
    for name, (mine, theirs) in {"accuracy": right, "loss": losses}.items():
        one = comparison.measures[name]
        assert (one.ours, one.alone) == pytest.approx((mine.mean(), theirs.mean()), rel=1e-12)
        assert one.error == pytest.approx(np.std(mine - theirs, ddof=1) / np.sqrt(80), rel=1e-9)
    assert [one.less_is_better for one in comparison.measures.values()] == [False, True]


def test_the_error_of_a_root_is_that_of_the_bootstrap() -> None:
    rng = np.random.default_rng(0)
    n = 300  # more than there are groups
    inputs = torch.tensor(rng.normal(size=(n, 3)))
    data = InMemory(inputs, inputs.sum(1, keepdim=True) + torch.tensor(rng.normal(size=(n, 1))))
    ours, alone = linear(3, 1, seed=1), linear(3, 1, seed=2)
    one = compare(ours, alone, mse_loss, data, on="some").measures["rmse"]
    with torch.no_grad():
        squares = np.array(
            [(m(data.inputs) - data.targets).square().flatten().numpy() for m in (ours, alone)]
        )
    roots = np.sqrt(squares.mean(1))
    assert one.difference == pytest.approx(roots[0] - roots[1], rel=1e-9)
    pick = rng.integers(0, n, (10_000, n))  # the bootstrap knows no formula
    resampled = np.sqrt(squares[0][pick].mean(1)) - np.sqrt(squares[1][pick].mean(1))
    assert one.error == pytest.approx(resampled.std(), rel=0.2)


def test_one_example_and_a_metric_that_some_examples_do_not_allow() -> None:
    def picky(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) < 2:
            raise ValueError("too few")
        return float(outputs.mean())

    ours, alone = linear(2, 1, seed=1), linear(2, 1, seed=2)
    inputs = torch.ones(2, 2).double()
    two = compare(
        ours, alone, mse_loss, InMemory(inputs, inputs[:, :1]), {"picky": picky}, on="two"
    )
    assert math.isnan(two.measures["picky"].error)
    assert two.measures["loss"].error == 0
    one = compare(ours, alone, mse_loss, InMemory(inputs[:1], inputs[:1, :1]), on="one")
    assert {each.error for each in one.measures.values()} == {math.inf}


def test_a_metric_says_which_way_is_better() -> None:
    def mistakes(outputs: Tensor, targets: Tensor) -> float:
        return 0.0

    assert not less_is_better("mistakes", mistakes)
    mistakes.less_is_better = True  # type: ignore[attr-defined]  # what is looked for
    assert less_is_better("mistakes", mistakes)
