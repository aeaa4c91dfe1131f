"""Between the own examples and all: data interpolation, and the best weights of averaged means."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.arguments import SHARE
from coterie.errors import KnobError
from coterie.rules import WeightedAveraging
from coterie.users.user import User


def data_interpolation(me: User, peers: Sequence[User], mixing: float) -> WeightedAveraging:
    """Return the rule that minimises a f_0 + (1 − a) f_pooled, f_pooled being the mean loss over all examples.

    The rule is weighted gradient averaging. n_0 of the N pooled examples are user 0's own, so

        α = (1 − a)(1 − n_0/N),    τ_k ∝ n_k

    minimises the same objective: alone at a = 1, `WeightedAveraging.pooled` at a = 0.

    Args:
        me: user 0.
        peers: the others.
        mixing: a, in [0, 1], the weight of f_0 in addition to its share of f_pooled. The paper
            chooses it by cross-validation; `AdaptiveAveraging` does so for α.

    Reference: Mansour, Mohri, Ro, Suresh, Three approaches for personalization with applications to
    federated learning, arXiv:2002.10619, 2020, section 4.

    Example:
        >>> small, large = User("me", [[0.0]] * 10, range(10)), User("a", [[0.0]] * 30, range(30))
        >>> data_interpolation(small, [large], mixing=0.5)
        WeightedAveraging(alpha=0.375, tau={'a': 1.0}, aggregator=None)
    """
    return interpolation_of_sizes(len(me), {peer.name: len(peer) for peer in peers}, mixing)


def interpolation_of_sizes(
    own_examples: int, peers: Mapping[str, int], mixing: float
) -> WeightedAveraging:
    """Return the rule of `data_interpolation` from the numbers of examples, the peers' by name."""
    SHARE("mixing", mixing)
    total = sum(peers.values())
    tau = {name: n / total for name, n in peers.items()}
    return WeightedAveraging(alpha=(1 - mixing) * total / (total + own_examples), tau=tau)


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
