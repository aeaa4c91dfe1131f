"""Metrics, against those of scikit-learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn import metrics as sk
from torch import nn
from torch.nn import functional as f

from coterie.evaluation.metrics import accuracy, binary_accuracy, metrics_for, rmse


def test_metrics_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers, classes = (
        torch.randn(50, 3, generator=generator),
        torch.randint(3, (50,), generator=generator),
    )
    outputs = torch.randn(50, 3, generator=generator)
    assert accuracy(outputs, classes) == pytest.approx(
        sk.accuracy_score(classes, outputs.argmax(1))
    )
    signs = (classes > 0).float()
    assert binary_accuracy(outputs[:, 0], signs) == pytest.approx(
        sk.accuracy_score(signs, outputs[:, 0] > 0)
    )
    assert rmse(outputs, numbers) == pytest.approx(
        sk.root_mean_squared_error(numbers.flatten(), outputs.flatten())
    )


def test_metrics_of_two_examples() -> None:
    assert accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])) == 0.5
    assert binary_accuracy(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 0.0])) == 0.5
    assert rmse(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == 2**0.5


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (f.cross_entropy, {"accuracy"}),
        (nn.CrossEntropyLoss(label_smoothing=0.1), {"accuracy"}),
        (f.nll_loss, {"accuracy"}),
        (f.binary_cross_entropy_with_logits, {"accuracy"}),
        (f.mse_loss, {"rmse"}),
        (nn.HuberLoss(), {"rmse"}),
        (lambda output, target: (output - target).sum(), set()),
    ],
)
def test_the_metric_read_beside_a_loss(loss: Any, names: set[str]) -> None:
    assert metrics_for(loss).keys() == names
