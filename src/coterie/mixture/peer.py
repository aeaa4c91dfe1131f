"""What a peer computes.

Its own posterior under each prior. User 0 needs only weighted sums of it.
"""

from typing import NamedTuple

import numpy as np

from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import (
    Priors,
    Rows,
    back_to_parameters,
    most_probable,
    outputs_of,
    posterior_variance,
)

ITERATIONS = 15
"""Of L-BFGS, at most: EM goes on from what it finds."""
TOLERANCE = 1e-2
"""How near a peer finds its mode, in standard deviations of the prior.

Its posterior is far wider.
"""
FARTHEST = 5.0
"""How many standard deviations of the prior a peer's mode may be from the prior's mean, in each number."""


class Posterior(NamedTuple):
    """A peer's posteriors under P priors, or weighted sums of those of many peers."""

    first: Array  # (D, P, K): x − mean, x the mode
    second: Array  # (D, P, K): (x − mean)²
    variance: Array  # (D, P, K): V of the posterior
    gradient: Array  # (D, P, K): of the mean loss at the prior's mean
    loss: Array  # (P,): the mean loss there
    residual: Array  # (P,): the expected sum of squared errors; 0 but for the squared loss
    predicted: Array  # (P,): of how many numbers

    def flat(self) -> Array:
        """Return a row for each prior, (P, 4 D K + 3)."""
        blocks = [np.moveaxis(each, 1, 0).reshape(len(self.loss), -1) for each in self[:4]]
        return np.column_stack([*blocks, *self[4:]])

    @classmethod
    def of(cls, flat: Array, columns: int, outputs: int) -> "Posterior":
        """Return what `flat` was made of, for D columns and K outputs."""
        blocks = flat[:, :-3].reshape(len(flat), 4, columns, outputs)
        return cls(*np.transpose(blocks, (1, 2, 0, 3)), *flat[:, -3:].T)


def posterior(rows: Rows, family: Family, priors: Priors) -> Posterior:
    """Return a peer's posteriors; a row that holds a number that is not finite does not count.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> rows = Rows(np.ones((3, 1)), np.full((3, 1), 4.0))
        >>> found = posterior(rows, SQUARED, Priors(np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.ones(1)))
        >>> found.first.item(), found.variance.item(), found.residual.item(), found.gradient.item()
        (3.0, 0.25, 3.75, -4.0)
    """
    rows = rows.finite()
    if priors.variance.max() < 1e-9:
        n, outputs = max(1, len(rows.inputs)), outputs_of(rows.inputs, priors.mean)
        gradient = back_to_parameters(rows.inputs, family.predict(outputs) - rows.targets[:, None]) / n
        z = np.zeros_like(gradient); zz = np.zeros(len(priors.noise))
        return Posterior(z, z, z, gradient, family.losses(outputs, rows.targets[:, None]).sum(0) / n, zz, zz)
    at = most_probable(rows, family, priors, tolerance=TOLERANCE, iterations=ITERATIONS)
    variance = posterior_variance(rows, family, priors, at)
    residual = np.zeros(len(priors.noise))
    if family.is_squared:
        errors = np.square(rows.targets[:, None] - outputs_of(rows.inputs, at)).sum((0, 2))
        residual = errors + (np.square(rows.inputs).sum(0)[:, None, None] * variance).sum((0, 2))
    n, outputs = max(1, len(rows.inputs)), outputs_of(rows.inputs, priors.mean)
    gradient = back_to_parameters(rows.inputs, family.predict(outputs) - rows.targets[:, None]) / n
    loss = family.losses(outputs, rows.targets[:, None]).sum(0) / n
    first, predicted = at - priors.mean, np.full(len(priors.noise), float(rows.targets.size))
    return bounded(
        Posterior(first, np.square(first), variance, gradient, loss, residual, predicted), priors
    )


def bounded(given: Posterior, priors: Priors) -> Posterior:
    """Return what one peer gives within what it may move.

    A mode is at most `FARTHEST` standard deviations of the prior from its mean in each number, and
    a posterior no wider than the prior. In one exchange a peer of weight τ thus moves μ by at most
    2 · 5 τ √v and v by at most 26 τ v in each number, whatever it sends.

    Example:
        >>> prior = Priors(np.zeros((1, 1, 1)), np.full((1, 1, 1), 4.0), np.ones(1))
        >>> huge = Posterior(*np.full((4, 1, 1, 1), 1e9), *np.ones((3, 1)))
        >>> [each.item() for each in bounded(huge, prior)[:3]]
        [10.0, 100.0, 4.0]
    """
    most = FARTHEST * np.sqrt(priors.variance)
    return given._replace(
        first=np.clip(given.first, -most, most),
        second=np.clip(given.second, 0.0, np.square(most)),
        variance=np.clip(given.variance, 0.0, priors.variance),
    )
