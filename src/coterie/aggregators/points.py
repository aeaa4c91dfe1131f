"""What an aggregator is, and the rows it combines: the finite ones, their Gram matrix, and means of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import KnobError
from coterie.gradients.gradients import is_finite

FloatArray: TypeAlias = NDArray[np.float64]

LONGEST = 1e140
"""Entries beyond this, which only float64 can hold, are cut to it, so that squares do not overflow."""
APART = 1e-2
"""Rows nearer than this, in squared distance over squared lengths, are measured in float64."""
SAME = 1e-14
"""Rows nearer than this in float64 are one point: what is left is rounding."""


class Aggregator(ABC):
    """One vector in the place of several, that some of them cannot carry away: `aggregator(rows)`.

    Rows that are not finite are left out first, and count among the `n_byzantine` bad ones. The result has the
    dtype and device of the rows, which stay as they are. An aggregator of one's own says what it makes of
    the `Points` that are left.
    """

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the pooled vector, of shape (d,), of rows of shape (n, d)."""
        if rows.ndim != 2 or not rows.is_floating_point():
            raise KnobError(
                f"`rows` must be a matrix of numbers, one row a user, got {rows.dtype} {tuple(rows.shape)}"
            )
        return self.of(self.points(rows))

    @abstractmethod
    def of(self, points: Points) -> Tensor:
        """Return the pooled vector of points that are finite."""

    @property
    def least(self) -> int:
        """How many rows it takes to keep what the aggregator promises."""
        return 1

    def points(self, rows: Tensor) -> Points:
        """Return the rows that can be pooled, measured where the aggregator goes by distances."""
        return Points.finite(rows)


@dataclass(frozen=True)
class Tolerant(Aggregator):
    """An aggregator that is told how many rows may be bad.

    Args:
        n_byzantine: f, how many rows may be bad, fewer than half. Where rows are missing, as many as are allowed,
            so that nobody can end a run by not answering.
    """

    n_byzantine: int

    def __post_init__(self) -> None:
        if isinstance(self.n_byzantine, bool) or not isinstance(self.n_byzantine, int) or self.n_byzantine < 0:
            raise KnobError(f"`n_byzantine` must be a whole number of rows, 0 or more, got {self.n_byzantine!r}")

    @property
    def least(self) -> int:
        """How many rows it takes for the bad ones to be fewer than half."""
        return 2 * self.n_byzantine + 1

    def bad(self, points: Points) -> int:
        """Return how many of these points may be bad."""
        return min(max(0, self.n_byzantine - points.left_out), (len(points) - 1) // 2)


@dataclass(frozen=True, eq=False)
class Points:
    """The vectors to aggregator: finite rows, or means of them, which are worked out only where they are needed.

    Args:
        base: the finite rows, of shape (n, d).
        left_out: how many rows were not finite.
        mix: the weights that make points of rows, of shape (points, n); None: the rows themselves.
        known: the points' Gram matrix, where they were measured.
    """

    base: Tensor
    left_out: int = 0
    mix: FloatArray | None = None
    known: FloatArray | None = None

    @classmethod
    def finite(cls, rows: Tensor) -> Points:
        """Keep the finite rows."""
        kept = rows if is_finite(rows) else rows[rows.isfinite().all(1)]
        if not len(kept):
            raise KnobError(f"nothing to aggregator: none of {len(rows)} rows is finite")
        if kept.dtype == torch.float64 and kept.abs().amax() > LONGEST:
            kept = kept.clamp(-LONGEST, LONGEST)
        return cls(kept, len(rows) - len(kept))

    @classmethod
    def measured(cls, rows: Tensor, *, exactly: bool = False) -> Points:
        """Keep the finite rows, and form their Gram matrix.

        It is formed in float32, where that tells the rows apart, and in float64 where it does not or `exactly` is
        asked for. A row that is not finite shows in its diagonal.
        """
        if rows.numel() and rows.dtype != torch.float64 and not exactly:
            gram = _gram(rows, torch.float32)
            if _tells_apart(gram):
                return cls(rows, known=gram)
        points = cls.finite(rows)
        return cls(points.base, points.left_out, known=_gram(points.base, torch.float64))

    def __len__(self) -> int:
        return len(self.base) if self.mix is None else len(self.mix)

    @property
    def rows(self) -> Tensor:
        """The points as vectors."""
        return self.base if self.mix is None else _weighed(self.mix, self.base)

    @property
    def gram(self) -> FloatArray:
        """The inner products of the points."""
        return _gram(self.rows, torch.float64) if self.known is None else self.known

    def lengths(self) -> FloatArray:
        """Return the lengths of the points."""
        if self.known is not None:
            return np.sqrt(np.maximum(self.known.diagonal(), 0.0))
        found = torch.linalg.vector_norm(self.rows, dim=1)
        if not is_finite(found):
            found = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        return np.asarray(found.double().cpu().numpy())

    def distances(self) -> FloatArray:
        """Return the squared distances between the points."""
        gram = self.gram
        squares = np.add.outer(gram.diagonal(), gram.diagonal())
        found: FloatArray = squares - 2 * gram
        found[found <= SAME * squares] = 0.0
        np.fill_diagonal(found, 0.0)
        return found

    def mixed(self, weights: FloatArray) -> Points:
        """Return means of these points, by the rows of a matrix of weights."""
        gram = None if self.known is None else weights @ self.known @ weights.T
        return Points(self.base, self.left_out, weights if self.mix is None else weights @ self.mix, gram)

    def mean(self, weights: FloatArray) -> Tensor:
        """Return the sum of the points by weights."""
        weights = weights if self.mix is None else weights @ self.mix
        used = weights.nonzero()[0]
        if len(used) == 1 and weights[used[0]] == 1:
            return self.base[int(used[0])].clone()
        return _weighed(weights, self.base)


def _weighed(weights: FloatArray, rows: Tensor) -> Tensor:
    """Return weights times rows, in float32 at least: halves would round the weights."""
    dtype = rows.dtype if rows.dtype == torch.float64 else torch.float32
    return (torch.as_tensor(weights, dtype=dtype, device=rows.device) @ rows.to(dtype)).to(rows.dtype)


def _gram(rows: Tensor, dtype: torch.dtype) -> FloatArray:
    """Return the rows' inner products, some columns at a time, so that a converted copy stays small."""
    total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for block in torch.split(rows, 2**22 if rows.is_cuda else 2**15, dim=1):
        converted = block.to(dtype)
        total += converted @ converted.T
    return np.asarray(total.cpu().numpy())


def _tells_apart(gram: FloatArray) -> bool:
    """Say whether a Gram matrix formed in float32 holds the distances to a few digits."""
    squares = np.add.outer(gram.diagonal(), gram.diagonal())
    if not np.isfinite(gram).all() or gram.diagonal().min() < 1e-30:
        return False
    far = squares - 2 * gram > APART * squares
    return bool((far | np.eye(len(gram), dtype=bool)).all())
