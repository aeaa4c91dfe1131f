"""Squares of means from a few batches of gradients, without what noise would add to them, and their errors.

Errors are those of a bootstrap: each user's batches are drawn again with replacement.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 200
"""How often batches are drawn again for an error."""
WITHIN = 0.9545
"""The share that two standard errors are to cover."""


@dataclass(frozen=True)
class Spread:
    """How far a user's rows, and their mean, are from the mean of all examples there could be.

    Both are shares of the variance of one example: for batches of b fresh examples `seen` is 1/b;
    where every batch is drawn from the same n, (1 − b/n)/b, and 1/n is `shared` by all of them.
    """

    seen: float = 1.0
    shared: float = 0.0

    def of_mean(self, rows: int) -> float:
        """Return the share of an example's variance that the mean of some rows has."""
        return self.seen / rows + self.shared


@dataclass(frozen=True, eq=False)
class Resampled:
    """A value in every resample, the first of which is all batches, and its variance there to first order."""

    values: Array
    variances: Array

    @property
    def error(self) -> float:
        """The standard error.

        Half of what covers `WITHIN` of the resamples, each in units of its own error.

        Squares are skewed: a sample without the rare large ones is too low, and so is its spread.
        Resamples have that too; in units of their own errors they are as far off as the value may
        be. Where there is nothing but noise, first order is too little: at least the standard
        deviation of the resamples.
        """
        own = np.sqrt(np.maximum(self.variances, 0.0))
        off = np.abs(self.values[1:] - self.values[0])
        units = np.divide(off, own[1:], out=np.zeros_like(off), where=own[1:] > 0)
        return float(max(np.quantile(units, WITHIN) / 2 * own[0], np.std(self.values[1:])))

    def over(self, divisor: float) -> "Resampled":
        """Return the same divided by a number."""
        return Resampled(self.values / divisor, self.variances / divisor**2)


@dataclass(frozen=True, eq=False)
class Vectors:
    """One user's vectors, a row for each batch, and weights of the batches in resamples.

    The first are equal.
    """

    rows: Array  # of shape (batches, length)
    drawn: Array  # of shape (1 + resamples, batches), each row summing to 1
    spread: Spread

    @classmethod
    def of(cls, rows: Array, spread: Spread, random: np.random.Generator) -> "Vectors":
        """Return vectors with resamples of their own."""
        n = len(rows)
        drawn = random.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
        return cls(rows, np.concatenate([np.full((1, n), 1 / n), drawn]), spread)

    def like(self, rows: Array, batches: slice, spread: Spread) -> "Vectors":
        """Return other vectors of some of the same batches, drawn along with them."""
        drawn = self.drawn[:, batches] + 1e-12  # a resample may have none of them
        return Vectors(rows, drawn / drawn.sum(1, keepdims=True), spread)

    @cached_property
    def shows_noise(self) -> bool:
        """Whether the rows differ by noise.

        Not where there is one, or each is of all the examples there are.
        """
        differ = self.apart.sum() > 1e-24 * np.diag(self.gram).sum()
        return len(self.rows) > 1 and self.spread.seen > 0 and bool(differ)

    @cached_property
    def further(self) -> float:
        """How much further from the truth the mean is than resamples are from it.

        A resample of n batches has (n − 1)/n of their variance, and nothing of the noise that all
        of them share.
        """
        n = len(self.rows)
        if self.shows_noise:
            return float(np.sqrt(self.spread.of_mean(n) / (self.spread.seen / n) * n / (n - 1)))
        return 1.0

    @cached_property
    def weights(self) -> Array:
        """What each batch weighs in the means of the resamples."""
        equal = 1 / len(self.rows)
        return np.asarray(equal + self.further * (self.drawn - equal))

    @cached_property
    def gram(self) -> Array:
        """Products of the rows."""
        return np.asarray(self.rows @ self.rows.T)

    @cached_property
    def apart(self) -> Array:
        """Of each row an estimate of how far rows are from their mean, squared.

        It is right in the mean of all.
        """
        n, gram = len(self.rows), self.gram
        squares = np.diag(gram) - 2 * gram.mean(0) + gram.mean()
        return np.asarray(np.maximum(squares, 0.0) * n / max(n - 1, 1))

    def each(self) -> Resampled | None:
        """Return the variance of one example's vector; None where the batches do not show it."""
        if not self.shows_noise:
            return None
        return Resampled(
            self.drawn @ self.apart, self._variance(np.tile(self.apart, (len(self.drawn), 1)))
        ).over(self.spread.seen)

    def square(self, other: "Vectors | None" = None, each: float = 0.0) -> Resampled:
        """Return ‖E v‖², or ‖E v − E w‖²: that of the means, less what noise adds to it.

        `each` stands for the variance of one example of a user whose batches do not show it.
        """
        value, slopes = self._own_square(each)
        if other is None:
            return Resampled(value, self._variance(slopes))
        theirs, their_slopes = other._own_square(each)
        cross = self.rows @ other.rows.T
        toward, back = other.weights @ cross.T, self.weights @ cross
        product = (self.weights * toward).sum(1)
        variance = self._variance(slopes - 2 * toward) + other._variance(their_slopes - 2 * back)
        return Resampled(value + theirs - 2 * product, variance)

    def _own_square(self, each: float) -> tuple[Array, Array]:
        """Return the square of the mean without its noise, and how it changes with the weight of each row."""
        products = self.weights @ self.gram
        value = (self.weights * products).sum(1)
        if not self.shows_noise:
            return value - each * self.spread.of_mean(1), 2 * products
        shared = self.spread.shared / self.spread.seen
        value = value - self.weights**2 @ self.apart - shared * (self.drawn @ self.apart)
        return value, 2 * (products - self.weights * self.apart)

    def _variance(self, slopes: Array) -> Array:
        """Return the variance, to first order, of what changes by these slopes with the weights."""
        means = (self.drawn * slopes).sum(1, keepdims=True)
        n = len(self.rows)
        return np.asarray((self.drawn * (slopes - means) ** 2).sum(1) / n * self.further**2)
