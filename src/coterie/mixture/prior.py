"""Priors over users, found from the peers.

First all of them pooled, then a prior by EM. Only sums are needed.

User 0's side is a generator: it yields a `PriorQuestion`, is sent the `PriorAnswer`, and returns what was
found. Who drives it decides how peers are asked.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from coterie.gradients.simplex import simplex_minimum, simplex_minimum_low_rank
from coterie.mixture.answers import FARTHEST, EStep, Sums
from coterie.mixture.candidates import INTERCEPT, OwnRows
from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import (
    MEMORY,
    Pair,
    Priors,
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
RELAXED = 2.0
"""How much farther than EM's own step a mean may go; below or at 2 it goes to the same place."""
RIDGE = 1e-3
"""On the pooled model, per example."""
FEWEST_PEERS = 5
"""Of fewer peers none are chosen.

A prior from one or two users of three knows nothing of how users differ.
"""
MORE = 2.0
"""With fewer than `FEWEST_PEERS` a variance is as noisy as it is of three numbers: see `maximised`."""
FEW = 2.0
"""From so few peers, by their weights, no small variance is believed.

.3 of everybody's is the least.
"""

KEPT = 0.7
"""How much of the Gram matrix of earlier points is kept at each."""
AVERAGED = 4
"""Over how many of the last points weights are averaged."""
LEAST_SHARE = 0.25
"""A peer with less than this share of an equal weight is left out."""
TOWARDS_DIAGONAL = 0.1
"""How far a Gram matrix is shrunk to its diagonal: a noisy one invites to exploit its errors."""
WIDE = 2
"""With more than so many times as many numbers told as there are peers, weights are found by Gram matrices."""


class PriorQuestion(NamedTuple):
    """What the peers are asked."""

    priors: Priors
    weights: Array  # (P, N): of the peers in each sum; rows sum to 1
    # (V, r): user 0's gradients at the first mean, where every peer's is wanted too
    own: Array | None = None
    told: str = "posterior"  # what peers tell, see `EStep`


class PriorAnswer(NamedTuple):
    """What the peers answer."""

    sums: Sums  # by weights, of those who answered
    answered: Array  # (P,): the weight of those
    # (N, r): every peer's at the first mean, or sketches; not numbers if missing
    gradients: Array | None = None
    own: Array | None = None  # (V, r): user 0's in the same form


class Heard:
    """What peers told in the exchanges of a fit, as weighted sums.

    One that does not answer an E-step counts as it did last, until it is back; one that never did
    is left out. What one tells is within the bounds of the question, whatever it sends.
    """

    def __init__(self) -> None:
        # by peer: the question about its posterior that it answered last, and what all told then
        self._last: dict[int, tuple[EStep, Array]] = {}

    def answer(self, question: PriorQuestion, asked: EStep, numbers: Array) -> PriorAnswer:
        """Return the sums over peers, from what each sent, (N, P, size): not numbers where nothing came."""
        there = np.isfinite(numbers.sum((1, 2)))
        known = np.clip(numbers, -1, 1)
        known[~there] = 0
        weights, gradients = question.weights * there, None
        sums, answered = asked.read(np.einsum("pk,kps->ps", weights, known)), weights.sum(1)
        if question.told == "posterior":
            telling = np.flatnonzero(there).tolist()
            for k in self._last.keys() - set(telling):
                again, weight = self._again(k, question.priors), question.weights[:, k]
                answered += weight
                more = (each * (weight[:, None] if each.ndim > 1 else weight) for each in again)
                sums = Sums(*(a + b for a, b in zip(sums, more, strict=True)))
            self._last |= dict.fromkeys(telling, (asked, known))
        elif question.own is not None:
            parts = asked.parts(known)
            shares = np.maximum(parts["share"][:, :1], 1e-12)
            gradients = parts["gradient"][:, 0].reshape(len(known), -1) / shares
            gradients[~there] = np.nan
        return PriorAnswer(sums, answered, gradients, question.own)

    def _again(self, peer: int, priors: Priors) -> Sums:
        """Return what a peer last told, as if it had told it under these priors."""
        asked, numbers = self._last[peer]
        last, most = asked.read(numbers[peer]), FARTHEST * np.sqrt(priors.variance)
        first = np.clip(last.first + asked.priors.mean - priors.mean, -most, most)
        variance = np.minimum(last.variance, priors.variance)
        return last._replace(first=first, second=np.square(first), variance=variance)


class NearestMixture:
    """The weights of N peers by V views of the own rows, from gradients at points that saw none of these."""

    def __init__(self, views: int, peers: int) -> None:
        self.views, self.alike = views, np.full((1, peers), 1 / peers)
        self._looks: list[tuple[Array, Array]] = []

    @property
    def has_looked(self) -> bool:
        """Whether any gradient was compared."""
        return bool(self._looks)

    def look(self, gradients: Array, own: Array) -> None:
        """Compare every peer's gradient at a point, (N, r), with the own in each view, (V, r)."""
        self._looks.append((gradients, own))

    def weights(self) -> Array:
        """Return the weights that each view found, (V, N), without those of nearly nothing.

        A peer that gave no gradient somewhere has none, unless nobody has one everywhere.
        """
        n, many = self.alike.shape[1], len(self._looks)
        tau = np.repeat(self.alike, self.views, 0)
        there = np.all([self.alike[0] > 0, *(np.isfinite(g.sum(1)) for g, _ in self._looks)], 0)
        if many and there.any():
            ends = range(many - AVERAGED + 1, many + 1) if many >= AVERAGED else [many]
            looks = [(peers[there], own) for peers, own in self._looks]
            few = sum(own.shape[1] for _, own in looks) < WIDE * n
            found = _by_factors(looks, ends) if few else _by_grams(looks, ends)
            tau = np.zeros_like(tau)
            tau[:, there] = np.mean(found, axis=0)
        kept = np.where(tau < LEAST_SHARE / n, 0.0, tau)
        normalised: Array = kept / kept.sum(1, keepdims=True)
        return normalised


def _by_grams(looks: Sequence[tuple[Array, Array]], ends: Sequence[int]) -> list[Array]:
    """Return the weights after so many points, (V, N) each, from a Gram matrix for each view."""
    mean, found = np.zeros(0), list[Array]()
    for count, (of_peers, own) in enumerate(looks, 1):
        rows = _with_nobody(of_peers) - own[:, None]  # (V, N + 1, r)
        gram = rows @ rows.swapaxes(1, 2)
        diagonal = np.einsum("pii->pi", gram)[:, :, None] * np.eye(gram.shape[1])
        gram = (1 - TOWARDS_DIAGONAL) * gram + TOWARDS_DIAGONAL * diagonal
        mean = KEPT * mean + (1 - KEPT) * gram if mean.size else gram
        if count in ends:
            found.append(np.array([_of_peers(simplex_minimum(one)) for one in mean]))
    return found


def _by_factors(looks: Sequence[tuple[Array, Array]], ends: Sequence[int]) -> list[Array]:
    """Return the same by all that peers told: O(N) for many peers, not O(N³)."""
    widths = [own.shape[1] for _, own in looks]
    every = np.concatenate([_with_nobody(of_peers) for of_peers, _ in looks], 1)
    found, near = [np.empty((len(looks[0][1]), len(every) - 1)) for _ in ends], None
    for view, ours in enumerate(np.concatenate([own for _, own in looks], 1)):
        rows = every - ours
        squares = np.add.reduceat(np.square(rows), np.cumsum([0, *widths[:-1]]), 1)
        for weights, count in zip(found, ends, strict=True):
            ages = np.arange(count - 1, -1, -1.0)
            shares = KEPT**ages * np.where(ages < count - 1, 1 - KEPT, 1.0)
            roots = np.sqrt((1 - TOWARDS_DIAGONAL) * shares).repeat(widths[:count])
            whole = squares[:, :count] @ shares
            diagonal = TOWARDS_DIAGONAL * whole
            # what was found for the point or the view before is near
            near = simplex_minimum_low_rank(rows[:, : len(roots)] * roots, diagonal, near)
            weights[view] = _of_peers(near)
    return found


def _with_nobody(of_peers: Array) -> Array:
    """Return the gradients with a row of zeros before them, (N + 1, r)."""
    rows: Array = np.concatenate([np.zeros_like(of_peers[:1]), of_peers])
    return rows


def _of_peers(kappa: Array) -> Array:
    """Return the peers' part, normalised; equal where nobody is better than none."""
    whole, n = float(kappa[1:].sum()), len(kappa) - 1
    return kappa[1:] / whole if whole > 1e-6 * kappa.sum() else np.full(n, 1 / n)


class Found(NamedTuple):
    """What was found from the peers."""

    pooled: Array  # (D, 1, K)
    joint: Array  # (D, V, J, K): of the rows of a view and of all peers, see `_joint`
    # the first from everybody, the others from whom each view of the own rows finds near
    priors: Priors
    tau: Array  # (V, N): whom


Asking = Generator[PriorQuestion, PriorAnswer, Found]


def find_priors(own: OwnRows, family: Family, peers: int, *, intercept: bool = True) -> Asking:
    """Find the pooled model, whom to listen to, and V + 1 priors.

    With few peers, or where only sums come and no peer's own gradient, nobody is chosen: there is
    one prior, from everybody, and τ is equal.

    Args:
        own: user 0's rows; they judge the peers and nothing else.
        family: of the loss.
        peers: how many there are, N.
        intercept: whether the last column is one.
    """
    units, views = Units.of(own.rows.inputs, own.seen[:, 0], own.counts[0]), own.seen.shape[1]
    judged, alike = NearestMixture(views, peers), np.full((1, peers), 1 / peers)
    pooled = yield from _pooled(own, family, judged, units=units)
    joint = yield from _joint(own, family, alike, pooled, units=units, intercept=intercept)
    chosen = peers >= FEWEST_PEERS and judged.has_looked
    tau = judged.weights() if chosen else np.repeat(alike, views, 0)
    weights = np.concatenate([alike, tau]) if chosen else alike
    shape = (len(pooled), len(weights), pooled.shape[2])
    priors = Priors(np.broadcast_to(pooled, shape), np.full(shape, START), np.ones(len(weights)))
    for _ in range(EXCHANGES):
        answer = yield PriorQuestion(priors, weights)
        priors = maximised(priors, answer, weights, MORE if peers < FEWEST_PEERS else 0.0)
    few = 1 / np.square(weights).sum(1) <= FEW
    least = 0.3 * priors.variance[:, :1] * few[:, None]
    priors = priors._replace(variance=np.maximum(priors.variance, least))
    return Found(pooled, joint, priors, tau)


Evaluated: TypeAlias = Generator[PriorQuestion, PriorAnswer, tuple[Array, Array, Array]]
"""Asks for the losses of B models, (B,), infinite where none came, their gradients, (D, B, K), and by how many."""


class Units(NamedTuple):
    """Units in which the rows' second moments are nearly the identity: x = basis z."""

    basis: Array  # (D, D), orthogonal
    moments: Array  # (D,): of the rows in each of its directions

    @classmethod
    def of(cls, inputs: Array, counts: Array, n: float) -> "Units":
        """Return the directions of the second moments of n rows, which few rows know little of."""
        d = inputs.shape[1]
        moments = (inputs * counts[:, None]).T @ inputs / max(1, n)
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
    evaluated: Callable[[Array], Evaluated], x: Array, units: Units, start: Array, exchanges: int
) -> Generator[PriorQuestion, PriorAnswer, Array]:
    """Minimise B losses from x, (D, B, K), by L-BFGS: an exchange for each gradient.

    A step that does not help is quartered. Where others answer than before, it begins anew from
    where it is.
    """
    z = best = np.tensordot(units.basis.T, x, 1)
    slope = direction = np.zeros_like(z)
    best_loss, length = np.full(z.shape[1], np.inf), np.ones(z.shape[1])
    history, gamma, many = list[Pair](), np.ones(z.shape[1]), np.zeros(z.shape[1])
    for _ in range(exchanges):
        loss, gradient, answering = yield from evaluated(np.tensordot(units.basis, z, 1))
        gradient = np.tensordot(units.basis.T, gradient, 1)
        if not np.allclose(answering, many, rtol=1e-6):
            best_loss, history, many = np.full(z.shape[1], np.inf), [], answering
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
        direction = np.where(
            fine[:, None], two_loops(slope, history, gamma[:, None, None, None] * start), direction
        )
        z = best - length[:, None] * direction
    found: Array = np.clip(np.tensordot(units.basis, best, 1), -LARGEST_MEAN, LARGEST_MEAN)
    return found


def _pooled(
    own: OwnRows, family: Family, judged: NearestMixture, *, units: Units
) -> Generator[PriorQuestion, PriorAnswer, Array]:
    """Find the model of all peers' rows; on the way user 0's rows judge them."""
    d, v, k = own.rows.inputs.shape[1], own.seen.shape[1], own.rows.targets.shape[1]

    def evaluated(x: Array) -> Evaluated:
        ours = gradients_of(own, family, np.broadcast_to(x, (d, v, k)))
        priors = Priors(x, np.ones(x.shape), np.ones(1))
        flat = np.moveaxis(ours, 1, 0).reshape(v, -1)
        answer = yield PriorQuestion(priors, judged.alike, flat, "gradient")
        if answer.gradients is not None and answer.own is not None:
            judged.look(answer.gradients, answer.own)
        loss, gradient, answering = _means(answer)
        return loss + RIDGE / 2 * np.square(x).sum((0, 2)), gradient + RIDGE * x, answering

    at = np.zeros((d, 1, k))
    start = units.start(family.curvature(family.predict(at[0])), np.array(RIDGE))
    return (yield from _descend(evaluated, at, units, start, POOLED))


def _joint(
    own: OwnRows, family: Family, weights: Array, pooled: Array, *, units: Units, intercept: bool
) -> Generator[PriorQuestion, PriorAnswer, Array]:
    """Fit own and peers' rows together, beside an intercept of user 0's own, if there is one.

    The peers' mean loss counts as much as so many times the own rows, for each of `TIMES`. All
    views are asked for at once: (D, V, J, K).
    """
    (d, _, k), v, j, rows = pooled.shape, own.seen.shape[1], len(TIMES), own.rows
    seen, times = np.repeat(own.seen, j, 1), np.tile(TIMES, v)
    inputs = np.column_stack([rows.inputs, intercept * rows.inputs[:, -1]])
    n = np.repeat(np.maximum(own.counts, 1), j)
    ridge = np.full((d + 1, v * j, 1), RIDGE) * (1 + times[:, None])
    ridge[-1] = 1 / (INTERCEPT * n[:, None])

    def evaluated(x: Array) -> Evaluated:
        priors = Priors(x[:d], np.ones((d, v * j, k)), np.ones(v * j))
        asked = PriorQuestion(priors, np.repeat(weights, v * j, 0), None, "gradient")
        peers_loss, gradient, answering = _means((yield asked))
        outputs, targets = outputs_of(inputs, x), rows.targets[:, None]
        ours = (family.losses(outputs, targets) * seen).sum(0) / n
        slope = back_to_parameters(
            inputs, (family.predict(outputs) - targets) * (seen / n)[..., None]
        )
        slope[:d] += times[:, None] * gradient
        loss = ours + times * peers_loss + (ridge * np.square(x)).sum((0, 2)) / 2
        return loss, slope + ridge * x, answering

    curvature = family.curvature(family.predict(outputs_of(rows.inputs, pooled))).mean((0, 1))
    basis = np.eye(d + 1)
    basis[:d, :d] = units.basis
    start = Units(basis, np.append(units.moments, 0.0)).start(
        (1 + times)[:, None] * curvature, np.moveaxis(ridge, 0, 2)
    )
    start[..., -1] = 1 / (np.maximum(curvature, 1e-2)[:, None] + ridge[-1][:, None])
    x = np.concatenate([np.repeat(pooled, v * j, 1), np.zeros((1, v * j, k))])
    best = yield from _descend(evaluated, x, Units(basis, units.moments), start, JOINT)
    best[d - 1] += intercept * best[d]
    return best[:d].reshape(d, v, j, k)


def _means(answer: PriorAnswer) -> tuple[Array, Array, Array]:
    """Return the mean losses and gradients over the examples of those who answered, and their share."""
    share = answer.sums.share
    whole = np.where(share > 0, share, 1.0)
    loss = np.where(share > 0, answer.sums.loss / whole, np.inf)
    return loss, answer.sums.gradient / whole[:, None], share


def gradients_of(own: OwnRows, family: Family, at: Array) -> Array:
    """Return the gradients of user 0's mean loss on the rows that each view sees at each point, (D, V, K)."""
    rows = own.rows
    slope = family.predict(outputs_of(rows.inputs, at)) - rows.targets[:, None]
    whole = back_to_parameters(rows.inputs, slope * own.seen[..., None])
    mean: Array = whole / np.maximum(own.counts, 1)[:, None]
    return mean


def maximised(priors: Priors, answer: PriorAnswer, weights: Array, more: float = 0.0) -> Priors:
    """Return the M-step: μ = n Στx/(n + v), v = Στ((x − μ)² + V), with n = 1/Στ².

    A prior nobody answered stays. A variance is as if `more` further users had the mean of all.

    The step of the mean is over-relaxed by up to `RELAXED` where the posteriors are hardly narrower
    than the prior: there EM is slow. Where some did not answer, the others stand for all.
    """
    answering, n = answer.answered > 0, (1 / np.square(weights).sum(1))[:, None]
    whole = np.where(answering, answer.answered, 1.0)
    sums = Sums(*(each / (whole[:, None] if each.ndim > 1 else whole) for each in answer.sums))
    known = np.clip(1 - sums.variance / priors.variance, 1 / RELAXED, 1)
    mean = np.clip(
        (priors.mean + sums.first / known) * n / (n + priors.variance), -LARGEST_MEAN, LARGEST_MEAN
    )
    step = mean - priors.mean
    variance = np.clip(
        sums.variance + sums.second - 2 * step * sums.first + np.square(step), *VARIANCES
    )
    variance = (n * variance + more * variance.mean(0)) / (n + more)
    noise = np.where(
        sums.residual > 0,
        np.maximum(sums.residual / np.maximum(sums.share, 1e-12), 1e-6),
        priors.noise,
    )
    new, use = Priors(mean, variance, noise), answering[:, None]
    return Priors(
        *(
            np.where(use if a.ndim > 1 else answering, a, b)
            for a, b in zip(new, priors, strict=True)
        )
    )
