"""Whom to listen to: the mixture of the peers' gradients that comes nearest to user 0's own."""

import numpy as np
from scipy.optimize import nnls

from coterie.mixture.families import Array

KEPT = 0.7
"""How much of the Gram matrix of earlier points is kept at each."""
AVERAGED = 4
"""Over how many of the last points weights are averaged."""
LEAST_SHARE = 0.25
"""A peer with less than this share of an equal weight is left out."""
TOWARDS_DIAGONAL = 0.1
"""How far a Gram matrix is shrunk to its diagonal: a noisy one invites to exploit its errors."""
MISSING = 1e6
"""The difference, in each number, of a peer that gave none."""


class NearestMixture:
    """The weights of N peers by V views of the own rows, from gradients at points that saw none of these."""

    def __init__(self, views: int, peers: int) -> None:
        self.found: list[Array] = [np.full((views, peers), 1 / peers)]
        self.alike = np.full((1, peers), 1 / peers)
        self._gram: Array | None = None

    @property
    def has_looked(self) -> bool:
        """Whether any gradient was compared."""
        return self._gram is not None

    def look(self, gradients: Array, own: Array) -> None:
        """Compare every peer's gradient at a point, (N, r), with the own in each view, (V, r)."""
        known = np.isfinite(gradients.sum(1))
        theirs = np.where(known[:, None], gradients, 0.0)
        rows = np.concatenate([np.zeros_like(theirs[:1]), theirs]) - own[:, None]  # (V, N + 1, r)
        rows[:, 1:][:, ~known] = MISSING
        gram = rows @ rows.swapaxes(1, 2)
        diagonal = np.einsum("pii->pi", gram)[:, :, None] * np.eye(gram.shape[1])
        gram = (1 - TOWARDS_DIAGONAL) * gram + TOWARDS_DIAGONAL * diagonal
        self._gram = gram if self._gram is None else KEPT * self._gram + (1 - KEPT) * gram
        self.found.append(np.array([weights_of(one) for one in self._gram]))

    def weights(self) -> Array:
        """Return the weights that each view found, (V, N), without those of nearly nothing."""
        tau = np.mean(
            self.found[-AVERAGED:] if len(self.found) > AVERAGED else self.found[-1:], axis=0
        )
        kept = np.where(tau < LEAST_SHARE / tau.shape[1], 0.0, tau)
        normalised: Array = kept / kept.sum(1, keepdims=True)
        return normalised


def weights_of(gram: Array) -> Array:
    """Return the peers' part of argmin κᵀHκ over the simplex, normalised.

    Equal where nobody is better than none.

    Example:
        >>> differences = np.array([[2.0, 0.0], [0.1, 0.1], [0.1, -0.1], [2.0, 5.0]])  # of nobody and three peers
        >>> weights_of(differences @ differences.T + 0.1 * np.eye(4)).round(2)
        array([0.5, 0.5, 0. ])
    """
    n, trace = len(gram) - 1, float(np.trace(gram))
    if not 0 < trace < np.inf:
        return np.full(n, 1 / n)
    root = np.linalg.cholesky(gram / trace + 1e-10 * np.eye(n + 1)).T
    kappa = nnls(
        np.vstack([root, np.full(n + 1, 1e3)]), np.append(np.zeros(n + 1), 1e3), maxiter=1000
    )[0]
    whole = float(kappa[1:].sum())
    return kappa[1:] / whole if whole > 1e-6 * kappa.sum() else np.full(n, 1 / n)
