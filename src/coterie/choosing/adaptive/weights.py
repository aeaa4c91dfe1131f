"""Whom to listen to: the peers' weights, fitted to user 0's gradient at points that do not know its examples."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.engine import Answers, Engine, PeerEvidence, combined
from coterie.gradients.simplex import simplex_minimum, simplex_minimum_low_rank

Array: TypeAlias = NDArray[np.float64]

GRAM_MEMORY = 50
"""How many Gram matrices the running mean goes back over; before that it is the mean of all."""
SHRINKAGE = 0.1
"""How far the Gram matrix is drawn towards its diagonal.

The noise of o is in all its entries; left on the diagonal
alone, a part of it makes peers that differ by less than the own examples can show share the weight."""
MIN_SHARE = 0.25
"""Peers with less than this share of an equal weight get none.

A network that can fit everything fits wrong labels
too, however small their weight: only zero keeps them out."""

FACTORED = 200
"""From so many peers on, what they lack is kept itself while it has four times fewer columns: a
Gram matrix of all peers would grow with their square."""

FAR = 10.0
"""A gradient counts as missing where it is more than so many times as long as is usual (`PeerEvidence.lengths`), of
all steps so far the largest. One step would not do: good peers' gradients may vanish while
another's does not."""

COLUMNS = {"cpu": 2**15}
"""For a Gram matrix so many columns of the gradients are multiplied at a time, which stay in a near cache; the
products are added up in double precision."""


class FittedWeights:
    """The peers' weights from a running mean of Gram matrices.

        L = (0, g_1, …, g_N) − 1oᵀ,   H = running mean of LLᵀ,   κ = argmin over the simplex of κᵀHκ

    o is user 0's gradient on examples that the point was not fitted to. Row 0 is nobody: it takes
    weight where no peer points the right way. The weights are w = κ_{1..N}/Σκ_{1..N}. A peer that
    is missing keeps its entries.

    A private peer adds noise of a known variance v_k = E‖ξ_k‖², new at every step. H has it on its
    diagonal, as if it were the same in every step; over T steps only v_k/T of it stays. So v_k is
    taken off, and put back is

        v_k min(1, 1/T + 2 √(N/(mG)))

    whose second part is about what the noise of G matrices of rows of m numbers leaves in H.

    Args:
        n_peers: N.
        steps: T, how many steps follow the weights.
    """

    def __init__(self, n_peers: int, steps: int = 1) -> None:
        empty = np.zeros((1 + n_peers if n_peers < FACTORED else 0,) * 2)
        self.gram, self.counts = empty, empty.copy()  # none while there are factors
        self.factors: list[Array] = []  # L of each Gram matrix, zero where a peer is missing
        self.answers = np.zeros(1 + n_peers)  # how often each was there
        self.added, self.steps = np.zeros(1 + n_peers), steps  # running means of v_k
        self.kappa: list[Array] = []
        self.norms: list[Array] = []
        self.weights = np.full(n_peers, 1 / n_peers)

    def add(self, rows: Tensor, own: Tensor, added: Array | None = None) -> None:
        """Take rows (N, m), not numbers where a peer is missing, and o (m,) into the mean, and fit again.

        `added`, (N,), is the variance of the noise that each peer has added to its row; none when
        None.
        """
        self.norms.append(rows.norm(dim=1).double().cpu().numpy())
        there = np.append(True, np.isfinite(self.norms[-1]))
        self.answers += there
        noisy = added is not None and bool(added.any())
        columns = rows.shape[1] * (len(self.factors) + 1)
        if not self.gram.size and not noisy and 4 * columns <= len(rows):
            self.factors.append(np.where(there[:, None], _lacking(rows, own).double().cpu(), 0.0))
        else:
            self._to_gram()
            self._add(_gram(rows, own), added if noisy else None)
        answered = self.answers > 0  # ever: the others get nothing
        kappa = np.zeros(len(answered))
        kappa[answered] = (
            self._by_gram(answered, rows) if self.gram.size else self._by_factors(answered)
        )
        self.kappa.append(kappa)
        if kappa[1:].sum() > 1e-9:
            self.weights = kappa[1:] / kappa[1:].sum()

    def _add(self, fresh: Array, added: Array | None) -> None:
        """Take a Gram matrix into the mean."""
        there = np.isfinite(fresh)
        self.counts += there
        rate = np.where(there, np.maximum(1 / np.maximum(self.counts, 1), 1 / GRAM_MEMORY), 0.0)
        if added is not None:  # no more is believed than there can be
            noise = np.append(0.0, np.fmin(added, self.norms[-1] ** 2))
            self.added += (noise - self.added) * np.diag(rate)
            fresh = fresh - np.diag(noise)
        self.gram += np.where(there, fresh - self.gram, 0.0) * rate

    def _to_gram(self) -> None:
        """Make the Gram matrix of the factors so far, where it is kept from now on."""
        if not self.gram.size:
            self.gram, self.counts = (np.zeros((len(self.answers),) * 2) for _ in range(2))
        for factor in self.factors:
            there = np.where(factor.any(1), 1.0, np.nan)
            self._add((factor * there[:, None]) @ factor.T * there, None)
        self.factors = []

    def _by_gram(self, answered: NDArray[np.bool_], rows: Tensor) -> Array:
        gram = (self.gram + self._noise_left(rows))[np.ix_(answered, answered)]
        return simplex_minimum((1 - SHRINKAGE) * gram + SHRINKAGE * np.diag(np.diag(gram)))

    def _by_factors(self, answered: NDArray[np.bool_]) -> Array:
        """Return the same in O(N), where all were always there; else about that."""
        factor = np.concatenate(self.factors, 1)[answered]
        factor = factor / np.sqrt(self.answers[answered])[:, None]
        diagonal = SHRINKAGE * np.square(factor).sum(1)
        return simplex_minimum_low_rank(math.sqrt(1 - SHRINKAGE) * factor, diagonal)

    def _noise_left(self, rows: Tensor) -> Array:
        """Return what of the noise that peers add counts against them, on a diagonal."""
        n, m = rows.shape
        unknown = 2 * np.sqrt(n / (m * np.maximum(self.answers, 1)))
        return np.diag(self.added * np.minimum(1.0, 1 / self.steps + unknown))

    def tau(self) -> Array:
        """Return the weights averaged over the last third, small ones set to zero.

        Where nobody counted they are equal, among all who ever answered.
        """
        late = np.array(self.kappa[self._late()])[:, 1:]
        late = late[late.sum(1) > 1e-9]
        n, answered = len(self.weights), self.answers[1:] > 0
        if not len(late):
            return np.asarray(answered / answered.sum() if answered.any() else np.full(n, 1 / n))
        tau = (late / late.sum(1, keepdims=True)).mean(0)
        tau[tau < MIN_SHARE / n] = 0.0
        return np.asarray(tau / tau.sum())

    def bounds(self) -> Array:
        """Return the median norm of each peer's gradients over the last third, or over all where it missed that.

        0 for a peer that never answered.
        """
        norms = np.array(self.norms)  # (Gram matrices, N)
        norms[~np.isfinite(norms)] = np.nan
        missed = np.isnan(norms[self._late()]).all(0)
        found = np.zeros(norms.shape[1])
        for rows, which in (
            (norms[self._late()], ~missed),
            (norms, missed & (self.answers[1:] > 0)),
        ):
            if which.any():
                found[which] = np.nanmedian(rows[:, which], axis=0)
        return found

    def _late(self) -> slice:
        return slice(-max(1, len(self.kappa) // 3), None)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later weights depend on."""
        return {name: torch.from_numpy(np.array(value)) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state."""
        arrays = {name: value.cpu().numpy().copy() for name, value in state.items()}
        for name in ("gram", "counts", "weights", "added", "answers"):
            setattr(self, name, arrays[name])
        for name in ("kappa", "norms", "factors"):
            setattr(self, name, list(arrays[name]))


def _gram(rows: Tensor, own: Tensor) -> Array:
    """Return LLᵀ for L = (0, rows) − own, some columns at a time."""
    most, parts = COLUMNS.get(own.device.type, own.numel()), []
    for some, ours in zip(torch.split(rows, most, 1), torch.split(own, most), strict=True):
        lacking = _lacking(some, ours)
        parts.append((lacking @ lacking.T).double())
    return np.asarray(torch.stack(parts).sum(0).cpu().numpy())


def _lacking(rows: Tensor, own: Tensor) -> Tensor:
    """Return what nobody and each peer lacks of the own gradient, L."""
    return torch.cat([torch.zeros_like(own)[None], rows]) - own


def sizes(engine: Engine) -> Array:
    """Return the peers' numbers of examples, as far as they are known now; else NaN."""
    known = engine.capabilities.examples
    return np.array([float(known.get(name) or np.nan) for name in engine.names])


def shares(
    sizes: Array, noise: Array | float = 0.0, without: NDArray[np.bool_] | None = None
) -> Array:
    """Return the peers' shares of all examples.

    One whose number is not known counts as the mean of the others.

    One that adds noise counts less: `noise` is the variance of that over a run, in squares of a
    usual gradient. Some can be left `without` a share, but not all.

    Example:
        >>> shares(np.array([30.0, 30.0, np.nan]), np.array([0.0, 2.0, 0.0])).round(3).tolist()
        [0.429, 0.143, 0.429]
    """
    mean = 1.0 if np.isnan(sizes).all() else np.nanmean(sizes)
    counts = np.where(np.isnan(sizes), mean, sizes) / (1 + np.nan_to_num(noise))
    kept = counts if without is None or without.all() else np.where(without, 0.0, counts)
    return np.asarray(kept / kept.sum())


@dataclass(frozen=True, eq=False)
class WithoutOutliers:
    """What the peers are weighed by, without gradients that are far longer than usual."""

    evidence: PeerEvidence
    left_out: Mapping[str, str]
    longest: Tensor  # of shape (R,): how long a gradient may be at each point from now on
    outlier: NDArray[np.bool_]  # of shape (R, N): the peers that sent a longer one
    usual: Array  # of shape (R,): how long a gradient usually is

    @classmethod
    def of(
        cls, answers: Answers, longest: Tensor, *, bounded: bool, names: Sequence[str]
    ) -> "WithoutOutliers":
        """Leave out what is far longer than usual; nothing unless `bounded`.

        `longest` (R,) is how long gradients could be before.
        """
        if answers.judged is None:
            raise AssertionError("every peer was asked by itself")
        lengths, usual = answers.judged.lengths()
        longest = (
            torch.fmax(longest, FAR * usual) if bounded else torch.full_like(longest, math.inf)
        )
        far = lengths > longest.unsqueeze(1)
        outlier = far.cpu().numpy()
        why = f"more than {FAR:g} times as long as the median of all"
        out = {name: why for name, one in zip(names, far.any(0).tolist(), strict=True) if one}
        kept = answers.judged.without(far)
        return cls(kept, {**out, **answers.left_out}, longest, outlier, usual.cpu().numpy())

    def sums(self, sums: Tensor, answered: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the peers' sums at all points, and the weight in each.

        Without outliers where rows are at hand.
        """
        judged = len(self.evidence.ours)
        if self.evidence.theirs.shape[2] < sums.shape[1]:  # sketches: the sums came by themselves
            return sums, answered
        first, weight = combined(self.evidence.theirs, weights[:judged])
        return torch.cat([first, sums[judged:]]), torch.cat([weight, answered[judged:]])


class PeerWeights:
    """Whom each copy follows.

    Every trunk its fitted weights, pooled the peers' shares of all examples.

    Args:
        engine: which tells numbers of examples, and the noise that private peers add.
        steps: of the run, and `half` of them, in which weights are fitted.
        d: how many numbers a gradient has.
        n_folds: into how many parts user 0's examples are split; each has a trunk.
    """

    def __init__(self, engine: Engine, steps: int, half: int, d: int, n_folds: int) -> None:
        self.engine, self.steps, self.d = engine, steps, d
        self.fitted = [FittedWeights(len(engine.names), half) for _ in range(n_folds)]
        # at the last Gram matrix of each trunk: whose gradients were far longer than is usual
        self.outlier = np.zeros((n_folds, len(engine.names)), bool)
        self.usual = np.full(n_folds, np.nan)
        self.sizes = sizes(engine)
        self.by_size = shares(self.sizes)

    def fit(self, near: WithoutOutliers, trunks: slice = slice(None)) -> None:
        """Fit the weights of the next steps in these trunks, and in pooled."""
        noise = self.engine.capabilities.noise  # of private peers, in each number
        added = np.array([self.d * noise.get(name, 0.0) ** 2 for name in self.engine.names])
        for fitted, theirs, ours in zip(
            self.fitted[trunks], near.evidence.theirs, near.evidence.ours, strict=True
        ):
            fitted.add(theirs, ours, added)
        told = sizes(self.engine)  # sites tell theirs when they answer
        self.sizes = np.where(np.isnan(told), self.sizes, told)
        self.outlier[trunks], self.usual[trunks] = near.outlier, near.usual
        relative = added / (self.steps * max(float(np.nanmean(self.usual)) ** 2, 1e-30))
        self.by_size = shares(self.sizes, relative, without=np.any(self.outlier, axis=0))

    def fork(self) -> bool:
        """Leave out of pooled peers that never answered.

        Say whether any peer is left.
        """
        judged = self.bounds() > 0
        if not self.by_size[
            judged
        ].any():  # all who answered were far too long at the last Gram matrix
            self.by_size = shares(self.sizes)
        if judged.any():
            self.by_size = self.by_size * judged / self.by_size[judged].sum()
        else:
            self.by_size = np.zeros_like(self.by_size)
        return bool(judged.any())

    def of_trunks(self) -> list[Array]:
        """Return the weights in each trunk, then in pooled."""
        return [*(fitted.weights for fitted in self.fitted), self.by_size]

    def served(self, branch: float, pooled: float) -> Array:
        """Return the peers' weights where what came of the trunks and of pooled has these shares."""
        taus = [fitted.tau() for fitted in self._begun] or [self.by_size]
        tau = np.mean(taus, 0)
        return np.asarray(branch * tau + pooled * self.by_size)

    def bounds(self) -> Array:
        """Return how long each peer's gradients were while it was judged.

        0 for one that never answered.
        """
        each = [fitted.bounds() for fitted in self._begun] or [np.zeros_like(self.by_size)]
        return np.asarray(np.mean(each, axis=0))

    def kappa(self) -> Array:
        """Return κ of every Gram matrix, nobody's first, the mean over trunks."""
        each = itertools.zip_longest(*(fitted.kappa for fitted in self._begun))
        return np.array([np.mean([row for row in rows if row is not None], 0) for rows in each])

    @property
    def _begun(self) -> list[FittedWeights]:
        """Those of trunks that have taken steps; where they follow one another, some have not."""
        return [fitted for fitted in self.fitted if fitted.kappa]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later weights depend on."""
        return {
            "sizes": torch.from_numpy(self.sizes),
            "by_size": torch.from_numpy(self.by_size),
            "outlier": torch.from_numpy(self.outlier),
            "usual": torch.from_numpy(self.usual),
            "fitted": [fitted.state_dict() for fitted in self.fitted],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        for name in ("sizes", "by_size", "outlier", "usual"):
            setattr(self, name, state[name].cpu().numpy().copy())
        for fitted, saved in zip(self.fitted, state["fitted"], strict=True):
            fitted.load_state_dict(saved)
