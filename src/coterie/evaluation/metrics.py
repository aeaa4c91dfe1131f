"""Metrics: functions from a model's outputs on a whole set and the targets to one number."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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
    """Return what targets a metric is for, "classification" or "regression".

    None where it does not say.

    Example:
        >>> kind_of(accuracy), kind_of(rmse), kind_of(lambda outputs, targets: 0.0)
        ('classification', 'regression', None)
    """
    return getattr(metric, _KIND, None)


def less_is_better(name: str, metric: Metric | None = None) -> bool:
    """Say whether a smaller value is better.

    Of the loss, and of a metric whose attribute `less_is_better` is True.

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

    The outputs of the classes are in the second dimension or in the last. Of an output that is not
    a tensor, its `logits` count.
    """
    return _accuracy(outputs, targets, IGNORED, weights)


def _accuracy(outputs: Any, targets: Tensor, ignored: int, weights: Tensor | None = None) -> float:
    outputs = outputs if isinstance(outputs, Tensor) else outputs.logits
    # probabilities of the classes
    if targets.is_floating_point() and targets.shape == outputs.shape:
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
    """Return the share of the targets' variance that is explained.

    Below 0 where their mean would do better.
    """
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
    """Return the usual metrics.

    For a loss that torch does not have, accuracy where the targets are classes.
    """
    usual = metrics_for(loss)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if usual or not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        return usual
    whole = (
        not targets.is_floating_point()
        and targets.dtype != torch.bool
        and logits.ndim == targets.ndim + 1
    )
    fits = targets.shape in (logits.shape[:1] + logits.shape[2:], logits.shape[:-1])
    return {"accuracy": accuracy} if whole and fits else {}


Numbers: TypeAlias = NDArray[np.float64]


def area_under_roc(scores: Any, positive: Any, weights: Any = None) -> float:
    """Return the share of pairs of a positive and a negative row whose scores are in this order.

    Ties count half.

    Not a number where there are no such pairs.

    Example:
        >>> area_under_roc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
    """
    w = _weights(weights, len(scores))
    _, places = np.unique(np.asarray(scores, dtype=float), return_inverse=True)
    good, bad = (
        np.bincount(places, weights=w * which)
        for which in (np.asarray(positive), 1 - np.asarray(positive))
    )
    pairs = good.sum() * bad.sum()
    below = np.cumsum(bad) - bad
    return float(good @ (below + bad / 2) / pairs) if pairs else float("nan")


def roc_curve(scores: Any, positive: Any, weights: Any = None) -> tuple[Numbers, Numbers]:
    """Return the shares of the negative and of the positive rows above each threshold, from none to all.

    Example:
        >>> [list(map(float, each)) for each in roc_curve([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])]
        [[0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0]]
    """
    w, truth = _weights(weights, len(scores)), np.asarray(positive, dtype=float)
    _, places = np.unique(-np.asarray(scores, dtype=float), return_inverse=True)
    shares = []
    for which in (1 - truth, truth):
        counts = np.bincount(places, weights=w * which)
        shares.append(np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum())
    return shares[0], shares[1]


def confusion(predicted: Any, truth: Any, n_classes: int, weights: Any = None) -> Numbers:
    """Return how many rows of each class (down) are told to be of each (across).

    Example:
        >>> confusion([0, 1, 1], [0, 0, 1], 2).tolist()
        [[1.0, 1.0], [0.0, 1.0]]
    """
    cells = np.asarray(truth) * n_classes + np.asarray(predicted)
    counts = np.bincount(cells, weights=_weights(weights, len(cells)), minlength=n_classes**2)
    return counts.astype(float).reshape(n_classes, n_classes)


def sensitivities(matrix: Numbers) -> Numbers:
    """Return of each class the share of its rows that are told to be of it.

    Not a number where it has none.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(np.diag(matrix) / matrix.sum(1))


class Bin(NamedTuple):
    """Rows of like probability.

    How many, the predicted probability, and the share that came true.
    """

    rows: int
    predicted: float
    came_true: float
    error: float  # the standard error of the share, by the probability told


def calibration(probabilities: Any, positive: Any, bins: int = 5, weights: Any = None) -> list[Bin]:
    """Return rows in as many bins of equal size, by the probability told; equal ones stay together.

    Example:
        >>> calibration([0.25, 0.25, 0.75, 0.75], [0, 1, 1, 1], bins=2)[1]
        Bin(rows=2, predicted=0.75, came_true=1.0, error=0.306...)
    """
    predicted, truth = np.asarray(probabilities, dtype=float), np.asarray(positive, dtype=float)
    w = _weights(weights, len(predicted))
    edges = np.unique(np.quantile(predicted, np.linspace(0, 1, bins + 1)[1:-1]))
    place = np.searchsorted(edges, predicted, side="left")
    filled = []
    for each in np.unique(place):
        inside = place == each
        total = w[inside].sum()
        if total:
            variance = (
                w[inside] ** 2 * predicted[inside] * (1 - predicted[inside])
            ).sum() / total**2
            means = (w[inside] @ predicted[inside] / total, w[inside] @ truth[inside] / total)
            filled.append(
                Bin(int(inside.sum()), float(means[0]), float(means[1]), float(np.sqrt(variance)))
            )
    return filled


@register_metric("auc")
@as_metric_of("classification")
def auc(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the area under the ROC curve.

    With more than two classes the mean of each against the rest.
    """
    probabilities, truth = probabilities_of(outputs), targets.cpu().numpy()
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [area_under_roc(probabilities[:, k], truth == k, _numpy(weights)) for k in classes]
    known = [area for area in areas if not np.isnan(area)]
    return float(np.mean(known)) if known else float("nan")


@register_metric("balanced-accuracy")
@as_metric_of("classification")
def balanced_accuracy(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean over classes of the share of a class's examples that are told to be of it."""
    predicted, truth = outputs.argmax(1).cpu().numpy(), targets.cpu().numpy()
    shares = sensitivities(confusion(predicted, truth, outputs.shape[1], _numpy(weights)))
    return float(np.nanmean(shares))


@register_metric("average-precision")
@as_metric_of("classification")
def average_precision(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean precision over the rows of the last of two classes, by falling probability.

    By chance it is their share. With more than two classes the mean of each against the rest.

    Example:
        >>> outputs = torch.tensor([[0.0, 0.1], [0.0, 0.4], [0.0, 0.35], [0.0, 0.8]])
        >>> round(average_precision(outputs, torch.tensor([0, 0, 1, 1])), 4)
        0.8333
    """
    probabilities, truth = probabilities_of(outputs), targets.cpu().numpy()
    w = _weights(_numpy(weights), len(truth))
    precisions = []
    for k in [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1]):
        _, places = np.unique(-probabilities[:, k], return_inverse=True)
        every = np.bincount(places, weights=w)
        good = np.bincount(places, weights=w * (truth == k))
        if good.sum():
            with np.errstate(invalid="ignore"):
                precision = np.nan_to_num(np.cumsum(good) / np.cumsum(every))
            precisions.append(float(good @ precision / good.sum()))
    return float(np.mean(precisions)) if precisions else float("nan")


@register_metric("f1")
@as_metric_of("classification")
def f1(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the harmonic mean of precision and sensitivity of the last of two classes.

    0 where none of its rows is told. With more than two classes the mean of all.
    """
    predicted, truth = outputs.argmax(1).cpu().numpy(), targets.cpu().numpy()
    matrix = confusion(predicted, truth, outputs.shape[1], _numpy(weights))
    both = matrix.sum(0) + matrix.sum(1)
    scores = 2 * np.diag(matrix)[both > 0] / both[both > 0]
    return float(scores[-1] if len(both) == 2 and both[-1] else scores.mean())


@register_metric("brier")
@as_metric_of("classification", less_is_better=True)
def brier(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean squared error of the classes' probabilities, summed over them.

    Of two classes, of one.
    """
    probabilities = probabilities_of(outputs)
    errors = (probabilities - np.eye(probabilities.shape[1])[targets.cpu().numpy()]) ** 2
    each = errors.sum(1) / (2 if probabilities.shape[1] == 2 else 1)
    return float(np.average(each, weights=_numpy(weights)))


def probabilities_of(outputs: Tensor) -> Numbers:
    """Return the probabilities of the classes, by rows."""
    return np.asarray(outputs.double().softmax(1).cpu().numpy())


def _numpy(weights: Tensor | None) -> Any:
    return None if weights is None else weights.double().cpu().numpy()


def _weights(weights: Any, n: int) -> Numbers:
    return np.ones(n) if weights is None else np.asarray(weights, dtype=float)
