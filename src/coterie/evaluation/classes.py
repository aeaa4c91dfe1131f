"""What class probabilities are worth: ranking, confusion and calibration, exactly and with weights of rows."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.evaluation.metrics import as_metric_of, register_metric

Numbers: TypeAlias = NDArray[np.float64]


def area_under_roc(scores: Any, positive: Any, weights: Any = None) -> float:
    """Return the share of pairs of a positive and a negative row whose scores are in this order; ties count half.

    Not a number where there are no such pairs.

    Example:
        >>> area_under_roc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
    """
    w = _weights(weights, len(scores))
    _, places = np.unique(np.asarray(scores, dtype=float), return_inverse=True)
    good, bad = (
        np.bincount(places, weights=w * which) for which in (np.asarray(positive), 1 - np.asarray(positive))
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
    """Return of each class the share of its rows that are told to be of it; not a number where it has none."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.diag(matrix) / matrix.sum(1))


class Bin(NamedTuple):
    """Rows of like probability: how many, the probability that was told, and the share that came true."""

    rows: int
    told: float
    came_true: float
    error: float  # the standard error of the share, by the probability told


def calibration(probabilities: Any, positive: Any, bins: int = 5, weights: Any = None) -> list[Bin]:
    """Return rows in as many bins of equal size, by the probability told; equal ones stay together.

    Example:
        >>> calibration([0.25, 0.25, 0.75, 0.75], [0, 1, 1, 1], bins=2)[1]
        Bin(rows=2, told=0.75, came_true=1.0, error=0.306...)
    """
    told, truth = np.asarray(probabilities, dtype=float), np.asarray(positive, dtype=float)
    w = _weights(weights, len(told))
    edges = np.unique(np.quantile(told, np.linspace(0, 1, bins + 1)[1:-1]))
    place = np.searchsorted(edges, told, side="left")
    filled = []
    for each in np.unique(place):
        inside = place == each
        total = w[inside].sum()
        if total:
            variance = (w[inside] ** 2 * told[inside] * (1 - told[inside])).sum() / total**2
            means = (w[inside] @ told[inside] / total, w[inside] @ truth[inside] / total)
            filled.append(Bin(int(inside.sum()), float(means[0]), float(means[1]), float(np.sqrt(variance))))
    return filled


@register_metric("auc")
@as_metric_of("classification")
def auc(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the area under the ROC curve; with more than two classes the mean of each against the rest."""
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


@register_metric("brier")
@as_metric_of("classification", less_is_better=True)
def brier(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean squared error of the classes' probabilities, summed over them; of two classes, of one."""
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
