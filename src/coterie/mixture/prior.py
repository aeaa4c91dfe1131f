"""Priors over users, found from the peers.

First all of them pooled, then a prior by EM. Only sums are needed.

User 0's side is a generator: it yields a `Question`, is sent the `Answer`, and returns what was
found. Who drives it decides how peers are asked.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias

import numpy as np

from coterie.mixture.candidates import INTERCEPT
from coterie.mixture.families import Array, Family
from coterie.mixture.peer import Posterior
from coterie.mixture.peer_weights import PeerWeights
from coterie.mixture.posterior import (
    MEMORY,
    Pair,
    Priors,
    Rows,
    back_to_parameters,
    outputs_of,
    two_loops,
)

POOLED = 15
"""Exchanges in which the pooled model is found, and the peers are judged."""
JOINT = 12
"""Exchanges in which own and peers' rows are fitted together."""
TIMES = np.array([1.0, 4.0, 16.0])
"""As how many times the own rows the peers' count there."""
EXCHANGES = 12
"""Iterations of EM, each an exchange."""
START = 1.0
"""The variance that EM starts with."""
VARIANCES = (1e-6, 10.0)
"""Between these a prior's variances stay."""
LARGEST_MEAN = 30.0
"""Of a prior in each number."""
MORE = 2.0
PRED = True
RELAXED = 2.0
"""How much farther than EM's own step a mean may go; below or at 2 it goes to the same place."""
RIDGE = 1e-3
"""On the pooled model, per example."""
NO_VARIANCE = 1e-12
"""Of a prior under which a peer only tells its gradient."""
FEW = 2.0
"""From so few peers, by their weights, no small variance is believed.

.3 of everybody's is the least.
"""


class Question(NamedTuple):
    """What the peers are asked."""

    priors: Priors
    weights: Array  # (P, N): of the peers in each sum; rows sum to 1
    # (V, r): user 0's gradients at the first mean, where every peer's is wanted too
    own: Array | None = None


class Answer(NamedTuple):
    """What the peers answer."""

    sums: Posterior  # by weights, of those who answered
    answered: Array  # (P,): the weight of those
    # (N, r): every peer's at the first mean, or sketches; not numbers if missing
    gradients: Array | None = None
    own: Array | None = None  # (V, r): user 0's in the same form


class Found(NamedTuple):
    """What was found from the peers."""

    pooled: Array  # (D, 1, K)
    joint: Array  # (D, V, J, K): of the rows of a view and of all peers, see `_joint`
    # the first from everybody, the others from whom each view of the own rows finds near
    priors: Priors
    tau: Array  # (V, N): whom


Asking = Generator[Question, Answer, Found]


def find_priors(rows: Rows, family: Family, seen: Array, sizes: Array) -> Asking:
    """Find the pooled model, whom to listen to, and V + 1 priors.

    Args:
        rows: user 0's; they judge the peers and nothing else.
        family: of the loss.
        seen: the rows that judge in each view, (n, V).
        sizes: how many examples each peer has, (N,); their shares are its weights in the pooled
            model.
    """
    units = Units.of(rows.inputs)
    judged = PeerWeights(seen.shape[1], len(sizes))
    pooled = yield from _pooled(rows, family, seen, sizes / sizes.sum(), judged, units)
    joint = yield from _joint(rows, family, seen, sizes / sizes.sum(), pooled, units)
    tau = judged.weights()
    weights = np.concatenate([np.full((1, len(sizes)), 1 / len(sizes)), tau])
    shape = (len(pooled), len(weights), pooled.shape[2])
    priors = Priors(np.broadcast_to(pooled, shape), np.full(shape, START), np.ones(len(weights)))
    for _ in range(EXCHANGES):
        answer = yield Question(priors, weights)
        priors = maximised(priors, answer, weights)
    if PRED: priors = predictive(priors, answer, weights)
    few = 1 / np.square(weights).sum(1) <= FEW
    least = 0.3 * priors.variance[:, :1] * few[:, None]
    return Found(pooled, joint, priors._replace(variance=np.maximum(priors.variance, least)), tau)


Told: TypeAlias = Generator[Question, Answer, tuple[Array, Array]]
"""Asks for the losses of B models, (B,), and their gradients, (D, B, K); infinite where none came."""


class Units(NamedTuple):
    """Units in which the rows' second moments are nearly the identity: x = basis z."""

    basis: Array  # (D, D), orthogonal
    moments: Array  # (D,): of the rows in each of its directions

    @classmethod
    def of(cls, inputs: Array) -> "Units":
        """Return the directions of the second moments, which few rows know little of."""
        n, d = inputs.shape
        moments = inputs.T @ inputs / max(1, n)
        own, size = n / (n + d), np.diag(moments)
        # what is constant here may not be so at peers
        shrunk = own * moments + np.diag(np.where(size > 1e-3, (1 - own) * size, 1.0))
        values, basis = np.linalg.eigh(shrunk)
        return cls(basis, np.maximum(values, 1e-4))

    def start(self, curvature: Array, ridge: Array) -> Array:
        """Return the inverse Hessians of B losses of curvature (B, K), beside a ridge, (B, K, 1, D)."""
        inverse: Array = 1 / (np.maximum(curvature, 1e-2)[..., None] * self.moments + ridge)
        return inverse[:, :, None]


def _descend(
    told: Callable[[Array], Told], x: Array, units: Units, start: Array, exchanges: int
) -> Generator[Question, Answer, Array]:
    """Minimise B losses from x, (D, B, K), by L-BFGS: an exchange for each gradient.

    A step that does not help is quartered.
    """
    z = best = np.tensordot(units.basis.T, x, 1)
    slope = direction = np.zeros_like(z)
    best_loss, length = np.full(z.shape[1], np.inf), np.ones(z.shape[1])
    history, gamma = list[Pair](), np.ones(z.shape[1])
    for _ in range(exchanges):
        loss, gradient = yield from told(np.tensordot(units.basis, z, 1))
        gradient = np.tensordot(units.basis.T, gradient, 1)
        fine = loss <= best_loss
        s, y = z - best, gradient - slope
        sy = np.einsum("dbk,dbk->b", s, y) * (fine & np.isfinite(best_loss))
        if (sy > 0).any():
            inverse = np.where(sy > 0, 1 / np.where(sy > 0, sy, 1), 0.0)
            history = [*history[-MEMORY + 1 :], (s, y, inverse)]
            scaled = np.einsum("dbk,bkd->b", np.square(y), start[:, :, 0])
            gamma = np.where(sy > 0, sy / np.where(sy > 0, scaled, 1), gamma)
        best_loss, length = np.where(fine, loss, best_loss), np.where(fine, 1.0, length / 4)
        best, slope = (np.where(fine[:, None], *both) for both in ((z, best), (gradient, slope)))
        direction = np.where(fine[:, None], two_loops(slope, history, gamma[:, None, None, None] * start), direction)
        z = best - length[:, None] * direction
    found: Array = np.clip(np.tensordot(units.basis, best, 1), -LARGEST_MEAN, LARGEST_MEAN)
    return found


def _pooled(
    rows: Rows, family: Family, seen: Array, shares: Array, judged: PeerWeights, units: Units
) -> Generator[Question, Answer, Array]:
    """Find the model of all peers' rows; on the way user 0's rows judge them."""
    d, v, k = rows.inputs.shape[1], seen.shape[1], rows.targets.shape[1]

    def told(x: Array) -> Told:
        own = gradients_of(rows, family, np.broadcast_to(x, (d, v, k)), seen)
        priors = Priors(x, np.full(x.shape, NO_VARIANCE), np.ones(1))
        answer = yield Question(priors, shares[None], np.moveaxis(own, 1, 0).reshape(v, -1))
        if answer.gradients is not None and answer.own is not None:
            judged.look(answer.gradients, answer.own)
        loss, gradient = _means(answer)
        return loss + RIDGE / 2 * np.square(x).sum((0, 2)), gradient + RIDGE * x

    at = np.zeros((d, 1, k))
    start = units.start(family.curvature(family.predict(at[0])), np.array(RIDGE))
    return (yield from _descend(told, at, units, start, POOLED))


def _joint(
    rows: Rows, family: Family, seen: Array, shares: Array, pooled: Array, units: Units
) -> Generator[Question, Answer, Array]:
    """Fit own and peers' rows together, beside an intercept of user 0's own, if there is one.

    The peers' mean loss counts as much as so many times the own rows, for each of `TIMES`. All
    views are asked for at once: (D, V, J, K).
    """
    (d, _, k), v, j = pooled.shape, seen.shape[1], len(TIMES)
    seen, times = np.repeat(seen, j, 1), np.tile(TIMES, v)
    inputs = np.column_stack([rows.inputs, rows.inputs[:, -1]])  # the last one is user 0's alone
    n = np.maximum(seen.sum(0), 1)
    ridge = np.full((d + 1, v * j, 1), RIDGE) * (1 + times[:, None])
    ridge[-1] = 1 / (INTERCEPT * n[:, None])

    def told(x: Array) -> Told:
        priors = Priors(x[:d], np.full((d, v * j, k), NO_VARIANCE), np.ones(v * j))
        theirs, gradient = _means((yield Question(priors, np.repeat(shares[None], v * j, 0))))
        outputs, targets = outputs_of(inputs, x), rows.targets[:, None]
        own = (family.losses(outputs, targets) * seen).sum(0) / n
        slope = back_to_parameters(inputs, (family.predict(outputs) - targets) * (seen / n)[..., None])
        slope[:d] += times[:, None] * gradient
        return own + times * theirs + (ridge * np.square(x)).sum((0, 2)) / 2, slope + ridge * x

    curvature = family.curvature(family.predict(outputs_of(rows.inputs, pooled))).mean((0, 1))
    basis = np.eye(d + 1)
    basis[:d, :d] = units.basis
    start = Units(basis, np.append(units.moments, 0.0)).start(
        (1 + times)[:, None] * curvature, np.moveaxis(ridge, 0, 2)
    )
    start[..., -1] = 1 / (np.maximum(curvature, 1e-2)[:, None] + ridge[-1][:, None])
    x = np.concatenate([np.repeat(pooled, v * j, 1), np.zeros((1, v * j, k))])
    best = yield from _descend(told, x, Units(basis, units.moments), start, JOINT)
    best[d - 1] += best[d]
    return best[:d].reshape(d, v, j, k)


def _means(answer: Answer) -> tuple[Array, Array]:
    """Return the mean losses and gradients of those who answered."""
    heard = answer.answered > 0
    whole = np.where(heard, answer.answered, 1.0)
    return np.where(heard, answer.sums.loss / whole, np.inf), answer.sums.gradient / whole[:, None]


def gradients_of(rows: Rows, family: Family, at: Array, seen: Array) -> Array:
    """Return the gradients of user 0's mean loss on the rows that are seen at each point, (D, V, K)."""
    slope = (family.predict(outputs_of(rows.inputs, at)) - rows.targets[:, None]) * seen[..., None]
    mean: Array = back_to_parameters(rows.inputs, slope) / np.maximum(seen.sum(0), 1)[:, None]
    return mean


def maximised(priors: Priors, answer: Answer, weights: Array) -> Priors:
    """Return the M-step: μ = n Στx/(n + v), v = Στ((x − μ)² + V), with n = 1/Στ².

    A prior nobody answered stays.

    The step of the mean is over-relaxed by up to `RELAXED` where the posteriors are hardly narrower
    than the prior: there EM is slow. Where some did not answer, the others stand for all.
    """
    heard, n = answer.answered > 0, (1 / np.square(weights).sum(1))[:, None]
    whole = np.where(heard, answer.answered, 1.0)
    sums = Posterior(*(each / (whole[:, None] if each.ndim > 1 else whole) for each in answer.sums))
    known = np.clip(1 - sums.variance / priors.variance, 1 / RELAXED, 1)
    mean = np.clip(
        (priors.mean + sums.first / known) * n / (n + priors.variance), -LARGEST_MEAN, LARGEST_MEAN
    )
    step = mean - priors.mean
    variance = np.clip(
        sums.variance + sums.second - 2 * step * sums.first + np.square(step), *VARIANCES
    )
    # a variance of few users is as noisy as few numbers are: as if MORE users had the mean one
    variance = (n * variance + MORE * variance.mean(0, keepdims=True)) / (n + MORE)
    noise = np.where(
        sums.residual > 0,
        np.maximum(sums.residual / np.maximum(sums.predicted, 1.0), 1e-6),
        priors.noise,
    )
    new, use = Priors(mean, variance, noise), heard[:, None]
    return Priors(
        *(np.where(use if a.ndim > 1 else heard, a, b) for a, b in zip(new, priors, strict=True))
    )


def predictive(priors: Priors, answer: Answer, weights: Array) -> Priors:
    """Return the priors of one more user: the mean itself is known from n users only.

    Its variance is 1/(1 + n(v − V)/v²), as a peer's mode is known to v²/(v − V), its prior to v.
    """
    n = (1 / np.square(weights).sum(1))[:, None]
    narrower = np.maximum(priors.variance - answer.sums.variance / np.maximum(answer.answered, 1e-12)[:, None], 0)
    known = 1 + n * narrower / np.square(priors.variance)
    return priors._replace(variance=np.minimum(priors.variance + 1 / known, VARIANCES[1]))
