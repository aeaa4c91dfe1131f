"""One mixture of all candidates, in the place of choices: w ∝ π exp(−Σ loss/T)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax, stdtrit
from torch import nn

from coterie.mixture.candidates import Candidates
from coterie.mixture.families import Array, Family
from coterie.mixture.served import MixedPredictions, Predictor, linear_model, mixed_outputs

TEMPERATURE = 2.0
"""Of the weights, for linear models and trees.

Losses of folds depend on each other: at 1 few rows are believed too much.
"""
OVERLAP = 4.0
"""How much the overlap of the folds' own rows adds to the variance of a mean over them."""
LEAST = 0.01
"""A model that is not linear is served from this share of the weight on, or from half of the largest's."""


class Mixed(NamedTuple):
    """A mixture of J candidates."""

    weights: Array  # (J,)
    outputs: Array  # (n, K): for every row by candidates, and weights, that did not see its fold


@dataclass(frozen=True, eq=False)
class MixtureEntry:
    """A line of the leaderboard: candidates of a kind, or of several, mixed."""

    weight: float  # its share of what is served
    # (n,): the caller's loss of each own row under models, and weights, that did not see its fold
    losses: Array
    # (D, K): of its linear candidates, mixed, the intercept last; empty where there are none
    parameters: Array
    others: tuple[tuple[float, Predictor], ...] = ()  # its other candidates, with their share of it

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
    held_out: Array | None = None,
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
        held_out: targets of validation rows, (m, K): all blocks have outputs for them.
        single: give all weight to the best candidate of each entry.
        temperature: of the weights.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> targets = np.tile([[0.9], [1.1]], (4, 1))
        >>> zero = Candidates("constant", np.zeros((8, 1, 1)), parameters=np.zeros((1, 1, 1)), alone=True)
        >>> right = Candidates("net", np.ones((8, 1, 1)), predictors=[Predictor(nn.Linear(2, 1))])
        >>> found = mix(SQUARED, targets, np.arange(8) % 2, [zero, right])
        >>> round(found.entries["net"].weight, 3), found.served.losses.round(3).max()
        (1.0, np.float64(0.01))
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
    prior = halves(alone)
    further, more = np.zeros(len(kinds)), 0 if held_out is None else len(held_out)
    if held_out is not None and more:
        blocks = [block.held_out for block in candidates]
        if any(block is None for block in blocks):
            raise ValueError("every block of candidates needs outputs for the validation rows")
        further = family.losses(np.concatenate(blocks, 1), held_out[:, None]).sum(0)  # type: ignore[arg-type]

    def found(which: Array) -> Mixed:
        return mixed(
            *(family, outputs[:, which], targets, folds, prior[which]),
            further=(further[which], more),
            parts=parts[which],
            single=single,
            temperature=temperature,
        )

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
            family.reported_losses(one.outputs, targets),
            mean,
            tuple(others),
        )

    entries = {kind: entry(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}
    return Leaderboard(entry(np.ones(len(kinds), dtype=bool)), entry(alone), entries)


class MeanDifference(NamedTuple):
    """A mean difference of losses, and its interval of 95 %."""

    difference: float
    low: float
    high: float


def mean_difference(changes: Array, folds: int) -> MeanDifference:
    """Return what may be told of a difference, from that of each own row by models blind to it.

    Student's t. The error allows for folds whose models are made of nearly the same rows (after
    Nadeau and Bengio): it is that of the rows times √(1 + 4/(folds − 1)).

    Args:
        changes: of each row, (n,).
        folds: how many.

    Example:
        >>> said = mean_difference(np.array([-0.5, -0.2, -0.1, -0.1, 0.0, 0.1, -0.2, -0.3]), 4)
        >>> [round(number, 2) for number in said]
        [-0.16, -0.4, 0.07]
    """
    mean, error = float(changes.mean()) if len(changes) else 0.0, error_of(changes, folds)
    reach = float(stdtrit(len(changes) - 1, 0.975)) * error if error else 0.0
    return MeanDifference(mean, mean - reach, mean + reach)


def error_of(changes: Array, folds: int) -> float:
    """Return the standard error of a mean over rows, by models blind to its fold; see `mean_difference`."""
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
    further: tuple[Array, int] | None = None,
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
        further: sums of losses on rows that no candidate saw, (J,), and how many rows.
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
    k, n_folds = targets.shape[1], int(folds.max()) + 1
    which = np.zeros(len(prior), dtype=np.int64) if parts is None else parts

    def weights_by(rows: Array) -> Array:
        total, count = further or (0.0, 0)
        told = losses[rows].sum(0) + total, float(rows.sum()) + count, k
        weights = weights_of(*told, prior, family, temperature=temperature)
        if single:
            weights = (np.arange(len(weights)) == weights.argmax()).astype(np.float64)
        return without_small(weights, which)

    weights = weights_by(np.ones(len(folds), dtype=bool))
    without = np.array([weights_by(folds != q) for q in range(n_folds)])[folds]
    finite = np.nan_to_num(outputs)
    if not which.any():
        return Mixed(weights, np.einsum("nj,njk->nk", without, finite))
    columns, shares = [finite[:, which > 0]], [without[:, which > 0]]
    for part in np.unique(which[which <= 0]):
        each = without[:, which == part]
        share = each.sum(1)
        mean = np.einsum("nj,njk->nk", each, finite[:, which == part])
        columns.append((mean / np.where(share > 0, share, 1)[:, None])[:, None])
        shares.append(share[:, None])
    every = np.concatenate(columns, 1)
    return Mixed(weights, mixed_outputs(family.name, every, np.concatenate(shares, 1)))


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
