"""Model averaging for means: the best weights of other users' means, in closed form."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import KnobError


def averaging_weights(
    sizes: Sequence[int], noise: float, spread: float, grain: Literal["fine", "coarse"] = "fine"
) -> NDArray[np.float64]:
    """Return the weights of all users' means that estimate user 0's true mean best.

    User k has n_k samples of variance σ² around a true mean, itself drawn with variance s². With
    V_k = s² + σ²/n_k and S = Σ_{k≥1} 1/V_k,

        fine:    v_k = (σ²/n_0) / V_k / (1 + V_0 S)  for k ≥ 1,    v_0 = 1 − Σ v_k
        coarse:  v = w (1, 0, …) + (1 − w) n/N,   w = B s² / (B s² + σ² (1/n_0 − 1/N)),
                 B = ((N − n_0)² + Σ_{k≥1} n_k²) / N²,   N = Σ n_k

    The fine weights are the best of all. The coarse ones are the best mixture of the own mean and
    the pooled one, as in data and model interpolation. Both give the own mean for s → ∞, where
    users have nothing in common, and the pooled mean for s = 0, where they are the same.

    Args:
        sizes: n_k, user 0 first.
        noise: σ, the standard deviation of a sample.
        spread: s, the standard deviation of the true means over users.
        grain: `"fine"`, one weight for each user, or `"coarse"`, one for all others together.

    Reference: Donahue, Kleinberg, Model-sharing games: analyzing federated learning under voluntary
    participation, AAAI 2021, lemmas on coarse-grained and fine-grained federation.

    Example:
        >>> averaging_weights([10, 10, 40], noise=1.0, spread=0.1).round(3).tolist()
        [0.268, 0.177, 0.556]
    """
    n = _checked_sizes(sizes, noise, spread)
    others = n[1:]
    if grain == "fine":
        certainty = 1 / (spread**2 + noise**2 / others)
        level = noise**2 / n[0] / (1 + (spread**2 + noise**2 / n[0]) * certainty.sum())
        return np.concatenate([[1 - level * certainty.sum()], level * certainty])
    if grain != "coarse":
        raise KnobError(f'`grain` must be "fine" or "coarse", got {grain!r}')
    total = n.sum()
    bias = spread**2 * (others.sum() ** 2 + (others**2).sum()) / total**2
    own = bias / (bias + noise**2 * (1 / n[0] - 1 / total))
    return np.asarray((1 - own) * n / total + own * (np.arange(len(n)) == 0))


def averaging_error(weights: ArrayLike, sizes: Sequence[int], noise: float, spread: float) -> float:
    """Return the expected squared error of a weighted mean of means, as an estimate of user 0's true mean.

        σ² Σ v_k²/n_k + s² ((1 − v_0)² + Σ_{k≥1} v_k²),   for weights that sum to 1

    Args:
        weights: v_k, user 0 first.
        sizes: n_k.
        noise: σ.
        spread: s.

    Example:
        >>> averaging_error([1, 0, 0], [10, 10, 40], noise=1.0, spread=0.1)
        0.1
        >>> best = averaging_weights([10, 10, 40], noise=1.0, spread=0.1)
        >>> round(averaging_error(best, [10, 10, 40], noise=1.0, spread=0.1), 4)
        0.0268
    """
    n, v = _checked_sizes(sizes, noise, spread), np.asarray(weights, dtype=float)
    if v.shape != n.shape or abs(v.sum() - 1) > 1e-6:
        raise KnobError(f"`weights` must be one for each user and sum to 1, got {v.tolist()}")
    return float(noise**2 * (v**2 / n).sum() + spread**2 * ((1 - v[0]) ** 2 + (v[1:] ** 2).sum()))


def _checked_sizes(sizes: Sequence[int], noise: float, spread: float) -> NDArray[np.float64]:
    n = np.asarray(sizes, dtype=float)
    if len(n) < 2 or not (n >= 1).all():
        raise KnobError(
            "`sizes` must hold each user's number of samples, user 0 and a peer at least, got"
            f" {sizes!r}"
        )
    if not noise > 0 or not spread >= 0:
        raise KnobError(
            f"`noise` must be above 0 and `spread` not below it, got {noise!r} and {spread!r}"
        )
    return n
