"""Candidates: ways to make a model, each with losses that it was not fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import Priors, Rows, most_probable, outputs_of
from coterie.mixture.scaling import Scaling
from coterie.mixture.served import Predictor

STRENGTHS = np.concatenate([[1e-6], np.logspace(-2, 2, 9)])
"""By what the variance of a prior is multiplied; the first stands for 0."""
INTERCEPT = 10.0
"""The variance of an intercept under the prior of Alone, where that of a coefficient is 1."""
FOLDS = 4
ALONE_KINDS = ("constant", "alone", "forest, alone")
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
        predictors: in their place, J predictors that were fitted to all own rows.
        held_out: outputs of these for the validation rows, (m, J, K); not needed where there are
            none.
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
    alone: bool = False

    @property
    def many(self) -> int:
        """How many there are, J."""
        return int(self.outputs.shape[1])

    @property
    def is_linear(self) -> bool:
        """Whether they are mixed by their parameters."""
        return self.parameters is not None


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
    fold = np.empty(len(targets), dtype=np.int64)
    fold[order] = np.arange(len(targets)) % max(1, count)
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
    rows: Rows, family: Family, priors: dict[str, Priors], folds: Array, scaling: Scaling
) -> list[Candidates]:
    """Return the candidates of several kinds, one for each strength.

    User 0's modes under N(mean, s v).

    Args:
        rows: the own rows, scaled.
        family: of the loss.
        priors: of each kind: the first for all rows, the others each without a fold; or one for
            all.
        folds: of each row.
        scaling: between the caller's units and those of rows and priors.
    """
    views, j = int(folds.max()) + 2, len(STRENGTHS)
    seen = np.column_stack([np.ones(len(folds)), *(folds != q for q in range(views - 1))])
    every = [Priors(*(_spread(each, views) for each in one)) for one in priors.values()]
    mean, variance = (np.concatenate([one[i] for one in every], 1) for i in (0, 1))
    noise = np.concatenate([one.noise for one in every])
    d, k = mean.shape[0], mean.shape[2]
    many = Priors(
        np.repeat(mean, j, 1),
        (variance[:, :, None] * STRENGTHS[:, None]).reshape(d, -1, k),
        np.repeat(noise, j),
    )
    found = most_probable(
        rows, family, many, np.tile(np.repeat(seen, j, 1), (1, len(priors))), tolerance=1e-3
    )
    by_kind = found.reshape(d, len(priors), views, j, k)
    return [
        judged(kind, rows, by_kind[:, i], folds, scaling, alone=kind == "alone")
        for i, kind in enumerate(priors)
    ]


def judged(
    kind: str, rows: Rows, found: Array, folds: Array, scaling: Scaling, *, alone: bool = False
) -> Candidates:
    """Return J candidates from models of all own rows and without each fold, (D, V, J, K)."""
    d, v, j, k = found.shape
    outputs = outputs_of(rows.inputs, found.reshape(d, v * j, k)).reshape(-1, v, j, k)
    blind = outputs[np.arange(len(folds)), folds + 1]
    return Candidates(kind, scaling.outputs(blind), scaling.back(found[:, 0]), alone=alone)


def constant(rows: Rows, family: Family, folds: Array, scaling: Scaling) -> Candidates:
    """Return the constant.

    The mean of the targets, of classes their shares with one example more of all.
    """
    outputs = guesses(family, rows.targets, folds)
    parameters = np.zeros((rows.inputs.shape[1], 1, rows.targets.shape[1]))
    if scaling.intercept:
        parameters[-1, 0] = outputs[0]
    else:
        outputs = np.zeros_like(outputs)
    blind = outputs[folds + 1][:, None]
    return Candidates("constant", scaling.outputs(blind), scaling.back(parameters), alone=True)


def guesses(family: Family, targets: Array, folds: Array) -> Array:
    """Return the outputs of the constant, (views, K): for all rows, then without each fold.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> guesses(SQUARED, np.array([[1.0], [3.0]]), np.array([0, 1])).ravel().tolist()
        [2.0, 3.0, 1.0]
    """
    seen = np.column_stack(
        [np.ones(len(folds)), *(folds != q for q in range(int(folds.max()) + 1))]
    )
    total, n = seen.T @ targets, seen.sum(0)[:, None]
    even = {"softmax": 1 / targets.shape[1], "logistic": 0.5}.get(family.name)
    return family.link(total / np.maximum(n, 1) if even is None else (total + even) / (n + 1))


def _spread(array: Array, views: int) -> Array:
    """Return one prior for each view, where there is one for all."""
    axis = 0 if array.ndim == 1 else 1
    return np.repeat(array, views, axis) if array.shape[axis] == 1 else array
