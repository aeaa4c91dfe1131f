"""The aggregator contract, and the points it combines.

Finite rows or means of them, with their Gram matrix.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.arguments import checked, whole
from coterie.errors import KnobError
from coterie.gradients.parameters import is_finite

FloatArray: TypeAlias = NDArray[np.float64]

MAX_ENTRY = 1e140
"""Larger entries, which only float64 can hold, are clamped to it, so that squares do not overflow."""
FLOAT32_APART = 1e-2
"""Rows nearer than this, in squared distance over squared lengths, need a Gram matrix in float64."""
SAME = 1e-14
"""Rows nearer than this in float64 are one point: the difference is rounding."""


@dataclass(frozen=True, eq=False)
class Points:
    """The vectors to combine.

    Finite rows, or means of them, which are computed only where they are needed.
    """

    base: Tensor  # the finite rows, of shape (n, d)
    left_out: int = 0  # how many rows were not finite
    # the weights that make points of rows, of shape (points, n); None: the rows
    mix: FloatArray | None = None
    known: FloatArray | None = None  # the points' Gram matrix, where it has been computed

    @classmethod
    def finite(cls, rows: Tensor) -> Self:
        """Return points that are the finite rows."""
        kept = rows if is_finite(rows) else rows[rows.isfinite().all(1)]
        if not len(kept):
            raise KnobError(f"nothing to aggregate: none of {len(rows)} rows is finite")
        if kept.dtype == torch.float64 and kept.abs().amax() > MAX_ENTRY:
            kept = kept.clamp(-MAX_ENTRY, MAX_ENTRY)
        return cls(kept, len(rows) - len(kept))

    @classmethod
    def measured(cls, rows: Tensor, *, exactly: bool = False) -> Self:
        """Return points that are the finite rows, with their Gram matrix.

        The matrix is computed in float32 where that tells the rows apart, else, or if `exactly`, in
        float64. A row that is not finite shows in its diagonal.
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
        norms = torch.linalg.vector_norm(self.rows, dim=1)
        if not is_finite(norms):
            norms = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        return np.asarray(norms.double().cpu().numpy())

    def distances(self) -> FloatArray:
        """Return the squared distances between the points."""
        gram = self.gram
        squares = np.add.outer(gram.diagonal(), gram.diagonal())
        squared: FloatArray = squares - 2 * gram
        squared[squared <= SAME * squares] = 0.0
        np.fill_diagonal(squared, 0.0)
        return squared

    def mixed(self, weights: FloatArray) -> "Points":
        """Return weighted means of these points.

        Each row of the matrix holds the weights of one mean.
        """
        gram = None if self.known is None else weights @ self.known @ weights.T
        return Points(
            self.base, self.left_out, weights if self.mix is None else weights @ self.mix, gram
        )

    def mean(self, weights: FloatArray) -> Tensor:
        """Return the weighted sum of the points."""
        weights = weights if self.mix is None else weights @ self.mix
        used = weights.nonzero()[0]
        if len(used) == 1 and weights[used[0]] == 1:
            return self.base[int(used[0])].clone()
        return _weighed(weights, self.base)


class Aggregator(ABC):
    """Combine several vectors into one that a few bad ones cannot move far: `aggregator(rows)`.

    Rows that are not finite are left out first, and count among the `n_byzantine` bad ones. The
    result has the dtype and device of the rows, which do not change. A subclass implements `of`,
    which combines the finite rows.
    """

    uses_distances: ClassVar[bool] = False  # whether `of` needs the Gram matrix of the rows

    def __call__(self, rows: Tensor) -> Tensor:
        """Combine rows of shape (n, d) into one vector of shape (d,)."""
        if rows.ndim != 2 or not rows.is_floating_point():
            shape = f"{rows.dtype} {tuple(rows.shape)}"
            raise KnobError(f"`rows` must be a matrix of numbers, one row a user, got {shape}")
        return self.of(self.points(rows))

    @abstractmethod
    def of(self, points: Points) -> Tensor:
        """Combine finite points into one vector."""

    @property
    def least(self) -> int:
        """The number of rows that the aggregator's guarantee needs."""
        return 1

    def points(self, rows: Tensor) -> Points:
        """Return the finite rows, with their Gram matrix where the aggregator uses distances."""
        return Points.measured(rows) if self.uses_distances else Points.finite(rows)


@dataclass(frozen=True)
@checked(n_byzantine=whole(0))
class Tolerant(Aggregator):
    """An aggregator that is told how many rows may be bad.

    Args:
        n_byzantine: f, how many rows may be bad, fewer than half. Where rows are missing it is
            lowered to what the rest allows, so that no user can end a run by not answering.
    """

    n_byzantine: int

    @property
    def least(self) -> int:
        """The number of rows of which `n_byzantine` are fewer than half."""
        return 2 * self.n_byzantine + 1

    def bad(self, points: Points) -> int:
        """Return how many of these points may be bad."""
        return min(max(0, self.n_byzantine - points.left_out), (len(points) - 1) // 2)


def _weighed(weights: FloatArray, rows: Tensor) -> Tensor:
    """Return weights times rows, in float32 at least: float16 would round the weights."""
    dtype = rows.dtype if rows.dtype == torch.float64 else torch.float32
    return (torch.as_tensor(weights, dtype=dtype, device=rows.device) @ rows.to(dtype)).to(
        rows.dtype
    )


def _gram(rows: Tensor, dtype: torch.dtype) -> FloatArray:
    """Return the rows' inner products, some columns at a time, so that a converted copy stays small."""
    total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for block in torch.split(rows, 2**22 if rows.is_cuda else 2**15, dim=1):
        converted = block.to(dtype)
        total += converted @ converted.T
    return np.asarray(total.cpu().numpy())


def _tells_apart(gram: FloatArray) -> bool:
    """Say whether a Gram matrix computed in float32 gives the distances to a few digits."""
    if not np.isfinite(gram).all() or gram.diagonal().min() < 1e-30:
        return False
    squares = np.add.outer(gram.diagonal(), gram.diagonal())
    far = squares - 2 * gram > FLOAT32_APART * squares
    return bool((far | np.eye(len(gram), dtype=bool)).all())
