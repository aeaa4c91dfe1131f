"""Metrics: functions from a model's outputs on a whole set and the targets to one number."""

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

_LESS_IS_BETTER = "less_is_better"


def less_is_better(name: str, metric: Metric | None = None) -> bool:
    """Say whether a smaller value is better: of the loss, and of a metric whose attribute `less_is_better` is True.

    The attribute is looked for at the function, and at the one that is registered by this name.

    Example:
        >>> [less_is_better(name) for name in ("loss", "rmse", "accuracy")]
        [True, True, False]
    """
    known = [metric, METRICS[name]] if name in METRICS else [metric]
    return name == "loss" or any(getattr(each, _LESS_IS_BETTER, False) for each in known)


@register_metric("accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose largest output is the target's class."""
    return float((outputs.argmax(1) == targets).double().mean())


@register_metric("binary-accuracy")
def binary_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose logit has the sign that the 0/1 target asks for."""
    return float(((outputs > 0) == (targets > 0.5)).double().mean())


@register_metric("rmse")
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error."""
    return math.sqrt(float((outputs.double() - targets.double()).square().mean()))


setattr(rmse, _LESS_IS_BETTER, True)


def is_over_classes(loss: Loss) -> bool:
    """Say whether a loss of torch takes an output for each class."""
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return loss in functions or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def metrics_for(loss: Loss) -> dict[str, Metric]:
    """Return the usual metric for this loss, by name; none for a loss that torch does not have."""
    f = nn.functional
    if is_over_classes(loss):
        return {"accuracy": accuracy}
    if loss is f.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss):
        return {"accuracy": binary_accuracy}
    squared = nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss
    if loss in (f.mse_loss, f.l1_loss, f.smooth_l1_loss, f.huber_loss) or isinstance(loss, squared):
        return {"rmse": rmse}
    return {}
