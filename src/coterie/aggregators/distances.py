"""Aggregators that use the distances between rows, computed from one Gram matrix.

Krum, centred clipping.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coterie.aggregators.points import Aggregator, FloatArray, Points, Tolerant
from coterie.arguments import COUNT, POSITIVE, checked, optional


@dataclass(frozen=True)
class Krum(Tolerant):
    """Take the row whose nearest neighbours are nearest.

        x_k,  k = argmin_i Σ of the n − f − 1 smallest ‖x_i − x_j‖², j ≠ i

    Args:
        n_byzantine: f, how many rows may be bad; see `Tolerant`.

    Example:
        >>> import torch
        >>> Krum(n_byzantine=1)(torch.tensor([[0.0], [1.0], [1.5], [1e30]]))
        tensor([1.])

    Reference: Blanchard, El Mhamdi, Guerraoui and Stainer, *Machine Learning with Adversaries*
    (2017), with one neighbour more than theirs (n − f − 2), as in Allouah et al., *Fixing by
    Mixing* (2023), and in `byzfl`.
    """

    uses_distances = True

    def of(self, points: Points) -> Tensor:
        """Return the row with the lowest score."""
        return _mean_of_best(points, self.bad(points), 1)


@dataclass(frozen=True)
@checked(m=optional(COUNT))
class MultiKrum(Tolerant):
    """Average the m rows with the lowest Krum scores.

    Args:
        n_byzantine: f, how many rows may be bad; see `Tolerant`.
        m: how many rows to average; n − f when None.

    Example:
        >>> import torch
        >>> MultiKrum(n_byzantine=1)(torch.tensor([[0.0], [1.0], [2.0], [1e30]]))
        tensor([1.])

    Reference: as `Krum`.
    """

    m: int | None = None
    uses_distances = True

    def of(self, points: Points) -> Tensor:
        """Return the mean of the rows with the lowest scores."""
        f = self.bad(points)
        return _mean_of_best(
            points, f, len(points) - f if self.m is None else min(self.m, len(points))
        )


@dataclass(frozen=True)
@checked(radius=POSITIVE, iterations=COUNT)
class CentredClipping(Aggregator):
    """Move from 0 by the mean difference to the rows, each difference clipped to a radius.

        v ← v + (1/n) Σ (x_i − v) min(1, ρ / ‖x_i − v‖)

    v is a combination of the rows, so its distances to them come from their Gram matrix. In the
    paper v is carried from one training step to the next; here it starts from 0 each time and takes
    more iterations.

    Args:
        radius: ρ, how far one row may move v in an iteration; about the distance between good rows.
        iterations: how many times v moves.

    Example:
        >>> import torch
        >>> CentredClipping(radius=1.0, iterations=100)(torch.tensor([[2.0], [2.5], [1e30]]))
        tensor([2.7500])

    Reference: Karimireddy, He and Jaggi, *Learning from History for Byzantine Robust Optimization*
    (2021), Algorithm 2.
    """

    radius: float
    iterations: int = 10

    def points(self, rows: Tensor) -> Points:
        """Return the finite rows, with their Gram matrix where lengths are not enough."""
        return Points.finite(rows) if self.iterations == 1 else Points.measured(rows)

    def of(self, points: Points) -> Tensor:
        """Return the last centre."""
        weights = self._moved(np.zeros(len(points)), points.lengths())
        for _ in range(self.iterations - 1):
            gram = points.gram
            inner = gram @ weights
            squares = np.maximum(gram.diagonal() - 2 * inner + weights @ inner, 0.0)
            weights = self._moved(weights, np.sqrt(squares))
        return points.mean(weights)

    def _moved(self, weights: FloatArray, distances: FloatArray) -> FloatArray:
        """Return the weights of the next centre."""
        kept = self.radius / np.maximum(distances, self.radius)
        return np.asarray(weights * (1 - kept.mean()) + kept / len(kept))


def _mean_of_best(points: Points, f: int, m: int) -> Tensor:
    """Return the mean of the m points with the least sum of squared distances to their n − f − 1 nearest others."""
    # the point itself is first, at 0
    nearest = np.sort(points.distances(), axis=1)[:, : len(points) - f]
    weights = np.zeros(len(points))
    digits, exponents = np.frexp(nearest.sum(1))  # to nine digits: the first of equal scores
    scores = np.ldexp(np.round(digits * 2**30), exponents)
    weights[scores.argsort(kind="stable")[:m]] = 1 / m
    return points.mean(weights)
