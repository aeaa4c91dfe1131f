"""Aggregators that treat every coordinate by itself: mean, median, trimmed mean."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.aggregators.points import Aggregator, Points, Tolerant


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
