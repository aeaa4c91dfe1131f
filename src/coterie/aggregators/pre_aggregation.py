"""Preparation for an aggregator.

Rows are replaced by means of rows, so that good ones are more alike.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coterie.aggregators.points import Aggregator, Points, Tolerant
from coterie.arguments import COUNT, checked


@dataclass(frozen=True)
class NearestNeighbourMixing(Tolerant):
    """Replace each row by the mean of its n − f nearest, itself among them, and aggregate those.

    Where `then` uses distances too, those between the means come from the same Gram matrix, and the
    means are never formed.

    Args:
        n_byzantine: f, how many rows may be bad; see `Tolerant`.
        then: the aggregator that combines the means.

    Example:
        >>> import torch
        >>> from coterie.aggregators import Krum
        >>> NearestNeighbourMixing(1, then=Krum(1))(torch.tensor([[0.0], [1.0], [2.0], [1e30]]))
        tensor([1.])

    Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, *Fixing by Mixing* (2023),
    Algorithm 2.
    """

    then: Aggregator

    @property
    def least(self) -> int:
        """The number of rows that it and `then` need."""
        return max(super().least, self.then.least)

    def points(self, rows: Tensor) -> Points:
        """Return the finite rows with their Gram matrix in float64.

        Means of the same rows lie close together.
        """
        return Points.measured(rows, exactly=True)

    def of(self, points: Points) -> Tensor:
        """Return what `then` makes of the means of neighbours."""
        kept = len(points) - self.bad(points)
        nearest = points.distances().argsort(axis=1, kind="stable")[:, :kept]
        weights = np.zeros((len(points), len(points)))
        np.put_along_axis(weights, nearest, 1 / kept, axis=1)
        return self.then.of(points.mixed(weights))


@dataclass(frozen=True)
@checked(size=COUNT)
class Bucketing(Aggregator):
    """Deal the rows into buckets at random, and aggregate the buckets' means.

    The order depends on the seed and the rows' sums only. So it changes from step to step, a
    resumed run has the same one, and a user who does not know the seed cannot choose it. A bad row
    spoils one bucket: as many buckets may be bad as rows, and `then` must tolerate that share.

    Args:
        size: rows a bucket; the last may have fewer.
        then: the aggregator that combines the means.
        seed: what the order depends on, with the rows.

    Example:
        >>> import torch
        >>> from coterie.aggregators import CoordinateMedian
        >>> Bucketing(size=2, then=CoordinateMedian())(torch.ones(5, 2))
        tensor([1., 1.])

    Reference: Karimireddy, He and Jaggi, *Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing* (2022), Algorithm 1.
    """

    size: int
    then: Aggregator
    seed: int = 0

    @property
    def least(self) -> int:
        """The number of rows that give as many buckets as `then` needs."""
        return self.size * (self.then.least - 1) + 1

    def points(self, rows: Tensor) -> Points:
        """Return the finite rows, with their Gram matrix where `then` uses distances."""
        return self.then.points(rows)

    def of(self, points: Points) -> Tensor:
        """Return what `then` makes of the buckets' means."""
        order = self._order(points)
        weights = np.zeros((-(-len(points) // self.size), len(points)))
        weights[np.arange(len(points)) // self.size, order] = 1.0
        return self.then.of(points.mixed(weights / weights.sum(1, keepdims=True)))

    def _order(self, points: Points) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return an order of the points that depends on the seed and the rows."""
        sums = points.base.sum(1).double().cpu().numpy()
        digest = hashlib.blake2b(
            sums.tobytes(), key=str(self.seed).encode()[:64], digest_size=16
        ).digest()
        return np.random.default_rng(int.from_bytes(digest, "little")).permutation(len(points))
