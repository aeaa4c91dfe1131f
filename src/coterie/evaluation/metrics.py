"""Metrics: functions from a model's outputs on a whole set and the targets to one number."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from coterie.evaluation.losses import IGNORED, PerExample, ignored_class, is_over_classes
from coterie.registry import Registry
from coterie.users.user import Loss

M = TypeVar("M", bound=Callable[..., float])

Metric: TypeAlias = Callable[[Any, Any], float]
"""What computes one number from a model's outputs on a whole set and the targets."""

METRICS: Registry[Metric] = Registry("metric", "coterie.metrics")

register_metric = METRICS.register

_LESS_IS_BETTER = "less_is_better"
_KIND = "kind"


def as_metric_of(
    kind: Literal["classification", "regression"], *, less_is_better: bool = False
) -> Callable[[M], M]:
    """Return a decorator that says what targets a metric is for, and whether less of it is better."""

    def mark(metric: M) -> M:
        setattr(metric, _KIND, kind)
        setattr(metric, _LESS_IS_BETTER, less_is_better)
        return metric

    return mark


def kind_of(metric: Metric) -> str | None:
    """Return what targets a metric is for, "classification" or "regression"; None where it does not say.

    Example:
        >>> kind_of(accuracy), kind_of(rmse), kind_of(lambda outputs, targets: 0.0)
        ('classification', 'regression', None)
    """
    return getattr(metric, _KIND, None)


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
@as_metric_of("classification")
def accuracy(outputs: Any, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of examples whose largest output is the target's class, of those that are not ignored.

    The outputs of the classes are in the second dimension or in the last. Of an output that is not a tensor, its
    `logits` count.
    """
    return _accuracy(outputs, targets, IGNORED, weights)


def _accuracy(outputs: Any, targets: Tensor, ignored: int, weights: Tensor | None = None) -> float:
    outputs = outputs if isinstance(outputs, Tensor) else outputs.logits
    if targets.is_floating_point() and targets.shape == outputs.shape:  # probabilities of the classes
        targets = targets.argmax(1)
    largest = outputs.argmax(1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else -1)
    right = (largest == targets).double()
    if weights is not None:
        return _mean(right, weights)
    kept = targets != ignored
    return float(right.mean() if bool(kept.all()) else right[kept].mean())


@register_metric("binary-accuracy")
def binary_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose logit has the sign that the 0/1 target asks for."""
    return float(((outputs > 0) == (targets > 0.5)).double().mean())


@register_metric("rmse")
@as_metric_of("regression", less_is_better=True)
def rmse(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the root of the mean squared error."""
    return math.sqrt(_mean((outputs.double() - targets.double()).square(), weights))


@register_metric("mae")
@as_metric_of("regression", less_is_better=True)
def mae(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean absolute error."""
    return _mean((outputs.double() - targets.double()).abs(), weights)


@register_metric("r2")
@as_metric_of("regression")
def r2(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of the targets' variance that is explained; below 0 where their mean would do better."""
    truth = targets.double()
    spread = _mean((truth - _mean(truth, weights)).square(), weights)
    return 1 - _mean((outputs.double() - truth).square(), weights) / spread if spread else math.nan


def _mean(values: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean of the rows' values, by their weights where they have any."""
    if weights is None:
        return float(values.mean())
    rows = values.flatten(1).mean(1) if values.ndim > 1 else values
    return float((rows * weights).sum() / weights.double().sum())


def metrics_for(loss: Loss) -> dict[str, Metric]:
    """Return the usual metric for this loss, by name; none for a loss that torch does not have."""
    f = nn.functional
    loss = loss.each if isinstance(loss, PerExample) else loss
    if is_over_classes(loss):
        ignored = ignored_class(loss)
        return {"accuracy": accuracy if ignored == IGNORED else partial(_accuracy, ignored=ignored)}
    if loss is f.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss):
        return {"accuracy": binary_accuracy}
    squared = nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss
    if loss in (f.mse_loss, f.l1_loss, f.smooth_l1_loss, f.huber_loss) or isinstance(loss, squared):
        return {"rmse": rmse}
    return {}


def metrics_of(loss: Loss, outputs: Any, targets: Any) -> dict[str, Metric]:
    """Return the usual metrics; for a loss that torch does not have, accuracy where the targets are classes."""
    usual = metrics_for(loss)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if usual or not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        return usual
    whole = not targets.is_floating_point() and targets.dtype != torch.bool and logits.ndim == targets.ndim + 1
    fits = targets.shape in (logits.shape[:1] + logits.shape[2:], logits.shape[:-1])
    return {"accuracy": accuracy} if whole and fits else {}
