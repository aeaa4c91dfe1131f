"""The units that parameters are found in: user 0's own spread of each column."""

from typing import NamedTuple

import numpy as np

from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import Rows

FEWEST = 5
"""With fewer own rows their spread is not believed: numbers stay as they are."""
RAREST = 4.0
"""How many units a user's own value is away at most.

A category that is rare in the own rows is not blown up.
"""
FARTHEST = 100.0
"""How many of user 0's standard deviations a peer's value may be away.

What is farther counts as this.
"""


PIECE = 2**14
"""Of many rows so many are scaled at a time."""


class Scaling(NamedTuple):
    """Inputs and targets as (value − shift)/scale, and the way back."""

    shift: Array  # (columns,)
    scale: Array
    target_shift: Array  # (K,); 0 but for the squared loss
    target_scale: Array  # (K,); one number for all outputs, so that losses keep their ratios
    intercept: bool

    @classmethod
    def of(cls, inputs: Array, targets: Array, family: Family, *, intercept: bool) -> "Scaling":
        """Return the scaling by user 0's rows.

        Example:
            >>> from coterie.mixture.families import SOFTMAX
            >>> inputs = np.column_stack([np.arange(6.0), np.full(6, 7.0)])
            >>> Scaling.of(inputs, np.eye(2)[[0, 1] * 3], SOFTMAX, intercept=True).shift
            array([2.5, 7. ])
        """
        shift, scale = _spread(inputs, centred=intercept)
        k = targets.shape[1]
        if not family.is_squared:
            return cls(shift, scale, np.zeros(k), np.ones(k), intercept)
        target_shift, target_scale = _spread(targets, centred=intercept)
        return cls(
            shift,
            scale,
            target_shift,
            np.full(k, np.sqrt(np.square(target_scale).mean())),
            intercept,
        )

    @classmethod
    def none(cls, columns: int, outputs: int) -> "Scaling":
        """Return the scaling of rows that are in their units."""
        spreads = [spread(n) for n in (columns, outputs) for spread in (np.zeros, np.ones)]
        return cls(spreads[0], spreads[1], spreads[2], spreads[3], intercept=False)

    def rows(self, inputs: Array, targets: Array, weights: Array | None = None) -> Rows:
        """Return rows in these units, with a column of ones where there is an intercept."""
        columns = [(np.asarray(inputs, dtype=np.float64) - self.shift) / self.scale]
        columns += [np.ones((len(inputs), 1))] if self.intercept else []
        scaled = (targets - self.target_shift) / self.target_scale
        return Rows(np.concatenate(columns, 1), scaled, weights)

    def unscaled(self, rows: Rows) -> Rows:
        """Return rows in the caller's units, the column of ones kept."""
        columns = len(self.scale)
        inputs = np.column_stack(
            [rows.inputs[:, :columns] * self.scale + self.shift, rows.inputs[:, columns:]]
        )
        return Rows(inputs, self.outputs(rows.targets), rows.weights)

    def clipped(self, rows: Rows) -> Rows:
        """Return a peer's rows without values beyond all that user 0 knows."""
        inputs, targets = (np.clip(each, -FARTHEST, FARTHEST) for each in rows[:2])
        return Rows(inputs, targets, rows.weights)

    def outputs(self, outputs: Array) -> Array:
        """Return outputs (…, K) in the caller's units."""
        back: Array = outputs * self.target_scale + self.target_shift
        return back

    def back(self, parameters: Array) -> Array:
        """Return parameters (D, …, K) in the caller's units."""
        columns = len(self.scale)
        slopes = (
            parameters[:columns]
            / self.scale.reshape(-1, *[1] * (parameters.ndim - 1))
            * self.target_scale
        )
        if not self.intercept:
            return slopes
        base = self.outputs(parameters[columns]) - np.tensordot(self.shift, slopes, 1)
        return np.concatenate([slopes, base[None]])


class ManyRows(NamedTuple):
    """Rows that are scaled when they are needed: a second copy of all would be large."""

    inputs: Array  # (n, columns), in the caller's units, of any precision
    targets: Array  # (n, K), scaled
    scaling: Scaling
    weights: Array | None = None  # as in `Rows`

    @classmethod
    def of(
        cls, inputs: Array, targets: Array, scaling: Scaling, weights: Array | None = None
    ) -> "ManyRows":
        """Return the rows of which all numbers are finite, and that count."""
        fine = np.concatenate(
            [
                np.isfinite(inputs[some]).all(1) & np.isfinite(targets[some]).all(1)
                for some in pieces(len(inputs))
            ]
        )
        fine &= True if weights is None else weights > 0
        if not fine.all():
            inputs, targets = inputs[fine], targets[fine]
            weights = None if weights is None else weights[fine]
        scaled = (targets - scaling.target_shift) / scaling.target_scale
        return cls(inputs, scaled, scaling, weights)

    def some(self, places: Array) -> Rows:
        """Return some of them, scaled."""
        targets = self.targets[places]
        weights = None if self.weights is None else self.weights[places]
        return Rows(self.scaling.rows(self.inputs[places], targets).inputs, targets, weights)

    @property
    def counts(self) -> Array:
        """What each row counts, (n,)."""
        return np.ones(len(self.targets)) if self.weights is None else self.weights


def pieces(n: int) -> list[slice]:
    """Return slices of n rows, which are worked at one after the other."""
    return [slice(begin, begin + PIECE) for begin in range(0, n, PIECE)]


def _spread(values: Array, *, centred: bool) -> tuple[Array, Array]:
    """Return by what columns are shifted and scaled.

    One that is constant, or of few rows, keeps its scale.
    """
    width, parts = values.shape[1], pieces(len(values))

    def finite(some: slice) -> Array:
        part = np.asarray(values[some], dtype=np.float64)
        fine = np.isfinite(part).all(1)
        return part if fine.all() else part[fine]

    n, total, squares = 0, np.zeros(width), np.zeros(width)
    size, away = np.zeros(width), np.zeros(width)
    for part in map(finite, parts):
        n, total = n + len(part), total + part.sum(0)
        size = np.maximum(size, np.abs(part).max(0, initial=0.0))
    if n < FEWEST:
        return np.zeros(width), np.ones(width)
    shift = total / n if centred else np.zeros(width)
    for part in map(finite, parts):
        moved = part - shift
        squares += np.square(moved).sum(0)
        away = np.maximum(away, np.abs(moved).max(0, initial=0.0))
    scale = np.maximum(np.sqrt(squares / n), away / RAREST)
    return shift, np.where(scale > 1e-9 * size, scale, 1.0)
