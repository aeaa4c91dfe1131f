"""Candidates: ways to make a model, each with losses that it was not fitted to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import MODELS, Priors, Rows, most_probable, outputs_of
from coterie.mixture.scaling import ManyRows, Scaling
from coterie.mixture.served import Predictor

STRENGTHS = np.concatenate([[1e-6], np.logspace(-2, 2, 9)])
"""By what the variance of a prior is multiplied; the first stands for 0."""
OF_MANY_ROWS = STRENGTHS[::2]
"""The same for more than `JUDGING` rows that are fitted one by one, to which a prior means little."""
INTERCEPT = 10.0
"""The variance of an intercept under the prior of Alone, where that of a coefficient is 1."""
FOLDS = 4
JUDGING = 10_000
"""Of more own rows so many judge."""
REFITTED_ON = 1_000
"""Of more own rows at most so many say by how much the models of folds differ."""
AT_ONCE = 4096
"""How many rows are summed up at a time."""
ALONE_KINDS = ("constant", "alone", "alone, closed form", "forest, alone")
"""The kinds that ask no peer."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """J candidates of a kind, each judged on rows that it did not see.

    All are in the units of the caller.

    A block of candidates is whatever gives outputs, and can be served: linear models by their
    parameters, any other by predictors. `mix` makes one mixture of several blocks. A block joins a
    fit by `fit(..., others=make)`, where `make(folds)` returns blocks whose `outputs` come from
    models that were fitted without the row's fold, and whose predictors were fitted again on all
    own rows.

    Args:
        kind: its name in the leaderboard.
        outputs: for every own row by models that did not see its fold, (n, J, K): logits, or means
            of numbers.
        parameters: of linear models that were fitted to all own rows, (D, J, K), the intercept
            last.
        behind: makes the model of parameters (D, K), where these are of a layer behind others.
        predictors: in their place, J predictors that were fitted to all own rows.
        held_out: outputs of these for the validation rows, (m, J, K); not needed where there are
            none.
        by_fold: outputs for the own rows of `some_of` by the models without each fold, (F, m, J,
            K): they say how much a model depends on its rows. None where that is not known.
        alone: whether no peer was asked; these candidates have one half of the prior.

    Example:
        >>> guess = Candidates("guess", np.zeros((4, 1, 2)), parameters=np.zeros((3, 1, 2)), alone=True)
        >>> guess.many, guess.is_linear
        (1, True)
    """

    kind: str
    outputs: Array
    parameters: Array | None = None
    predictors: Sequence[Predictor] = ()
    held_out: Array | None = None
    by_fold: Array | None = None
    alone: bool = False
    behind: Callable[[Array], nn.Module] | None = None

    @property
    def many(self) -> int:
        """How many there are, J."""
        return int(self.outputs.shape[1])

    def on(self, inputs: Array) -> "Candidates":
        """Return them with their outputs on validation rows, where they are linear."""
        if self.parameters is None:
            return self
        return replace(self, held_out=outputs_of(inputs, self.parameters))

    def monotone(self, signs: Sequence[int]) -> "Candidates":
        """Return those whose outputs never fall in a column of sign 1, nor rise in one of -1.

        Of two classes the second's probability. Candidates that are not linear see to it themselves.

        Example:
            >>> slopes = Candidates("slopes", np.zeros((4, 2, 1)), parameters=np.array([[[2.0], [-1.0]]]))
            >>> slopes.monotone([1]).parameters.ravel().tolist(), slopes.monotone([0]).many
            ([2.0], 2)
        """
        if self.parameters is None or not any(signs):
            return self
        slopes = self.parameters[: len(signs)]
        slopes = np.diff(slopes, axis=2) if slopes.shape[2] == 2 else slopes
        fine = (np.asarray(signs)[:, None, None] * slopes >= 0).all((0, 2))
        return replace(
            self,
            outputs=self.outputs[:, fine],
            parameters=self.parameters[:, fine],
            held_out=None if self.held_out is None else self.held_out[:, fine],
            by_fold=None if self.by_fold is None else self.by_fold[:, :, fine],
        )

    @property
    def is_linear(self) -> bool:
        """Whether they are mixed by their parameters."""
        return self.parameters is not None


@dataclass(frozen=True, eq=False)
class OwnRows:
    """User 0's rows, in what a fit needs of them.

    Of many rows a sample judges. For the squared loss they are then fitted as few: those of a fold
    become as many rows as there are columns, with the same sums of squares and products.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> random = np.random.default_rng(0)
        >>> rows = Rows(random.normal(size=(400, 3)), random.normal(size=(400, 1)))
        >>> own = OwnRows.of(rows, SQUARED, 0, most=100)
        >>> own.rows.inputs.shape, float(own.counts[0]), own.judging.inputs.shape
        ((16, 3), 400.0, (100, 3))
        >>> bool(np.allclose(own.rows.inputs.T @ own.rows.targets, rows.inputs.T @ rows.targets))
        True
    """

    rows: Rows  # what is fitted to
    # (n, V): what each counts in each view, 0 where it is not seen: all, then all but each fold
    seen: Array
    counts: Array  # (V,): how many rows that stands for
    guesses: Array  # (V, K): the outputs of the constant
    judging: Rows  # what judges
    folds: Array  # of those

    @classmethod
    def of(
        cls,
        rows: Rows | ManyRows,
        family: Family,
        seed: int = 0,
        *,
        most: int | None = None,
        whole: bool = False,
        folds: Array | None = None,
    ) -> "OwnRows":
        """Return rows that are finite, in folds; all of them judge where that is asked for."""
        n = len(rows.targets)
        if folds is None:
            count = max(1, min(FOLDS, n // 2))
            folds = folds_of(rows.targets, count, seed, classes=not family.is_squared)
        of_all = guesses(family, rows.targets, folds, rows.weights)
        each = rows.counts
        counts = each.sum() - np.append(0.0, np.bincount(folds, each))
        if whole or n <= (JUDGING if most is None else most):
            few = rows.some(np.arange(n)) if isinstance(rows, ManyRows) else rows
            return cls(few, _seen(folds, few.counts), counts, of_all, few, folds)
        chosen = sample_of(n, seed, most)
        judging, judges = rows.some(chosen), folds[chosen]
        if family.is_squared:
            parts = [summed(rows, folds == q) for q in range(int(folds.max()) + 1)]
            folds = np.repeat(np.arange(len(parts)), [len(one.targets) for one in parts])
            fitted = Rows(*(np.concatenate([one[i] for one in parts]) for i in (0, 1)))
        else:
            fitted = rows.some(np.arange(n)) if isinstance(rows, ManyRows) else rows
        return cls(fitted, _seen(folds, fitted.counts), counts, of_all, judging, judges)


def sample_of(n: int, seed: int = 0, most: int | None = None) -> Array:
    """Return which of n rows judge, in order: all, or a sample of more than `most`, or `JUDGING`.

    Example:
        >>> sample_of(3).tolist(), len(sample_of(30_000))
        ([0, 1, 2], 10000)
    """
    most = JUDGING if most is None else most
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def some_of(n: int) -> slice:
    """Return which of n own rows say how much models of folds differ: at most `REFITTED_ON`."""
    return slice(None, None, max(1, -(-n // REFITTED_ON)))


def _seen(folds: Array, counts: Array) -> Array:
    """Return what rows count in each view, (n, V)."""
    views = range(int(folds.max()) + 1)
    return np.column_stack([counts, *(counts * (folds != q) for q in views)])


def summed(rows: Rows | ManyRows, which: Array) -> Rows:
    """Return few rows with the sums of squares and products of those that are asked for, by weight."""
    left, both, width = np.flatnonzero(which), None, 0
    for part in np.array_split(left, max(1, len(left) // AT_ONCE)):
        some = rows.some(part)
        more, width = np.concatenate(some[:2], 1), some.inputs.shape[1]
        more = more if some.weights is None else more * np.sqrt(some.weights)[:, None]
        both = np.asarray(
            np.linalg.qr(more if both is None else np.concatenate([both, more]), mode="r")
        )
    if both is None:
        raise AssertionError("a fold has rows")
    return Rows(both[:, :width], both[:, width:])


def folds_of(targets: Array, count: int, seed: int, *, classes: bool) -> Array:
    """Return the fold of each row; rows of a class are dealt out over all folds.

    Example:
        >>> folds_of(np.eye(2)[[0, 0, 1, 1]], 2, 0, classes=True).reshape(2, 2).sum(1)
        array([1, 1])
    """
    order = np.random.default_rng(seed).permutation(len(targets))
    if classes:
        order = order[
            np.argsort(
                targets[order].argmax(1) if targets.shape[1] > 1 else targets[order, 0],
                kind="stable",
            )
        ]
    fold = np.empty(len(targets), dtype=np.int8)
    fold[order] = np.arange(len(targets), dtype=np.int32) % max(1, count)
    return fold


def flat_prior(columns: int, outputs: int, *, intercept: bool) -> Array:
    """Return the variances of Alone's prior, (D, 1, K).

    1, and 10 for intercepts, which are the last row.
    """
    variance = np.ones((columns, 1, outputs))
    if intercept:
        variance[-1] = INTERCEPT
    return variance


def paths(
    own: OwnRows, family: Family, priors: dict[str, Priors], scaling: Scaling
) -> list[Candidates]:
    """Return the candidates of several kinds, one for each strength.

    User 0's modes under N(mean, s v).

    Args:
        own: the own rows, scaled.
        family: of the loss.
        priors: of each kind: the first for all rows, the others each without a fold; or one for
            all.
        scaling: between the caller's units and those of rows and priors.
    """
    strengths = STRENGTHS if len(own.rows.targets) <= JUDGING else OF_MANY_ROWS
    views, j = own.seen.shape[1], len(strengths)
    of_a_kind = own.rows.inputs.shape[1] * own.rows.targets.shape[1] * views * j
    if len(priors) > 1 and of_a_kind > MODELS:  # all at once would take no less time
        each = ({kind: prior} for kind, prior in priors.items())
        return [found for one in each for found in paths(own, family, one, scaling)]
    every = [Priors(*(_spread(each, views) for each in one)) for one in priors.values()]
    mean, variance = (np.concatenate([one[i] for one in every], 1) for i in (0, 1))
    noise = np.concatenate([one.noise for one in every])
    d, k = mean.shape[0], mean.shape[2]
    many = Priors(
        np.repeat(mean, j, 1),
        (variance[:, :, None] * strengths[:, None]).reshape(d, -1, k),
        np.repeat(noise, j),
    )
    seen = np.tile(np.repeat(own.seen, j, 1), (1, len(priors)))
    found = most_probable(own.rows, family, many, seen, tolerance=1e-3)
    by_kind = found.reshape(d, len(priors), views, j, k)
    return [
        judged(kind, own, by_kind[:, i], scaling, alone=kind == "alone")
        for i, kind in enumerate(priors)
    ]


def judged(
    kind: str, own: OwnRows, found: Array, scaling: Scaling, *, alone: bool = False
) -> Candidates:
    """Return J candidates from models of all own rows and without each fold, (D, V, J, K)."""
    blind = np.empty((len(own.folds), *found.shape[2:]))
    some = own.judging.inputs[some_of(len(own.folds))]
    for fold in range(found.shape[1] - 1):
        which = own.folds == fold
        blind[which] = outputs_of(own.judging.inputs[which], found[:, fold + 1])
    by_fold = np.array([outputs_of(some, each) for each in np.moveaxis(found[:, 1:], 1, 0)])
    return Candidates(
        kind,
        scaling.outputs(blind),
        scaling.back(found[:, 0]),
        by_fold=scaling.outputs(by_fold),
        alone=alone,
    )


def constant(own: OwnRows, scaling: Scaling) -> Candidates:
    """Return the constant.

    The mean of the targets, of classes their shares with one example more of all.
    """
    outputs = own.guesses
    parameters = np.zeros((own.rows.inputs.shape[1], 1, outputs.shape[1]))
    if scaling.intercept:
        parameters[-1, 0] = outputs[0]
    else:
        outputs = np.zeros_like(outputs)
    outputs = scaling.outputs(outputs)
    by_fold = np.repeat(outputs[1:, None, None], len(own.folds[some_of(len(own.folds))]), 1)
    return Candidates(
        "constant",
        outputs[own.folds + 1][:, None],
        scaling.back(parameters),
        by_fold=by_fold,
        alone=True,
    )


def guesses(family: Family, targets: Array, folds: Array, weights: Array | None = None) -> Array:
    """Return the outputs of the constant, (views, K): for all rows, then without each fold.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> guesses(SQUARED, np.array([[1.0], [3.0]]), np.array([0, 1])).ravel().tolist()
        [2.0, 3.0, 1.0]
    """
    counts = np.ones(len(folds)) if weights is None else weights
    if len(folds) <= JUDGING:
        seen = _seen(folds, counts)
        total, n = seen.T @ targets, seen.sum(0)[:, None]
    else:  # by sums of each fold: which view sees which row would be larger than the rows
        of_each = np.column_stack([np.bincount(folds, counts * each) for each in targets.T])
        total = of_each.sum(0) - np.vstack([np.zeros_like(of_each[:1]), of_each])
        n = (counts.sum() - np.append(0.0, np.bincount(folds, counts)))[:, None]
    even = {"softmax": 1 / targets.shape[1], "logistic": 0.5}.get(family.name)
    whole = np.where(n > 0, n, 1)
    return family.link(total / whole if even is None else (total + even) / (n + 1))


def _spread(array: Array, views: int) -> Array:
    """Return one prior for each view, where there is one for all."""
    axis = 0 if array.ndim == 1 else 1
    return np.repeat(array, views, axis) if array.shape[axis] == 1 else array
