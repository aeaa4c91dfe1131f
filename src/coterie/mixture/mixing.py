"""One mixture of all candidates, in the place of choices: w ∝ π exp(−Σ loss/T)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax, stdtrit
from torch import nn

from coterie.mixture.candidates import Candidates, some_of
from coterie.mixture.families import Array, Family
from coterie.mixture.served import MixedPredictions, Predictor, linear_model, mixed_outputs

TEMPERATURE = 2.0
"""Of the weights, for linear models and trees.

Losses of folds depend on each other: at 1 few rows are believed too much.
"""
OVERLAP = 4.0
"""How much the overlap of the folds' own rows adds to the variance of a mean over them, where no more is known."""
REFITTED = 5.0
"""How much of what the folds' models differ by (the jackknife's variance) is added where it is known.

Both they and the model of all rows vary, and most of the rows that say by how much were fitted to.
Found on other draws than those that docs/mixture.md reports.
"""
LEAST = 0.01
"""A model that is not linear is served from this share of the weight on, or from half of the largest's."""


class Mixed(NamedTuple):
    """A mixture of J candidates."""

    weights: Array  # (J,)
    outputs: Array  # (n, K): for every row by candidates, and weights, that did not see its fold
    of_folds: Sequence[
        Array
    ]  # F of (m, K): for some rows by the mixture without each fold; or none


@dataclass(frozen=True, eq=False)
class MixtureEntry:
    """A line of the leaderboard: candidates of a kind, or of several, mixed."""

    weight: float  # its share of what is served
    # (n,): the caller's loss of each own row under models, and weights, that did not see its fold;
    # where rows count differently, times what the row counts over the mean of that
    losses: Array
    # (D, K): of its linear candidates, mixed, the intercept last; empty where there are none
    parameters: Array
    others: tuple[tuple[float, Predictor], ...] = ()  # its other candidates, with their share of it
    # (F,): the mean loss of own rows under the mixture without each fold; empty if unknown
    of_folds: Array = field(default_factory=lambda: np.zeros(0))

    def less(self, other: "MixtureEntry", folds: int) -> "MeanDifference":
        """Return what may be told of the difference in loss to another line."""
        known = len(self.of_folds) and len(other.of_folds)
        moved = self.of_folds - other.of_folds if known else None
        return mean_difference(self.losses - other.losses, folds, moved)

    def model(self, family: Family, *, intercept: bool) -> nn.Module:
        """Return what is served: a linear model, or `MixedPredictions`."""
        linear = 1 - sum(weight for weight, _ in self.others)
        parts = list(self.others)
        if self.parameters.size and linear > 0:
            parts.append((linear, Predictor(linear_model(self.parameters, intercept=intercept))))
        if len(parts) == 1 and parts[0][1].temperature == 1:
            return parts[0][1].model
        return MixedPredictions(
            [one for _, one in parts], [weight for weight, _ in parts], family.name
        )


class Leaderboard(NamedTuple):
    """The mixture of all candidates, that of those which ask no peer, and that of each kind."""

    served: MixtureEntry
    alone: MixtureEntry
    entries: Mapping[str, MixtureEntry]


def mix(
    family: Family,
    targets: Array,
    folds: Array,
    candidates: Sequence[Candidates],
    *,
    counts: Array | None = None,
    held_out: Array | None = None,
    held_out_counts: Array | None = None,
    single: bool = False,
    temperature: float = TEMPERATURE,
) -> Leaderboard:
    """Return the mixture of all candidates, that of Alone's, and that of each kind.

    Linear candidates are mixed by their parameters; beside them, others by their predictions.

    Args:
        family: of the loss.
        targets: of the own rows, (n, K).
        folds: of each own row, (n,).
        candidates: blocks of them; at least one asks no peer.
        counts: what each own row counts, as evidence and in losses that are told; 1 when None.
        held_out: targets of validation rows, (m, K): all blocks have outputs for them.
        held_out_counts: what each of these counts; 1 when None.
        single: give all weight to the best candidate of each entry.
        temperature: of the weights.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> targets = np.tile([[0.9], [1.1]], (4, 1))
        >>> zero = Candidates("constant", np.zeros((8, 1, 1)), parameters=np.zeros((1, 1, 1)), alone=True)
        >>> right = Candidates("net", np.ones((8, 1, 1)), predictors=[Predictor(nn.Linear(2, 1))])
        >>> found = mix(SQUARED, targets, np.arange(8) % 2, [zero, right])
        >>> round(found.entries["net"].weight, 3), float(found.served.losses.round(3).max())
        (1.0, 0.01)
        >>> type(found.served.model(SQUARED, intercept=True)).__name__
        'Linear'
    """
    many = [one.many for one in candidates]
    kinds, alone = (
        np.repeat([getattr(one, name) for one in candidates], many) for name in ("kind", "alone")
    )
    outputs = np.concatenate([one.outputs for one in candidates], 1)
    predictors = list[Predictor | None]()
    numbers, numbered = dict[Any, int](), list[int]()

    def number(thing: Any) -> int:
        return numbers.setdefault(thing, 1 + len(numbers))

    for block in candidates:  # mixed by parameters: 0, or below it where these are behind others
        predictors += block.predictors or [None] * block.many
        if block.parameters is not None:
            numbered += [-number(block.behind) if block.behind else 0] * block.many
        numbered += [number(one.model) for one in block.predictors]
    parts = np.array(numbered)
    layers = dict[int, list[Candidates]]()
    for block, first in zip(candidates, np.cumsum([0, *many]).tolist(), strict=False):
        if block.parameters is not None:
            layers.setdefault(int(parts[first]), []).append(block)
    by_layer = {
        part: np.concatenate([np.asarray(block.parameters) for block in blocks], 1)
        for part, blocks in layers.items()
    }
    known = [block.by_fold for block in candidates if block.by_fold is not None]
    refitted = np.concatenate(known, 2) if len(known) == len(candidates) else None
    prior = halves(alone)
    further, more = np.zeros(len(kinds)), 0.0
    if held_out is not None and len(held_out):
        blocks = [block.held_out for block in candidates]
        if any(block is None for block in blocks):
            raise ValueError("every block of candidates needs outputs for the validation rows")
        losses = family.losses(np.concatenate(blocks, 1), held_out[:, None])  # type: ignore[arg-type]
        of_each = np.ones(len(held_out)) if held_out_counts is None else held_out_counts
        further, more = (losses * of_each[:, None]).sum(0), float(of_each.sum())

    def found(which: Array) -> Mixed:
        return mixed(
            *(family, outputs[:, which], targets, folds, prior[which]),
            counts=counts,
            further=(further[which], more),
            by_fold=None if refitted is None else refitted[:, :, which],
            parts=parts[which],
            single=single,
            temperature=temperature,
        )

    some = some_of(len(targets))
    relative = np.ones(len(targets)) if counts is None else counts / counts.mean()

    def told(outputs: Array, rows: slice = slice(None)) -> Array:
        return family.reported_losses(outputs, targets[rows]) * relative[rows]

    whole = found(np.ones(len(kinds), dtype=bool))

    def entry(which: Array) -> MixtureEntry:
        one = found(which)
        weights = np.zeros(len(kinds))
        weights[which] = one.weights
        others = [
            (float(weight), each)
            for weight, each in zip(weights, predictors, strict=True)
            if each and weight > 0
        ]
        mean = np.zeros((0, targets.shape[1]))
        for part, parameters in by_layer.items():
            shares = weights[parts == part]
            if (share := float(shares.sum())) <= 0:
                continue
            at = np.einsum("j,djk->dk", shares / share, parameters)
            behind = layers[part][0].behind
            if behind is None:
                mean = at
            else:
                others.append((share, Predictor(behind(at))))
        return MixtureEntry(
            float(whole.weights[which].sum()),
            told(one.outputs),
            mean,
            tuple(others),
            np.array([told(each, some).mean() for each in one.of_folds]),
        )

    entries = {kind: entry(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}
    return Leaderboard(entry(np.ones(len(kinds), dtype=bool)), entry(alone), entries)


class MeanDifference(NamedTuple):
    """A mean difference of losses, and its interval of 95 %."""

    difference: float
    low: float
    high: float


def mean_difference(changes: Array, folds: int, moved: Array | None = None) -> MeanDifference:
    """Return what may be told of a difference, from that of each own row by models blind to it.

    Student's t, after Hall's transformation for skewness: few rows have most of the loss. The
    variance is that of a mean over rows, and what the models of folds differ by: the jackknife's,
    `REFITTED` times. Where that is not known the first stands for it too, see `error_of`.

    Args:
        changes: of each row, (n,).
        folds: how many.
        moved: the mean difference over own rows by the models without each fold, (folds,).

    Example:
        >>> changes = np.array([-0.5, -0.2, -0.1, -0.1, 0.0, 0.1, -0.2, -0.3])
        >>> [round(number, 2) for number in mean_difference(changes, 4, np.full(4, -0.2))]
        [-0.16, -0.35, -0.03]
        >>> [round(number, 2) for number in mean_difference(changes, 4)]
        [-0.16, -0.41, 0.06]
    """
    n, mean = len(changes), float(changes.mean()) if len(changes) else 0.0
    error = error_of(changes, folds)
    if moved is not None and n > 1:
        of_folds = (folds - 1) / folds * float(np.square(moved - moved.mean()).sum())
        error = float(np.sqrt(changes.var(ddof=1) / n + REFITTED * of_folds))
    if not error:
        return MeanDifference(mean, mean, mean)
    cubes = n / max(1, (n - 1) * (n - 2)) * float(np.power(changes - mean, 3).sum())
    skewness, t = cubes / n**2 / error**3, float(stdtrit(n - 1, 0.975))
    return MeanDifference(
        mean, mean - error * _skewed(t, skewness), mean - error * _skewed(-t, skewness)
    )


def _skewed(t: float, skewness: float) -> float:
    """Return the quantile of a mean over its error, from that of Student's t (Hall, 1992)."""
    if abs(skewness) < 1e-6:
        return t
    return 3 / skewness * (float(np.cbrt(1 + skewness * (t - skewness / 6))) - 1)


def error_of(changes: Array, folds: int) -> float:
    """Return the standard error of a mean over rows, by models blind to its fold.

    It allows for folds whose models are made of nearly the same rows (after Nadeau and Bengio): it
    is that of the rows times √(1 + 4/(folds − 1)).
    """
    n = len(changes)
    spread = float(changes.std(ddof=1)) if n > 1 else 0.0
    return spread * float(np.sqrt(1 / n + OVERLAP / (n * max(1, folds - 1)))) if spread else 0.0


def mixed(
    family: Family,
    outputs: Array,
    targets: Array,
    folds: Array,
    prior: Array,
    *,
    counts: Array | None = None,
    further: tuple[Array, float] | None = None,
    by_fold: Array | None = None,
    parts: Array | None = None,
    single: bool = False,
    temperature: float = TEMPERATURE,
) -> Mixed:
    """Return the weights of candidates, and the mixture's outputs by weights found without each row's fold.

    Args:
        family: of the loss.
        outputs: of each candidate for each row, blind to its fold, (n, J, K).
        targets: (n, K).
        folds: of each row, (n,).
        prior: π, (J,).
        counts: what each row counts; 1 when None.
        further: sums of losses on rows that no candidate saw, (J,), and how many rows.
        by_fold: outputs for some rows by the models without each fold, (F, m, J, K).
        parts: the model that each candidate needs, (J,); 0 where it is linear, and mixed by its
            parameters, and below 0 where it is so behind other layers.
        single: give all weight to one candidate, the most probable.
        temperature: of the weights.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> outputs = np.stack([np.zeros((8, 1)), np.ones((8, 1))], axis=1)  # two constants; the first is right
        >>> targets = np.tile([[-0.1], [0.1]], (4, 1))
        >>> one = mixed(SQUARED, outputs, targets, np.arange(8) % 4, np.array([0.5, 0.5]))
        >>> one.weights.round(3), float(np.abs(one.outputs).max().round(3))
        (array([1., 0.]), 0.0)
    """
    losses = np.nan_to_num(family.losses(outputs, targets[:, None]), nan=np.inf)
    of_each = np.ones(len(folds)) if counts is None else counts
    losses = losses * of_each[:, None]
    k, n_folds = targets.shape[1], int(folds.max()) + 1
    which = np.zeros(len(prior), dtype=np.int64) if parts is None else parts

    def weights_by(rows: Array) -> Array:
        total, count = further or (0.0, 0)
        told = losses[rows].sum(0) + total, float(of_each[rows].sum()) + count, k
        weights = weights_of(*told, prior, family, temperature=temperature)
        if single:
            weights = (np.arange(len(weights)) == weights.argmax()).astype(np.float64)
        return without_small(weights, which)

    weights = weights_by(np.ones(len(folds), dtype=bool))
    without = np.array([weights_by(folds != q) for q in range(n_folds)])
    blind = _mixed_rows(family, np.nan_to_num(outputs), without[folds], which)
    of_folds = [
        _mixed_rows(family, each, np.repeat(one[None], len(each), 0), which)
        for each, one in zip(
            () if by_fold is None else np.nan_to_num(by_fold), without, strict=False
        )
    ]
    return Mixed(weights, blind, of_folds)


def _mixed_rows(family: Family, outputs: Array, weights: Array, parts: Array) -> Array:
    """Return the outputs of the mixture, (n, K), from those of candidates, (n, J, K), and weights (n, J)."""
    if not parts.any():
        linear: Array = np.einsum("nj,njk->nk", weights, outputs)
        return linear
    columns, shares = [outputs[:, parts > 0]], [weights[:, parts > 0]]
    for part in np.unique(parts[parts <= 0]):
        each = weights[:, parts == part]
        share = each.sum(1)
        mean = np.einsum("nj,njk->nk", each, outputs[:, parts == part])
        columns.append((mean / np.where(share > 0, share, 1)[:, None])[:, None])
        shares.append(share[:, None])
    return mixed_outputs(family.name, np.concatenate(columns, 1), np.concatenate(shares, 1))


def without_small(weights: Array, parts: Array) -> Array:
    """Return weights without those of models that have less than `LEAST` in all.

    Linear ones are one model together.

    Example:
        >>> without_small(np.array([0.4, 0.596, 0.002, 0.002]), np.array([0, 1, 2, 2])).round(2)
        array([0.4, 0.6, 0. , 0. ])
    """
    parts = parts - min(0, int(parts.min(initial=0)))
    totals = np.bincount(parts, weights)
    # of many that are alike some have less than that, and yet all are kept
    kept = totals >= min(LEAST, float(totals.max()) / 2)
    left = np.where(kept[parts], weights, 0.0)
    normalised: Array = left / left.sum()
    return normalised


def weights_of(
    total: Array,
    count: float,
    outputs: int,
    prior: Array,
    family: Family,
    *,
    temperature: float = TEMPERATURE,
) -> Array:
    """Return the weights from the candidates' sums of losses over `count` rows.

    The squared loss is divided by the noise: the least mean squared error of all candidates.
    """
    if count <= 0:
        total = np.zeros_like(prior)
    total = np.where(np.isfinite(total), total, np.inf)
    if family.is_squared and count > 0:
        total = total / max(2 * float(total.min()) / (count * outputs), 1e-300)
    logarithms = np.log(np.maximum(prior, 1e-300)) - total / temperature
    weights: Array = softmax(logarithms)
    return weights


def halves(alone: Array) -> Array:
    """Return π: one half on the candidates that ask no peer, one half on all others.

    Example:
        >>> halves(np.array([True, False, False]))
        array([0.5 , 0.25, 0.25])
    """
    counts = np.where(alone, alone.sum(), (~alone).sum())
    prior: Array = 1 / counts / len(set(alone.tolist()))
    return prior
