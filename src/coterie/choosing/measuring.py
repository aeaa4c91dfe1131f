"""Measure the theory's constants from gradients: a few batches, each at two points.

With one batch at both points its noise cancels in the difference, which shows curvature (L, δ_k).
Of two batches the noises are independent, so that what noise adds to a square is known and taken
off (ζ_k). Errors are those of a bootstrap: each user's batches are drawn again with replacement.
What such numbers can and cannot tell: docs/estimates.md.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.choosing.sampled_gradients import Asking, OnParts, SampledGradients, SampledRows
from coterie.engines.engine import AnswersAtOwnPoints, Engine, require
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.theory.estimates import Estimates, Measured, PeerEstimates
from coterie.users.sampling import random_key

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
        other_value, other_slopes = other._own_square(each)
        cross = self.rows @ other.rows.T
        toward, back = other.weights @ cross.T, self.weights @ cross
        product = (self.weights * toward).sum(1)
        variance = self._variance(slopes - 2 * toward) + other._variance(other_slopes - 2 * back)
        return Resampled(value + other_value - 2 * product, variance)

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


BATCHES = 8
"""How many batches of each user are drawn, each of them used at two points."""

PARTS = 32
"""Into how many disjoint batches a user's examples are dealt at most, where they are at hand."""


@dataclass(frozen=True)
class Sampling:
    """How a user's batches are drawn."""

    size: float = 1.0  # examples in a batch, while measuring
    # examples that they are drawn from anew each time; infinite for fresh or disjoint batches
    of: float = math.inf
    in_run: float | None = None  # examples in a batch of the run; as `size` when None
    share: float = 0.0  # how much of the user's examples a batch of the run is; 0 for fresh samples
    added: float = 0.0  # s, the noise that a private peer adds to a gradient, new in each


def measure(
    engine: Engine,
    x: Tensor,
    *,
    own: Sampling | None = None,
    peers: Mapping[str, Sampling] | None = None,
    batches: int = BATCHES,
) -> Estimates:
    """Measure the constants from gradients at x and at a point a little downhill.

        σ_k² = variance of g_k(x) over batches
        ζ_k² = ‖mean of g_k(x) − mean of g_0(x)‖²,  less the variances of the two means
        δ_k² = the same of g_k(x + u) − g_k(x) and g_0(x + u) − g_0(x),  over ‖u‖²;   L² of g_0(x +
        u) − g_0(x) m_k  = the fall of ζ_k² over that of ‖∇f_0‖² from x to x + u, which then is
        taken off ζ_k²

    Examples that are in this process are dealt into disjoint batches; of others the batches of
    steps 0, 1, … are asked for. Negative squares count as 0. u goes along the gradient of a third
    of user 0's batches, which are left out of what is measured along it. Batches of the same n
    examples are not independent as samples of all there could be; what the examples' own noise adds
    to a square, their variance over n, is taken off. Errors are those of a bootstrap over batches.

    Args:
        engine: where the gradients come from; every peer's is asked for.
        x: the point.
        own: how user 0's batches are drawn. Where neither this nor `peers` is given, the engine
            says it.
        peers: how each peer's are, by name; fresh where it is not in it.
        batches: how many, at least 3; steps 0, 1, … of the run.

    Example:
        >>> import torch
        >>> from coterie.theory.quadratic import NoisyQuadratic, Quadratic
        >>> alike, stranger = Quadratic(2, 1, noise=0.1), Quadratic(5, 1, noise=0.2)
        >>> problem = NoisyQuadratic(Quadratic(2, [1] * 50, noise=0.1), [alike, stranger], x0=4)
        >>> measured = measure(problem.engine(), torch.full((50,), 4.0))
        >>> print(f"L = {measured.smoothness.value:.2f}, σ = {measured.noise.value:.1f}, μ = {measured.pl:.2f}")
        L = 2.00, σ = 0.7, μ = 2.00
        >>> [round(peer.hessian_gap.value, 2) for peer in measured.peers.values()]
        [0.0, 3.0]
    """
    if batches < 3:
        raise DataError(
            f"`batches` must be at least 3, got {batches}: with fewer nothing is known of the"
            " errors"
        )
    if own is None and peers is None:
        can = engine.capabilities
        me = next((name for name in can.examples if name not in engine.names), "")
        here = require(engine, "own_points", "measuring") if can.own_points else None
        return _measured(
            engine, x, me, here=here, in_run=can.batch_size or 1, batches=batches, seed=0, known={}
        )
    asking = Asking(engine, None, {}, "", *_grouped(batches))
    plans = {name: (peers or {}).get(name, Sampling()) for name in engine.names}
    return _estimates(asking.sample(x), own or Sampling(), plans)


def before_training(
    engine: Engine,
    problem: RunSpec,
    *,
    batches: int = BATCHES,
    known: dict[str, OnParts] | None = None,
) -> Estimates:
    """Measure at the point where training starts, and leave model and engine as they were.

    Examples that are in this process are dealt into disjoint batches, of as many examples as so
    many batches of the run have at most; user 0's are, with every engine. Of the others the batches
    of steps 0, 1, … are asked for.

    `known`, which is filled: what users in this process answer there, for other runs that start at
    the same point.
    """
    can, me = engine.capabilities, problem.me.name
    here: AnswersAtOwnPoints | None = None
    if can.own_points:
        here = require(engine, "own_points", "measuring")
    elif me in can.examples:  # an engine that knows how many they are gives gradients on them
        here = replace(problem, peers=()).in_process()
    x, in_run = Parameters(problem.model).vector(), can.batch_size or problem.batch_size
    with _kept(problem.model):
        known = {} if known is None else known
        return _measured(
            engine, x, me, here=here, in_run=in_run, batches=batches, seed=problem.seed, known=known
        )


def _measured(
    engine: Engine,
    x: Tensor,
    me: str,
    *,
    here: AnswersAtOwnPoints | None,
    in_run: int,
    batches: int,
    seed: int,
    known: dict[str, OnParts],
) -> Estimates:
    """Measure at x: on disjoint batches of who is `here`, on batches of `in_run` examples of the others."""
    can = engine.capabilities
    names = () if here is None or can.batch_dependent else (me, *here.names)
    parts, plans = {}, {}
    for name in (me, *engine.names):
        n = can.examples.get(name)
        if n is None:
            plans[name] = Sampling(in_run)
            continue
        plans[name] = Sampling(min(in_run, n), n, min(in_run, n), min(in_run, n) / n)
        if name in names:
            parts[name] = _dealt(n, batches * in_run, random_key(seed, f"{name}/parts"))
            plans[name] = replace(plans[name], size=parts[name].shape[1], of=math.inf)
    asking = Asking(engine, here, parts, me, *_grouped(batches), known)
    sampled, told = asking.sample(x), engine.capabilities.noise  # which peers tell when they answer
    for name in (name for name, noise in told.items() if noise and name in plans):
        # Samples and noise of a private peer are new in each gradient, and differ as fresh examples
        # do.
        plans[name] = Sampling(share=plans[name].share, added=told[name] * math.sqrt(len(x)))
    return _estimates(sampled, plans.pop(me), plans)


def gradients_elsewhere(batches: int = BATCHES) -> int:
    """Return how many gradients are asked of each peer whose examples are not in this process.

    All batches are asked for at the first point, and of each group the first at the second point
    too.

    Example:
        >>> gradients_elsewhere(8), gradients_elsewhere(50)
        (16, 56)
    """
    groups, each = _grouped(batches)
    return groups * (each + 1)


def _grouped(batches: int) -> tuple[int, int]:
    """Return into how many groups so many batches are put, and how many batches a group then has."""
    return min(batches, BATCHES), max(1, batches // BATCHES)


def _dealt(n: int, most: int, key: int) -> Tensor:
    """Deal n examples, at most some of them, into disjoint batches of one size, of shape (batches, size)."""
    used = min(n, most)
    size = -(-used // PARTS)
    order = torch.from_numpy(np.random.default_rng(key).permutation(n)[: used // size * size])
    return order.reshape(-1, size)


class _User:
    """One user's vectors, with resamples that belong together."""

    def __init__(self, sampled: SampledRows, plan: Sampling, seed: int) -> None:
        seen, shared = (1 - plan.size / plan.of) / plan.size, 1 / plan.of
        at = Vectors.of(
            sampled.at, Spread(seen / sampled.batches, shared), np.random.default_rng(seed)
        )
        rest, one = slice(len(sampled.at) - len(sampled.first), None), Spread(seen, shared)
        first, ahead = sampled.first, sampled.ahead
        self.at, self.first, self.ahead = at, at.like(first, rest, one), at.like(ahead, rest, one)
        self.change = at.like(ahead - first, rest, one)
        self.in_run, self.share, self.added = plan.in_run or plan.size, plan.share, plan.added


def _estimates(
    sampled: SampledGradients, own_plan: Sampling, plans: Mapping[str, Sampling]
) -> Estimates:
    """Return the constants with their errors."""
    me = _User(sampled.own, own_plan, 0)
    peers = {
        name: _User(one, plans[name], 1 + k) for k, (name, one) in enumerate(sampled.peers.items())
    }
    everyone, over = [me, *(peer for peer in peers.values() if not peer.added)], sampled.distance**2
    at, first, ahead, change = (
        _typical([getattr(user, kind) for user in everyone]) for kind in _KINDS
    )

    gradient = me.at.square(each=at)
    before = me.first.square(each=first)
    after = me.ahead.square(each=ahead)
    smoothness = _smoothness(me, change, over)
    pl = min(
        float(gradient.values[0]) / (2 * sampled.losses[0]),
        float(after.values[0]) / (2 * sampled.losses[1]),
    )
    estimates = {}
    for name, peer in peers.items():
        bias = peer.at.square(me.at, at)
        growth = _growth(
            peer.first.square(me.first, first), peer.ahead.square(me.ahead, ahead), before, after
        )
        grows = Measured(float(growth[0]), float(np.std(growth[1:])))
        if grows.value <= 2 * grows.error:
            growth, grows = np.zeros_like(growth), grows._replace(value=0.0)
        estimates[name] = PeerEstimates(
            noise=_noise(peer, at),
            bias_floor=_root(Resampled(bias.values - growth * gradient.values, bias.variances)),
            bias_growth=grows,
            hessian_gap=_root(peer.change.square(me.change, change).over(over)),
            share=peer.share,
            added=peer.added,
        )
    return Estimates(
        loss=sampled.losses[0],
        gradient=_root(gradient),
        noise=_noise(me, at),
        smoothness=smoothness,
        pl=min(pl, smoothness.value) if pl > 0 else smoothness.value,
        peers=estimates,
        left_out=sampled.left_out,
        share=me.share,
        batches=len(sampled.own.at) * sampled.own.batches,
    )


_KINDS = ("at", "first", "ahead", "change")


def _noise(user: _User, usual: float) -> Measured:
    """Return σ of a user's batches in the run; by what is usual where it has too few to tell."""
    each = user.at.each()
    square = (usual if each is None else float(each.values[0])) / user.in_run
    error = 0.0 if each is None else each.over(user.in_run).error
    # off with what is known, and with what is not clear of its error: T·share would magnify it
    if user.added:
        batches, length = user.at.rows.shape
        chance = user.added**2 * math.sqrt(2 / (length * max(1, batches - 1)))
        square = square - user.added**2 if square > user.added**2 + 4 * max(error, chance) else 0.0
    root = math.sqrt(square)
    return Measured(root, error / (2 * root) if root else 0.0)


def _smoothness(me: _User, usual: float, over: float) -> Measured:
    """Return L from how user 0's gradient changes between two points, whose squared distance is `over`."""
    smoothness = _root(me.change.square(each=usual).over(over))
    # lost in the noise of the batches' own curvature: then with it, an upper estimate
    if not smoothness.value > 0:
        smoothness = Measured(
            math.sqrt(np.square(me.change.rows.mean(0)).sum() / over), smoothness.error
        )
    if not smoothness.value > 0:
        raise DataError("user 0's gradient is the same at both points: no curvature to measure by")
    return smoothness


def _growth(
    bias_before: Resampled, bias_after: Resampled, before: Resampled, after: Resampled
) -> Array:
    """Return m_k in every resample.

    How much the bias falls with user 0's gradient, from none to in proportion.
    """
    fall = before.values - after.values
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(before.values > 0, np.maximum(bias_before.values, 0) / before.values, 0.0)
        growth = np.clip((bias_before.values - bias_after.values) / fall, 0, most)
    return np.where(fall > 0, growth, 0.0)


def _typical(vectors: Sequence[Vectors]) -> float:
    """Return the mean variance of one example over the users whose batches show it."""
    known = [each.values[0] for one in vectors if (each := one.each()) is not None]
    return float(np.mean(known)) if known else 0.0


def _root(square: Resampled) -> Measured:
    """Return the root of a square that noise may have made negative, and its error."""
    kept = max(float(square.values[0]), 0.0)
    return Measured(math.sqrt(kept), math.sqrt(kept + square.error) - math.sqrt(kept))


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Leave the model's buffers as they were."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
