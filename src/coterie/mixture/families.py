"""Families: how a linear predictor becomes a loss.

A family knows its targets, its losses and their derivatives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.special import expit

Array: TypeAlias = np.ndarray[Any, Any]

LARGE = 300.0
"""Of an output whose exponential is taken as it is."""
LARGEST = 30.0
"""Of a logarithm of counts: beyond it the exponential is held."""


@dataclass(frozen=True)
class Family:
    """A negative log-likelihood of outputs S given targets Y, both of shape (…, K).

    Args:
        name: what it is called in messages and records.
        predict: what is expected of the targets, (…, K): probabilities, or numbers. The slope of
            the loss by S is this less the targets.
        losses: of each example, (…).
        curvature: the diagonal of the second derivative by S, from what is predicted, (…, K).
        link: the outputs that predict a mean.
    """

    name: str
    predict: Callable[[Array], Array]
    losses: Callable[[Array, Array], Array]
    curvature: Callable[[Array], Array]
    link: Callable[[Array], Array]

    @property
    def is_squared(self) -> bool:
        """Whether the noise has a variance to be found."""
        return self.name == "squared"

    def targets(self, values: Any, outputs: int) -> Array:
        """Return targets as numbers of shape (n, K); classes become indicators.

        Example:
            >>> SOFTMAX.targets([0, 2], 3)
            array([[1., 0., 0.],
                   [0., 0., 1.]])
        """
        values = np.asarray(values)
        if self.name == "softmax" and values.ndim == 1:
            values = np.eye(outputs)[values.astype(np.int64)]
        numbers: Array = np.asarray(values, dtype=np.float64).reshape(len(values), outputs)
        return numbers

    def fits(self, targets: Any, outputs: int) -> bool:
        """Say whether targets, a tensor or an array, are such as this family knows.

        Example:
            >>> SOFTMAX.fits(np.array([0, 2]), 3), SOFTMAX.fits(np.array([0, -100]), 3)
            (True, False)
        """
        if not hasattr(targets, "shape") or not len(targets):
            return False
        if self.name == "softmax" and targets.ndim == 1:
            whole = "int" in str(targets.dtype)
            return whole and bool(((targets >= 0) & (targets < outputs)).all())
        if isinstance(targets, np.ndarray):
            return targets.size == len(targets) * outputs
        return int(targets.numel()) == len(targets) * outputs

    def reported_losses(self, outputs: Array, targets: Array) -> Array:
        """Return the losses as torch has them: the mean over outputs, and e² in the place of e²/2.

        Example:
            >>> SQUARED.reported_losses(np.array([[1.0, 0.0]]), np.zeros((1, 2)))
            array([0.5])
        """
        losses = self.losses(outputs, targets)
        if self.name == "softmax":
            return losses
        mean: Array = losses * (2 if self.is_squared else 1) / targets.shape[-1]
        return mean


def _powers(outputs: Array) -> tuple[Array, Array, Array | float]:
    """Return exponentials, their sums over the classes, and what was taken off the outputs before."""
    ones, off = np.ones(outputs.shape[-1]), None
    if outputs.size and np.abs(outputs).max() > LARGE:
        off = outputs.max(-1)
        outputs = outputs - off[..., None]
    powers: Array = np.exp(outputs)
    # a product is faster than a sum over a short axis
    return powers, powers @ ones, 0.0 if off is None else off


def _shares(outputs: Array) -> Array:
    powers, whole, _ = _powers(outputs)
    return powers / whole[..., None]


def _cross_entropy(outputs: Array, targets: Array) -> Array:
    _, whole, off = _powers(outputs)
    losses: Array = np.log(whole) + off - (outputs * targets) @ np.ones(outputs.shape[-1])
    return losses


def _logarithms(shares: Array) -> Array:
    logarithms: Array = np.log(np.clip(shares, 1e-6, 1 - 1e-6))
    return logarithms


def _exponential(outputs: Array) -> Array:
    counts: Array = np.exp(np.minimum(outputs, LARGEST))
    return counts


SQUARED = Family(
    "squared",
    np.asarray,
    lambda s, y: np.einsum("...k,...k->...", error := s - y, error) / 2,
    np.ones_like,
    lambda mean: mean,
)
"""Half the squared error, for a noise of variance 1."""

SOFTMAX = Family("softmax", _shares, _cross_entropy, lambda p: p * (1 - p), _logarithms)
"""Cross entropy of classes."""

LOGISTIC = Family(
    "logistic",
    expit,
    lambda s, y: (np.logaddexp(0.0, s) - y * s).sum(-1),
    lambda p: p * (1 - p),
    lambda mean: _logarithms(mean) - _logarithms(1 - mean),
)
"""Binary cross entropy with logits, each output for itself."""

POISSON = Family(
    "poisson",
    _exponential,
    lambda s, y: (_exponential(s) - y * s).sum(-1),
    np.asarray,
    lambda mean: np.log(np.maximum(mean, 1e-6)),
)
"""Counts, by the logarithm of their mean."""

LOSS = Family("loss", np.asarray, lambda s, y: s.sum(-1), np.ones_like, np.asarray)
"""Any other loss, which takes the place of outputs: nothing says how to mix predictions."""

FAMILIES = {family.name: family for family in (SQUARED, SOFTMAX, LOGISTIC, POISSON)}
