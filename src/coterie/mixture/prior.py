"""Priors over users, found from the peers.

First all of them pooled, then a prior by EM. Only sums are needed.

User 0's side is a generator: it yields a `Question`, is sent the `Answer`, and returns what was
found. Who drives it decides how peers are asked.
"""

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from coterie.mixture.families import Array, Family
from coterie.mixture.peer import FARTHEST, EStep, Sums
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
    told: str = "posterior"  # what peers tell, see `EStep`


class Answer(NamedTuple):
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
        self._modes: dict[int, Sums] = {}  # the last posterior of each peer, `first` being its mode

    def answer(self, question: Question, asked: EStep, numbers: Array) -> Answer:
        """Return the sums over peers, from what each sent, (N, P, size): not numbers where nothing came."""
        there = np.isfinite(numbers).all((1, 2))
        told = {k: asked.read(np.clip(numbers[k], -1, 1)) for k in np.flatnonzero(there).tolist()}
        gradients = np.full((len(numbers), question.priors.mean[:, 0].size), np.nan)
        if question.told == "posterior":
            mean = question.priors.mean
            before = {k: self._again(one, question.priors) for k, one in self._modes.items()}
            self._modes |= {k: one._replace(first=one.first + mean) for k, one in told.items()}
            told = before | told
        elif "gradient" in question.told:
            for k, one in told.items():
                gradients[k] = one.gradient[:, 0].ravel() / np.maximum(one.share[0], 1e-12)
        sums = Sums(*(np.zeros_like(each) for each in asked.read(np.zeros(asked.shape))))
        answered = np.zeros(len(question.weights))
        for k, one in told.items():
            weight = question.weights[:, k]
            answered += weight
            columns = weight[:, None]
            sums = Sums(
                *(
                    a + b * (columns if b.ndim > 1 else weight)
                    for a, b in zip(sums, one, strict=True)
                )
            )
        return Answer(sums, answered, gradients, question.own)

    @staticmethod
    def _again(last: Sums, priors: Priors) -> Sums:
        """Return what a peer last told, as if it had told it under these priors."""
        most = FARTHEST * np.sqrt(priors.variance)
        first = np.clip(last.first - priors.mean, -most, most)
        variance = np.minimum(last.variance, priors.variance)
        return last._replace(first=first, second=np.square(first), variance=variance)


class Found(NamedTuple):
    """What was found from the peers."""

    pooled: Array  # (D, 1, K)
    # the first from everybody, the others from whom each view of the own rows finds near
    priors: Priors
    tau: Array  # (V, N): whom


Asking = Generator[Question, Answer, Found]


def find_priors(rows: Rows, family: Family, seen: Array, peers: int) -> Asking:
    """Find the pooled model, whom to listen to, and V + 1 priors.

    With few peers, or where only sums come and no peer's own gradient, nobody is chosen: there is
    one prior, from everybody, and τ is equal.

    Args:
        rows: user 0's; they judge the peers and nothing else.
        family: of the loss.
        seen: the rows that judge in each view, (n, V).
        peers: how many there are, N.
    """
    judged, alike = PeerWeights(seen.shape[1], peers), np.full((1, peers), 1 / peers)
    pooled = yield from _pooled(rows, family, seen, alike, judged)
    chosen = peers >= FEWEST_PEERS and judged.has_looked
    tau = judged.weights() if chosen else np.repeat(alike, seen.shape[1], 0)
    weights = np.concatenate([alike, tau]) if chosen else alike
    shape = (len(pooled), len(weights), pooled.shape[2])
    priors = Priors(np.broadcast_to(pooled, shape), np.full(shape, START), np.ones(len(weights)))
    for _ in range(EXCHANGES):
        answer = yield Question(priors, weights)
        priors = maximised(priors, answer, weights)
    few = 1 / np.square(weights).sum(1) <= FEW
    least = 0.3 * priors.variance[:, :1] * few[:, None]
    return Found(pooled, priors._replace(variance=np.maximum(priors.variance, least)), tau)


def _pooled(
    rows: Rows, family: Family, seen: Array, weights: Array, judged: PeerWeights
) -> Generator[Question, Answer, Array]:
    """Find the model of all peers' rows by L-BFGS on sums of gradients.

    A step that does not help is quartered. Where others answer than before, it begins anew from
    where it is.
    """
    shape = (rows.inputs.shape[1], 1, rows.targets.shape[1])
    x, best, best_loss, history = np.zeros(shape), np.zeros(shape), np.inf, list[Pair]()
    slope = direction = np.zeros(shape)
    start, length, whole = np.ones((1, 1, 1, 1)), 1.0, np.nan
    for _ in range(POOLED):
        own = gradients_of(
            rows, family, np.broadcast_to(x, (shape[0], seen.shape[1], shape[2])), seen
        )
        priors = Priors(x, np.ones(shape), np.ones(1))
        seen_here = np.moveaxis(own, 1, 0).reshape(seen.shape[1], -1)
        answer = yield Question(priors, weights, seen_here, "gradient")
        if answer.gradients is not None and answer.own is not None:
            judged.look(answer.gradients, answer.own)
        share = answer.sums.share[0]
        if not share > 0:
            continue
        if not abs(share - whole) <= 1e-6 * share:
            best_loss, history, whole = np.inf, [], share
        loss = answer.sums.loss[0] / share + RIDGE / 2 * np.square(x).sum()
        if not loss <= best_loss:
            length /= 4
            x = best - length * direction
            continue
        gradient = answer.sums.gradient / share + RIDGE * x
        s, y = x - best, gradient - slope
        if np.isfinite(best_loss) and (sy := float((s * y).sum())) > 0:
            history = [*history[-MEMORY + 1 :], (s, y, np.array([1 / sy]))]
            start = np.full((1, 1, 1, 1), sy / np.square(y).sum())
        best, best_loss, slope, length = x, loss, gradient, 1.0
        direction = two_loops(gradient, history, start)
        x = np.clip(best - direction, -LARGEST_MEAN, LARGEST_MEAN)
    return best


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
    sums = Sums(*(each / (whole[:, None] if each.ndim > 1 else whole) for each in answer.sums))
    known = np.clip(1 - sums.variance / priors.variance, 1 / RELAXED, 1)
    mean = np.clip(
        (priors.mean + sums.first / known) * n / (n + priors.variance), -LARGEST_MEAN, LARGEST_MEAN
    )
    step = mean - priors.mean
    variance = np.clip(
        sums.variance + sums.second - 2 * step * sums.first + np.square(step), *VARIANCES
    )
    noise = np.where(
        sums.residual > 0,
        np.maximum(sums.residual / np.maximum(sums.share, 1e-12), 1e-6),
        priors.noise,
    )
    new, use = Priors(mean, variance, noise), heard[:, None]
    return Priors(
        *(np.where(use if a.ndim > 1 else heard, a, b) for a, b in zip(new, priors, strict=True))
    )
