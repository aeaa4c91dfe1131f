"""The geometric median, to convergence, computed from the Gram matrix alone."""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coterie.aggregators.points import Aggregator, FloatArray, Points
from coterie.arguments import checked, real

MAX_ITERATIONS = 1000
"""Ten are usual."""


@dataclass(frozen=True)
@checked(tolerance=real("lie between 0 and 1", lambda tolerance: 0 < tolerance < 1))
class GeometricMedian(Aggregator):
    """Take the point whose distances to the rows have the least sum.

        argmin_v Σ ‖v − x_i‖,   where the unit vectors from v to the rows sum to 0

    It is a weighted mean of the rows, so the search is over n weights, and its cost is small beside
    that of the Gram matrix. The row with the least sum of distances may be the median; its
    subgradient decides. Otherwise a step of Vardi and Zhang leads from it to a point better than
    every row. From there each step is Newton's where that halves the gradient, and Weiszfeld's
    otherwise.

    Args:
        tolerance: the norm of the mean unit vector at which the search stops.

    Example:
        >>> import torch
        >>> GeometricMedian()(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1e30, 1e30]]))
        tensor([0.5000, 0.5000])

    Reference: Vardi and Zhang, *The multivariate L1-median and associated data depth* (2000); as an
    aggregator, Pillutla, Kakade and Harchaoui, *Robust Aggregation for Federated Learning* (2022),
    where it is smoothed and not converged.
    """

    tolerance: float = 1e-8
    uses_distances = True

    def of(self, points: Points) -> Tensor:
        """Return the geometric median."""
        squared = points.distances()
        start = int(np.sqrt(squared).sum(1).argmin())
        # Centred at a row among the good ones: a row far away then costs the others no digits.
        gram = points.gram
        about = gram - gram[start] - gram[:, [start]] + gram[start, start]
        np.fill_diagonal(about, squared[start])
        # a step of Newton's that is then not taken
        with np.errstate(over="ignore", invalid="ignore"):
            return points.mean(self._weights(about, start))

    def _weights(self, gram: FloatArray, start: int) -> FloatArray:
        """Return the weights of the median, from the Gram matrix of rows centred at the row `start`."""
        weights, better = _away_from(gram, start)
        if not better:
            return weights
        slope = _slope(gram, weights)
        for _ in range(MAX_ITERATIONS):
            inverse, gradient, length = slope
            if length <= self.tolerance * len(gram):
                break
            newton = _newton(gram, weights, inverse, gradient)
            slope = _slope(gram, newton)
            if slope[2] < length / 2:
                weights = newton
            else:  # also where Newton's step is not finite
                weights = inverse / inverse.sum()
                slope = _slope(gram, weights)
        # a last step of Weiszfeld's: a mean of rows despite rounding
        return np.asarray(slope[0] / slope[0].sum())


def _away_from(gram: FloatArray, start: int) -> tuple[FloatArray, bool]:
    """Return the weights of a point better than the row `start`, and whether there is one."""
    squares = gram.diagonal()
    same = squares == 0
    inverse = np.divide(1.0, np.sqrt(squares), out=np.zeros(len(gram)), where=~same)
    pull, held = math.sqrt(max(0.0, float(inverse @ gram @ inverse))), int(same.sum())
    at_start = np.zeros(len(gram))
    at_start[start] = 1.0
    if pull <= held * (1 + 1e-12):
        return at_start, False
    share = 1 - held / pull
    return (1 - share) * at_start + share * inverse / inverse.sum(), True


def _slope(gram: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray, float]:
    """Return 1/distance of Σ w_i x_i to each row, the gradient of their sum as weights of rows, and its length."""
    inner = gram @ weights
    whole = weights @ inner
    squares = np.maximum(
        gram.diagonal() - 2 * inner + whole, 1e-16 * (gram.diagonal() + whole) + 1e-300
    )
    inverse = 1 / np.sqrt(squares)
    gradient = inverse.sum() * weights - inverse
    return inverse, gradient, math.sqrt(max(float(gradient @ gram @ gradient), 0.0))


def _newton(
    gram: FloatArray, weights: FloatArray, inverse: FloatArray, gradient: FloatArray
) -> FloatArray:
    """Return the weights after a step of Newton's.

    NaN where there is none, as for rows on one line.

    The Hessian is Σ (I − r_i r_iᵀ)/d_i, r_i the unit vectors, here as it acts on weights of rows.
    """
    towards = weights - np.eye(len(gram))
    hessian = -(towards.T * inverse**3) @ (towards @ gram)
    hessian.flat[:: len(gram) + 1] += inverse.sum()
    try:
        return np.asarray(weights - np.linalg.solve(hessian, gradient))
    except np.linalg.LinAlgError:
        return np.full(len(gram), np.nan)
