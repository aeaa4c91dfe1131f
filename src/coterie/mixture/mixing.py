"""One mixture of all candidates, in the place of choices: w ∝ π exp(−Σ loss/T)."""

from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from coterie.mixture.families import Array, Family

TEMPERATURE = 1.0


class Mixed(NamedTuple):
    """A mixture of J candidates."""

    weights: Array  # (J,)
    outputs: Array  # (n, K): for every row by candidates, and weights, that did not see its fold


def mixed(
    family: Family,
    outputs: Array,
    targets: Array,
    folds: Array,
    prior: Array,
    *,
    further: tuple[Array, int] | None = None,
) -> Mixed:
    """Return the weights of candidates, and the mixture's outputs by weights found without each row's fold.

    Args:
        family: of the loss.
        outputs: of each candidate for each row, blind to its fold, (n, J, K).
        targets: (n, K).
        folds: of each row, (n,).
        prior: π, (J,).
        further: sums of losses on rows that no candidate saw, (J,), and how many rows.

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

    def weights_by(rows: Array) -> Array:
        total, count = further or (0.0, 0)
        return weights_of(losses[rows].sum(0) + total, float(rows.sum()) + count, k, prior, family)

    weights = weights_by(np.ones(len(folds), dtype=bool))
    without = np.array([weights_by(folds != q) for q in range(n_folds)])
    return Mixed(weights, np.einsum("nj,njk->nk", without[folds], np.nan_to_num(outputs)))


def weights_of(total: Array, count: float, outputs: int, prior: Array, family: Family) -> Array:
    """Return the weights from the candidates' sums of losses over `count` rows.

    The squared loss is divided by the noise: the least mean squared error of all candidates.
    """
    if count <= 0:
        total = np.zeros_like(prior)
    total = np.where(np.isfinite(total), total, np.inf)
    if family.is_squared and count > 0:
        total = total / max(2 * float(total.min()) / (count * outputs), 1e-300)
    logarithms = np.log(np.maximum(prior, 1e-300)) - total / TEMPERATURE
    weights: Array = softmax(logarithms)
    return weights


def halves(alone: int, others: int) -> Array:
    """Return π: one half on Alone's candidates, one half on all others.

    Example:
        >>> halves(1, 2)
        array([0.5 , 0.25, 0.25])
    """
    if not others:
        return np.full(alone, 1 / alone)
    return np.repeat([0.5 / alone, 0.5 / others], [alone, others])
