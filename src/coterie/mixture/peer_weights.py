"""Whom to listen to: the mixture of the peers' gradients that comes nearest to user 0's own."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from coterie.gradients.simplex import simplex_minimum_low_rank
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
        self.views, self.alike = views, np.full((1, peers), 1 / peers)
        self._looks: list[tuple[Array, Array]] = []

    @property
    def has_looked(self) -> bool:
        """Whether any gradient was compared."""
        return bool(self._looks)

    def look(self, gradients: Array, own: Array) -> None:
        """Compare every peer's gradient at a point, (N, r), with the own in each view, (V, r)."""
        self._looks.append((gradients, own))

    def weights(self) -> Array:
        """Return the weights that each view found, (V, N), without those of nearly nothing."""
        tau, many = np.repeat(self.alike, self.views, 0), len(self._looks)
        if many:
            ends = range(many - AVERAGED + 1, many + 1) if many >= AVERAGED else [many]
            columns = sum(own.shape[1] for _, own in self._looks)
            found = self._by_factors(ends) if columns < tau.shape[1] else self._by_grams(ends)
            tau = np.mean(found, axis=0)
        kept = np.where(tau < LEAST_SHARE / tau.shape[1], 0.0, tau)
        normalised: Array = kept / kept.sum(1, keepdims=True)
        return normalised

    def _by_grams(self, ends: Sequence[int]) -> list[Array]:
        """Return what was found after so many points, from a Gram matrix for each view."""
        mean, found = np.zeros(0), list[Array]()
        for count, (of_peers, own) in enumerate(self._looks, 1):
            rows = np.array([_lacking(of_peers, one) for one in own])  # (V, N + 1, r)
            gram = rows @ rows.swapaxes(1, 2)
            diagonal = np.einsum("pii->pi", gram)[:, :, None] * np.eye(gram.shape[1])
            gram = (1 - TOWARDS_DIAGONAL) * gram + TOWARDS_DIAGONAL * diagonal
            mean = KEPT * mean + (1 - KEPT) * gram if mean.size else gram
            if count in ends:
                found.append(np.array([weights_of(one) for one in mean]))
        return found

    def _by_factors(self, ends: Sequence[int]) -> list[Array]:
        """Return the same where there are more peers than numbers that they told: O(N), not O(N³)."""
        found = []
        for count in ends:
            shares = KEPT ** np.arange(count - 1, -1, -1.0) * np.where(
                np.arange(count), 1 - KEPT, 1.0
            )
            tau = []
            for view in range(self.views):
                factor = np.concatenate(
                    [
                        _lacking(of_peers, own[view]) * np.sqrt(share)
                        for share, (of_peers, own) in zip(shares, self._looks, strict=False)
                    ],
                    1,
                )
                squares = np.square(factor).sum(1)
                diagonal = TOWARDS_DIAGONAL * squares + 1e-10 * squares.sum()
                root = np.sqrt(1 - TOWARDS_DIAGONAL)
                tau.append(_of_peers(simplex_minimum_low_rank(root * factor, diagonal)))
            found.append(np.array(tau))
        return found


def _lacking(of_peers: Array, own: Array) -> Array:
    """Return what nobody and each peer lacks of the own gradient, (N + 1, r)."""
    known = np.isfinite(of_peers.sum(1))
    rows: Array = np.concatenate([np.zeros_like(of_peers[:1]), of_peers]) - own
    rows[1:][~known] = MISSING
    return rows


def _of_peers(kappa: Array) -> Array:
    """Return the peers' part, normalised; equal where nobody is better than none."""
    whole, n = float(kappa[1:].sum()), len(kappa) - 1
    return kappa[1:] / whole if whole > 1e-6 * kappa.sum() else np.full(n, 1 / n)


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
    return _of_peers(kappa)
