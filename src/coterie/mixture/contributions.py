"""What each peer contributed to user 0: its loss without the peer, and the Shapley value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from coterie.arguments import COUNT
from coterie.mixture.candidates import FOLDS
from coterie.mixture.families import Array, Family
from coterie.mixture.fit import fit_here
from coterie.mixture.mixing import error_of


class Estimate(NamedTuple):
    """A number, its standard error, and of how many rows it is a mean."""

    value: float
    error: float
    rows: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where it lies with 95 %, by Student's distribution."""
        half = float(stats.t.ppf(0.975, max(1, self.rows - 1))) * self.error
        return self.value - half, self.value + half


class Contribution(NamedTuple):
    """How much lower user 0's loss is with a player, beside all others and in the mean over coalitions."""

    leave_one_out: Estimate
    shapley: Estimate


def contributions(
    losses: Callable[[frozenset[str]], Array],
    players: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    permutations: int = 20,
    seed: int = 0,
) -> dict[str, Contribution]:
    """Return what each player contributes, from the loss of each own row with any coalition of peers.

    The leave-one-out value of k is the mean over rows of losses(all but k) − losses(all). The
    Shapley value is the mean over orders of losses(those before k) − losses(those before k, and k);
    it sums to losses(nobody) − losses(all). Orders are drawn, every one also backwards. Two copies
    of one peer have a leave-one-out value near 0 each, as either can replace the other, and share
    their Shapley value.

    Errors are over rows, and for Shapley over the orders drawn too. Those over rows allow for folds
    that share the rows which their models were fitted to, as those of the leaderboard do.

    Args:
        losses: the out-of-fold losses of user 0's rows, of shape (n,), with a coalition of peers, by
            K folds or more, K being `coterie.mixture.candidates.FOLDS`.
        players: the names of peers, or by name groups of peers, who come and go together.
        permutations: how many orders to draw, an even number at best.
        seed: of the orders.

    Example:
        >>> worth = {"good": np.array([1.0, 1.2]), "idle": np.zeros(2)}
        >>> given = contributions(lambda who: 5 - sum(worth[k] for k in who), list(worth), permutations=4)
        >>> [round(one.shapley.value, 2) for one in given.values()]
        [1.1, 0.0]
    """
    COUNT("permutations", permutations)
    groups = players if isinstance(players, Mapping) else {name: (name,) for name in players}
    names, known = list(groups), dict[frozenset[str], Array]()

    def loss(who: frozenset[str]) -> Array:
        if who not in known:
            peers = frozenset(peer for name in who for peer in groups[name])
            known[who] = np.asarray(losses(peers), dtype=np.float64)
        return known[who]

    everybody, random = frozenset(names), np.random.default_rng(seed)
    marginal: dict[str, list[Array]] = {name: [] for name in names}
    order: list[str] = []
    for k in range(permutations):
        order = order[::-1] if k % 2 else [names[i] for i in random.permutation(len(names))]
        before: frozenset[str] = frozenset()
        for name in order:
            marginal[name].append(loss(before) - loss(before | {name}))
            before |= {name}
    found = {}
    for name in names:
        drawn = np.array(marginal[name])
        shapley = _estimate(drawn.mean(0))
        between = drawn.mean(1).std(ddof=1) / np.sqrt(len(drawn)) if len(drawn) > 1 else np.nan
        shapley = shapley._replace(error=math.hypot(shapley.error, between))
        found[name] = Contribution(_estimate(loss(everybody - {name}) - loss(everybody)), shapley)
    return found


def linear_contributions(
    inputs: Array,
    targets: Array,
    peers: Mapping[str, tuple[Array, Array]],
    family: Family,
    outputs: int = 1,
    *,
    intercept: bool = True,
    groups: Mapping[str, Sequence[str]] | None = None,
    permutations: int = 20,
    seed: int = 0,
) -> dict[str, Contribution]:
    """Return what each peer contributes to the closed-form linear model of user 0.

    See `contributions`. Players are peers, or `groups` of them by name.

    It fits at most N + 2 + N·`permutations` models in closed form.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> random = np.random.default_rng(0)
        >>> def user(n: int, sign: float) -> tuple[Array, Array]:
        ...     x = random.normal(size=(n, 6))
        ...     return x, sign * x.sum(1) + random.normal(size=n)
        >>> own, peers = user(12, 1), {"alike": user(60, 1), "stranger": user(60, -1)}
        >>> given = linear_contributions(*own, peers, SQUARED, permutations=2)
        >>> given["alike"].shapley.value > given["stranger"].shapley.value
        True
    """

    def losses(who: frozenset[str]) -> Array:
        rows = [peers[name] for name in peers if name in who]
        fitted = fit_here(inputs, targets, rows, family, outputs, intercept=intercept, seed=seed)
        return fitted.served.losses

    return contributions(losses, groups or list(peers), permutations=permutations, seed=seed)


def _estimate(values: Array) -> Estimate:
    """Return a mean with its standard error over rows, by K folds."""
    return Estimate(float(values.mean()), error_of(values, FOLDS), len(values))
