"""Robust ways to combine users' gradients: by coordinates, by distances, and after mixing rows."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.aggregators.points import Aggregator, FloatArray, Points, Tolerant
from coterie.arguments import COUNT, POSITIVE, checked, optional


@dataclass(frozen=True)
class Mean(Aggregator):
    """Average all rows: (1/n) Σ x_i. One bad row can move it anywhere.

    Example:
        >>> Mean()(torch.tensor([[0.0], [1.0], [5.0]]))
        tensor([2.])
    """

    def of(self, points: Points) -> Tensor:
        """Return the mean."""
        return points.mean(np.full(len(points), 1 / len(points)))


@dataclass(frozen=True)
class CoordinateMedian(Aggregator):
    """Take the median of every coordinate; of an even number of rows, the mean of the middle two.

    With fewer than half of the rows bad, every coordinate lies in the range of the good ones.

    Example:
        >>> CoordinateMedian()(torch.tensor([[0.0, 9.0], [1.0, 2.0], [1e30, 3.0]]))
        tensor([1., 3.])

    Reference: Yin, Chen, Ramchandran and Bartlett, *Byzantine-Robust Distributed Learning* (2018),
    Definition 1.
    """

    def of(self, points: Points) -> Tensor:
        """Return the median of every coordinate."""
        ordered = _sorted(points.rows)
        # the sum could overflow
        return ordered[(len(points) - 1) // 2] / 2 + ordered[len(points) // 2] / 2


@dataclass(frozen=True)
class TrimmedMean(Tolerant):
    """Leave out the f smallest and the f largest of every coordinate, and average the rest.

    With at most f < n/2 bad rows, every coordinate lies in the range of the good ones.

    Args:
        n_byzantine: f, how many rows may be bad; see `Tolerant`.

    Example:
        >>> TrimmedMean(n_byzantine=1)(torch.tensor([[0.0], [1.0], [3.0], [1e30]]))
        tensor([2.])

    Reference: Yin, Chen, Ramchandran and Bartlett, *Byzantine-Robust Distributed Learning* (2018),
    Definition 2.
    """

    def of(self, points: Points) -> Tensor:
        """Return the trimmed mean of every coordinate."""
        f = self.bad(points)
        if not f:
            return Mean().of(points)
        return Mean().of(Points(torch.stack(_sorted(points.rows)[f : len(points) - f])))


def _sorted(rows: Tensor) -> list[Tensor]:
    """Return the rows with every coordinate in ascending order.

    A sorting network compares whole rows. For few rows this is an order of magnitude faster than
    sorting each of many short columns.
    """
    if len(rows) > 64 or rows.is_cuda:
        return list(rows.sort(0).values)
    ordered = list(rows)
    for i, j in _comparisons(len(rows)):
        ordered[i], ordered[j] = (
            torch.minimum(ordered[i], ordered[j]),
            torch.maximum(ordered[i], ordered[j]),
        )
    return ordered


def _comparisons(n: int) -> Iterator[tuple[int, int]]:
    """Yield the comparisons of Batcher's odd-even merge sort of n things."""
    run = 1
    while run < n:
        gap = run
        while gap:
            for start in range(gap % run, n - gap, 2 * gap):
                for i in range(start, min(start + gap, n - gap)):
                    if i // (2 * run) == (i + gap) // (2 * run):
                        yield i, i + gap
            gap //= 2
        run *= 2


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
