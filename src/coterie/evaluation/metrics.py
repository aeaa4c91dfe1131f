"""Metrics: functions from a model's outputs on a whole set and the targets to one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from coterie.registry import Registry
from coterie.users.user import Loss

Metric: TypeAlias = Callable[[Any, Tensor], float]
"""What computes one number from a model's outputs on a whole set and the targets."""


METRICS: Registry[Metric] = Registry("metric", "coterie.metrics")

register_metric = METRICS.register


@register_metric("accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose largest output is the target's class.

    Example:
        >>> from torch import tensor
        >>> accuracy(tensor([[2.0, 1.0], [0.0, 3.0]]), tensor([0, 0]))
        0.5
    """
    return float((outputs.argmax(1) == targets).double().mean())


@register_metric("binary-accuracy")
def binary_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose logit has the sign that the 0/1 target asks for.

    Example:
        >>> from torch import tensor
        >>> binary_accuracy(tensor([-1.0, 2.0]), tensor([0.0, 0.0]))
        0.5
    """
    return float(((outputs > 0) == (targets > 0.5)).double().mean())


@register_metric("rmse")
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error.

    Example:
        >>> from torch import tensor
        >>> rmse(tensor([1.0, 3.0]), tensor([1.0, 1.0]))
        1.4142135623730951
    """
    return math.sqrt(float((outputs.double() - targets.double()).square().mean()))


def metrics_for(loss: Loss) -> dict[str, Metric]:
    """Return the usual metric for this loss, by name; none for a loss that torch does not have.

    Example:
        >>> metrics_for(nn.functional.mse_loss) == {"rmse": rmse}
        True
    """
    f = nn.functional
    if loss in (f.cross_entropy, f.nll_loss) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return {"accuracy": accuracy}
    if loss is f.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss):
        return {"accuracy": binary_accuracy}
    squared = nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss
    if loss in (f.mse_loss, f.l1_loss, f.smooth_l1_loss, f.huber_loss) or isinstance(loss, squared):
        return {"rmse": rmse}
    return {}
