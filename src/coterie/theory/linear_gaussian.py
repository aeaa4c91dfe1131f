"""Linear-Gaussian systems z ← M z + v + noise of covariance Q.

Many steps as one, with no simulation.

The law of z after h steps given z now is Gaussian again, so that h steps are one `Transition`.
Transitions compose, and composition is associative: equal steps are raised to a power by repeated
squaring, unequal ones are multiplied pairwise, all pairs at once.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transition:
    """The law of a later state given an earlier one: Gaussian with mean M z + v and covariance Q.

    Leading axes are independent systems, or steps for `chain`.
    """

    matrix: FloatArray  # M, of shape (…, k, k)
    offset: FloatArray  # v, of shape (…, k)
    noise: FloatArray  # Q, of shape (…, k, k)

    def then(self, later: "Transition") -> "Transition":
        """Return this transition followed by a later one."""
        return Transition(
            later.matrix @ self.matrix,
            _apply(later.matrix, self.offset) + later.offset,
            _spread(later.matrix, self.noise) + later.noise,
        )

    def moments(self, mean: FloatArray, covariance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the mean and covariance of the later state from those of the earlier one."""
        return (
            _apply(self.matrix, mean) + self.offset,
            _spread(self.matrix, covariance) + self.noise,
        )

    def sample(self, z: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Draw later states from earlier ones, of shape (trials, …, k), exactly in law."""
        noise = _apply(self.noise_root, rng.standard_normal(z.shape))
        return _apply(self.matrix, z) + self.offset + noise

    @cached_property
    def noise_root(self) -> FloatArray:
        """A square root of Q."""
        return square_root(self.noise)


@dataclass(frozen=True, eq=False)
class Powers:
    """The powers of one transition; every power that has been computed is kept."""

    once: Transition
    known: dict[int, Transition] = field(default_factory=dict, repr=False)

    def __call__(self, steps: int) -> Transition:
        """Return `steps` equal steps as one, in O(log steps)."""
        if steps not in self.known:
            top = 1 << steps.bit_length() - 1
            if steps == 1:
                self.known[1] = self.once
            elif steps == top:
                self.known[top] = self(top // 2).then(self(top // 2))
            else:
                self.known[steps] = self(top).then(self(steps - top))
        return self.known[steps]


def identity(*shape: int) -> Transition:
    """Return the transition that changes nothing, for states of the given shape."""
    matrix = np.broadcast_to(np.eye(shape[-1]), (*shape, shape[-1]))
    return Transition(matrix, np.zeros(shape), np.zeros_like(matrix))


def chain(steps: Transition) -> Transition:
    """Return the steps along the first axis, first to last, as one."""
    while (count := len(steps.matrix)) > 1:
        paired = _rows(steps, slice(0, count - 1, 2)).then(_rows(steps, slice(1, count, 2)))
        if count % 2:
            last = _rows(steps, slice(count - 1, count))
            names = ("matrix", "offset", "noise")
            paired = Transition(
                *(np.concatenate([getattr(paired, n), getattr(last, n)]) for n in names)
            )
        steps = paired
    return Transition(steps.matrix[0], steps.offset[0], steps.noise[0])


def square_root(covariance: FloatArray) -> FloatArray:
    """Return a lower triangular R with R Rᵀ the covariance, which may be singular (Cholesky may not)."""
    rest, root = covariance.copy(), np.zeros_like(covariance)
    for j in range(covariance.shape[-1]):
        pivot = np.sqrt(np.maximum(rest[..., j, j], 0))[..., None]
        column = np.divide(
            rest[..., :, j], pivot, out=np.zeros_like(rest[..., :, j]), where=pivot > 0
        )
        column[..., :j] = 0
        root[..., :, j] = column
        rest -= column[..., :, None] * column[..., None, :]
    return root


def _apply(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    return np.asarray((matrix @ vector[..., None])[..., 0])


def _spread(matrix: FloatArray, covariance: FloatArray) -> FloatArray:
    return np.asarray(matrix @ covariance @ np.swapaxes(matrix, -1, -2))


def _rows(steps: Transition, rows: slice) -> Transition:
    return Transition(steps.matrix[rows], steps.offset[rows], steps.noise[rows])
