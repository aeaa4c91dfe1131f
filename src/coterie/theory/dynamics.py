"""The rules on a noisy quadratic as a linear-Gaussian system, one coordinate at a time.

With e = x − x_0* and the bias of the peers ∇f_avg − ∇f_0 = gap·e − pull, keep c̃ = c + pull, the
error of the bias estimate at user 0's optimum. Then Algorithms 1 to 3 read

    e ← e − η [(a_0 + α gap) e − α (1 − w) pull − α w c̃ + (1 − α) n_0 + α n_1] + drift
    c̃ ← (1 − β) c̃ + β (gap e + n_1 − n_0)

where n_0 and n_1 are the same draws in both lines. (c̃ and not c, since pull may be 10⁸ times what
remains of e.) A third entry sums the iterates, where their average is asked for.

Where peers are asked at every K-th step only, the state also holds p, what they said at the last
exchange. At an exchange p ← (a_0 + gap) e − (1 − w) pull − w c̃ + n_1, and c̃ follows; in every
step

    e ← e − η [(1 − α) (a_0 e + n_0) + α p] + drift

`Transition` is a step, or several, of any such system z ← M z + v + noise of covariance Q.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.errors import KnobError
from coterie.rules.rule import Knob

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


_CHUNK = 1 << 15  # step matrices held at once: a few megabytes, whatever the number of steps


@dataclass(frozen=True, eq=False)
class Dynamics:
    """A rule with its step size on a noisy quadratic.

    What `Transition` every stretch of steps is.
    """

    curvature: FloatArray  # a_0, of shape (d,)
    gap: FloatArray  # a_1 − a_0, the curvature of the peers' bias
    pull: FloatArray  # a_1 (x_1* − x_0*), minus the peers' bias at user 0's optimum
    own_variance: FloatArray  # of n_0
    peer_variance: FloatArray  # of n_1
    drift_variance: FloatArray  # of the step that the optimum takes
    lr: Knob  # η
    alpha: Knob = 0.0  # α; 0 for Alone
    beta: Knob = 1.0  # β; 1 where there is no c, which then has no memory and no effect
    correction: float = 0.0  # w; 0 for weighted averaging
    first: bool = False  # whether c_0 is the first observed bias, not zero
    warm_up: bool = False  # whether β_t = max(β, 1/(t + 1))
    # the step after which the state also sums the iterates, if it does
    average_from: int | None = None
    every: int = 1  # K: peers are asked at every K-th step

    @cached_property
    def settled(self) -> float:
        """The step from which all knobs are constant, at an exchange.

        Infinity where one is a function of the step.
        """
        if callable(self.alpha) or callable(self.beta) or callable(self.lr):
            return math.inf
        if self.warm_up:
            return self.every * math.ceil(1 / self.beta) if self.beta else math.inf
        return self.every * int(self.first)

    @cached_property
    def settled_step(self) -> Transition:
        """The step, or the steps from one exchange to the next, repeated once all knobs are constant."""
        if math.isinf(self.settled):
            raise KnobError(
                "a scheduled knob never settles; pass numbers for `alpha`, `beta` and `lr`"
            )
        step = max(int(self.settled), -1 if self.average_from is None else self.average_from + 1)
        step += -step % self.every
        return chain(self.each(step, step + self.every))

    @property
    def size(self) -> int:
        """How many numbers the state has in each coordinate."""
        return 3 if self.average_from is None else 4

    def reading(self, step: int) -> FloatArray:
        """Return the weights that read x − x_0*, or the mean of it, from the state after `step` steps."""
        reading = np.zeros(self.size)
        if self.average_from is None or step <= self.average_from:
            reading[0] = 1.0
        else:
            reading[3] = 1 / (step - self.average_from)
        return reading

    def between(self, start: int, stop: int) -> Transition:
        """Return steps `start` to `stop` − 1 as one transition."""
        if start == stop:
            return identity(len(self.curvature), self.size)
        averaging = () if self.average_from is None else (self.average_from, self.average_from + 1)
        cuts = {start, stop} | {
            int(cut) for cut in (self.settled, *averaging) if start < cut < stop
        }
        return functools.reduce(
            Transition.then, itertools.starmap(self._stretch, itertools.pairwise(sorted(cuts)))
        )

    def each(self, start: int, stop: int) -> Transition:
        """Return steps `start` to `stop` − 1 one by one, along the first axis."""
        alpha, beta, correction, lr = (knob[:, None] for knob in self._knobs(start, stop))
        shape = (stop - start, len(self.curvature), self.size)
        asked = np.arange(start, stop) % self.every == 0
        matrix, offset = np.zeros((*shape, self.size)), np.zeros(shape)
        noise = np.zeros((*shape, 2))  # how much of n_0 and of n_1 is in each entry
        matrix[..., 1, 1] = np.where(asked, 1 - beta[:, 0], 1.0)[:, None]
        matrix[..., 1, 0] = np.where(asked[:, None], beta * self.gap, 0.0)
        noise[..., 1, 0], noise[..., 1, 1] = (
            np.where(asked[:, None], sign * beta, 0.0) for sign in (-1, 1)
        )
        matrix[..., 2, 0] = np.where(asked[:, None], self.curvature + self.gap, 0.0)
        matrix[..., 2, 1] = np.where(asked[:, None], -correction, 0.0)
        matrix[..., 2, 2] = np.where(asked, 0.0, 1.0)[:, None]
        offset[..., 2] = np.where(asked[:, None], -(1 - correction) * self.pull, 0.0)
        noise[..., 2, 1] = np.where(asked, 1.0, 0.0)[:, None]
        moved = -lr * alpha  # by the p after the step, in whose place stands what it is made of
        matrix[..., 0, :] = moved[..., None] * matrix[..., 2, :]
        matrix[..., 0, 0] += 1 - lr * (1 - alpha) * self.curvature
        offset[..., 0] = moved * offset[..., 2]
        noise[..., 0, :] = moved[..., None] * noise[..., 2, :]
        noise[..., 0, 0] -= lr * (1 - alpha)
        if self.average_from is not None:  # sum ← sum + the new e, from the first step on
            matrix[..., 3, :] = matrix[..., 0, :]
            offset[..., 3], noise[..., 3, :] = offset[..., 0], noise[..., 0, :]
            matrix[..., 3, 3] = (np.arange(start, stop) != self.average_from)[:, None]
        variances = np.stack([self.own_variance, self.peer_variance], -1)
        covariance = np.einsum("tdin,dn,tdjn->tdij", noise, variances, noise)
        moving = [0] if self.average_from is None else [0, 3]
        for i, j in itertools.product(moving, moving):
            covariance[..., i, j] += self.drift_variance
        return Transition(matrix, offset, covariance)

    def _stretch(self, start: int, stop: int) -> Transition:
        """Return steps between two cuts as one.

        By squaring once the knobs are constant, else pairwise.
        """
        first = start + -start % self.every
        periods = (stop - first) // self.every
        if start >= self.settled and start != self.average_from and periods > 0:
            whole, last = self._settled_powers(periods), first + periods * self.every
            whole = whole if first == start else self._one_by_one(start, first).then(whole)
            return whole if last == stop else whole.then(self._one_by_one(last, stop))
        return self._one_by_one(start, stop)

    def _one_by_one(self, start: int, stop: int) -> Transition:
        chunk = max(1, _CHUNK // len(self.curvature))
        chunks = [chain(self.each(t, min(t + chunk, stop))) for t in range(start, stop, chunk)]
        return functools.reduce(Transition.then, chunks)

    def _knobs(
        self, start: int, stop: int
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return α, β, w and η at every step; β and w count at exchanges alone."""
        alpha = _at_each("alpha", self.alpha, start, stop)
        beta = _at_each("beta", self.beta, start, stop)
        lr = _at_each("lr", self.lr, start, stop, highest=math.inf)
        correction = np.full(stop - start, self.correction)
        exchange = np.arange(start, stop) // self.every
        if self.warm_up:
            beta = np.maximum(beta, 1 / (exchange + 1))
        if self.first:
            # c_0 = b_0 makes the first direction (1 − α(1 − w)) g_0 + α(1 − w) g_avg, and c_1 =
            # b_0, up to the second exchange.
            alpha = np.where(exchange == 0, alpha * (1 - self.correction), alpha)
            beta = np.where(exchange == 0, 1.0, beta)
            correction = np.where(exchange == 0, 0.0, correction)
        return alpha, beta, correction, lr

    @cached_property
    def _settled_powers(self) -> Powers:
        return Powers(self.settled_step)


def _at_each(name: str, knob: Knob, start: int, stop: int, highest: float = 1.0) -> FloatArray:
    """Return a knob's value at every step, checked."""
    if callable(knob):
        values = np.fromiter(map(knob, range(start, stop)), dtype=float, count=stop - start)
    else:
        values = np.full(stop - start, float(knob))
    bad = ~((values >= 0) & (values <= highest) & np.isfinite(values))
    if bad.any():
        t = int(bad.argmax())
        allowed = "be a number of at least 0" if math.isinf(highest) else f"lie in [0, {highest:g}]"
        raise KnobError(f"`{name}` must {allowed}, got {values[t]:g} at step {start + t}")
    return values
