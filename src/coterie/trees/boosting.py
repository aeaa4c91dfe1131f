"""Boosted trees from sums of histograms: E ensembles at once, one exchange a level of a tree.

User 0's side is a generator: it yields a `Level`, is sent the peers' sums of histograms, and
returns what was grown. Who drives it decides how peers are asked. Every user has an intercept of
its own, which it fits itself and tells nobody: trees explain what is left.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.sparse import csr_array

from coterie.mixture.families import Array, Family
from coterie.mixture.posterior import Rows

MOST_EDGES = 31
"""Of a column: between so many values at most, at quantiles of user 0's, a tree can split."""
BOUND = {"softmax": 0.5, "logistic": 0.25, "squared": 1.0}
"""The curvature of a family's loss is at most this: no step of an intercept goes too far."""
FARTHEST = {"squared": 16.0}
"""The slope of a row's loss counts as this at most, 1 where nothing is said: no row rules a tree."""

GRAIN = 2.0**-10
"""Slopes, curvatures and weights of rows are whole multiples of this.

Their sums are then exact: the same in any order, wherever rows are, and through masks.
"""

FREE = np.array([-np.inf, np.inf])
"""Between these a step may be where nothing bounds it."""


class Growth(NamedTuple):
    """How ensembles grow."""

    trees: int = 50
    depth: int = 4
    rate: float = 0.25
    ridge: float = 1.0  # added to every curvature
    fewest: float = 5.0  # rows in a leaf, by their weights
    most_rows: int = 15_000  # of a part, drawn anew for each tree; of peers' four times as many
    looks: tuple[int, ...] = (6, 12, 25, 50)  # after so many trees an ensemble is a candidate
    # of each column: 1 where outputs never fall in it, -1 never rise, 0 free; all free when empty
    signs: tuple[int, ...] = ()


class Bins(NamedTuple):
    """Where columns may be split: at these edges, for missing values, and between user 0 and all others."""

    edges: tuple[Array, ...]

    @classmethod
    def of(cls, inputs: Array) -> "Bins":
        """Return edges between the values of user 0's rows, (n, D).

        Example:
            >>> Bins.of(np.array([[1.0], [2.0], [2.0], [4.0]])).edges
            (array([1.5, 3. ]),)
        """
        edges = []
        for column in np.asarray(inputs, dtype=np.float64).T:
            held = column[np.isfinite(column)]
            values = np.unique(held)
            if len(values) > MOST_EDGES + 1:
                values = np.unique(np.quantile(held, np.linspace(0, 1, MOST_EDGES + 1)))
            edges.append((values[1:] + values[:-1]) / 2)
        return cls(tuple(edges))

    @property
    def starts(self) -> Array:
        """The first bin of each column, of the column of users, and the number of all.

        A column's last bin is for missing values.
        """
        return np.cumsum([0, *(len(each) + 2 for each in self.edges), 2])

    def places(self, inputs: Array, *, mine: bool) -> Array:
        """Return the bin of each value, (n, D + 1): the last column says whose row it is."""
        starts = self.starts
        found = np.full((len(inputs), len(self.edges) + 1), starts[-2] + mine, dtype=np.int32)
        for c, edges in enumerate(self.edges):
            found[:, c] = starts[c] + np.searchsorted(edges, inputs[:, c], side="left")
            found[np.isnan(inputs[:, c]), c] = starts[c + 1] - 1
        return found


class Splits(NamedTuple):
    """Of the M nodes of a level in L trees, (L, M) each: rows at or below `place` go left."""

    column: Array
    place: Array  # a bin; beyond all where a node is not split: all rows go left
    missing_left: Array


class Tree(NamedTuple):
    """One tree for each output of each of E ensembles, L in all; of two classes one for the second."""

    levels: tuple[Splits, ...]
    values: Array  # (L, leaves)


class Level(NamedTuple):
    """What users are asked: histograms of the nodes of the next level."""

    trees: tuple[Tree, ...]  # that are grown
    levels: tuple[Splits, ...]  # of the one that grows


class Part:
    """Rows of one user or several, in bins, at E ensembles.

    It answers any `Level`: one that goes on from the last by what it has, any other by growing all
    that went before anew, to the same bits.

    Args:
        places: of their values, from `Bins.places`.
        targets: (n, K).
        owners: of each row, the number of its user in this part.
        weights: of each row in each ensemble, (n, E); where it is 0 it does not count.
        counts: what each row counts everywhere, its intercept's steps too; 1 when None.
        family: of the loss.
        bins: how many there are.
        growth: how ensembles grow.
        seed: of the rows that a tree sees, where not all.
    """

    def __init__(
        self,
        places: Array,
        targets: Array,
        owners: Array,
        weights: Array,
        *,
        family: Family,
        bins: Bins,
        growth: Growth,
        counts: Array | None = None,
        seed: int = 0,
    ) -> None:
        self.places = np.asfortranarray(places)  # a column at a time is read
        counts = np.ones(len(targets)) if counts is None else counts
        self.targets, self.owners = targets, owners
        self.used = (weights > 0) * counts[:, None]
        self.weights = weights * counts[:, None]
        self.family, self.growth, self.seed = family, growth, seed
        n, c = places.shape
        self.bins, self.total = bins, int(bins.starts[-1])
        self.missing = np.append(bins.starts[1:-1] - 1, -1).astype(places.dtype)
        self.any_missing = bool((places == self.missing).any())
        self.hot = csr_array(
            (np.ones(n * c), places.ravel(), np.arange(0, n * c + 1, c)), shape=(n, self.total)
        )
        self.users = int(owners.max(initial=-1)) + 1
        whose = csr_array((np.ones(n), owners, np.arange(n + 1)), shape=(n, self.users))
        self.of = whose.T.tocsr()
        self.grows = outputs_grown(family, targets.shape[1])
        self.counts = (self.of @ self.used)[..., None]
        self._restart()

    def _restart(self) -> None:
        shape = (*self.weights.shape, self.targets.shape[1])
        self.margin, self.trees = np.zeros(shape), tuple[Tree, ...]()
        self.levels, self.held_at = 0, -1
        self.intercepts: Array = np.zeros((self.users, *shape[1:]))
        self._begin()

    def outputs(self) -> Array:
        """Return the outputs of all ensembles for all rows, (n, E, K)."""
        return self.margin + self.intercepts[self.owners]

    @property
    def heaviest(self) -> float:
        """What a row counts at most in the tree that grows; 1 at least."""
        return float(self.channels[..., -1].max(initial=1.0))

    def answer(self, level: Level) -> Array:
        """Return the histograms of the nodes of a level, (bins, L, M, 3).

        Of slopes, curvatures and rows.
        """
        known = level.trees[: len(self.trees)]
        same = len(known) == len(self.trees) and all(map(_same, known, self.trees))
        behind = len(level.trees) == len(self.trees) and len(level.levels) < self.levels
        if not same or behind:
            self._restart()
        for tree in level.trees[len(self.trees) :]:
            self.grown(tree)
        while self._histograms() and self.levels < len(level.levels):
            self._split(level.levels[self.levels])
        return self.held

    def _histograms(self) -> bool:
        """Hold the histograms of the present level's nodes; say so."""
        if self.held_at == self.levels:
            return True
        n, e, s = self.channels.shape
        if self.levels == 0:
            self.held = self._sums(self.channels[:, :, None])
        else:  # of the left children; those of the right ones are what is left of their parents
            nodes = 2**self.levels
            left = np.zeros((n, e, nodes // 2, s))
            i, j = np.nonzero((self.node % 2 == 0) & self.counted)
            left[i, j, self.node[i, j] // 2] = self.channels[i, j]
            sums = self._sums(left)
            self.held = np.stack([sums, self.held - sums], 3).reshape(self.total, e, nodes, 3)
        self.held_at = self.levels
        return True

    def _sums(self, values: Array) -> Array:
        sums = self.rows_hot.T @ values.reshape(len(values), -1)
        shaped: Array = np.asarray(sums).reshape((self.total, *values.shape[1:]))
        return shaped if shaped.shape[-1] == 3 else shaped[..., [0, 1, 1]]

    def grown(self, tree: Tree) -> None:
        """Take the step that a tree is, and begin with the next."""
        for level in tree.levels[self.levels :]:
            self._split(level)
        every: Array = self._leaves(tree) if self.drawn is not None else self.node
        steps = tree.values[np.arange(every.shape[1]), every]
        self.margin[:, :, self.grows] += steps.reshape(len(steps), -1, len(self.grows))
        self.trees = (*self.trees, tree)
        self._begin()

    def _leaves(self, tree: Tree) -> Array:
        node = np.zeros((len(self.places), len(tree.values)), dtype=np.int16)
        for splits in tree.levels:
            node = self._children(node, self.places, splits)
        return node

    def _begin(self) -> None:
        """Move every user's intercept by a step, and find slopes and curvatures."""
        family = self.family
        slope = family.predict(self.outputs()) - self.targets[:, None]
        slope *= self.used[..., None]
        total = (self.of @ slope.reshape(len(slope), -1)).reshape(self.intercepts.shape)
        bound = self.counts * BOUND[family.name] + 1
        self.intercepts = self.intercepts - (total + self.intercepts) / bound
        mean, weights, targets = family.predict(self.outputs()), self.weights, self.targets
        self.drawn, self.rows_hot, self.rows = None, self.hot, self.places
        if len(mean) > (most := self.growth.most_rows):
            random = np.random.default_rng([self.seed, len(self.trees)])
            self.drawn = np.sort(random.choice(len(mean), most, replace=False))
            mean, weights, targets = mean[self.drawn], weights[self.drawn], targets[self.drawn]
            weights = weights * (len(self.places) / most)
            self.rows_hot, self.rows = self.hot[self.drawn], self.places[self.drawn]
        far = FARTHEST.get(family.name, 1.0)
        slope = np.clip((mean - targets[:, None])[..., self.grows], -far, far) * weights[..., None]
        curvature = family.curvature(mean)[..., self.grows] * weights[..., None]
        # of the squared loss the curvature is the weight, and is summed once
        parts = (
            (slope, weights[..., None])
            if family.is_squared
            else (slope, curvature, weights[..., None])
        )
        self.channels = in_grains(np.stack(np.broadcast_arrays(*parts), -1))
        self.channels = self.channels.reshape(len(mean), -1, len(parts))
        self.counted = self.channels[..., -1] > 0
        self.node, self.levels = np.zeros(self.counted.shape, dtype=np.int16), 0
        self.held_at = -1

    def _split(self, splits: Splits) -> None:
        self.node = self._children(self.node, self.rows, splits)
        self.levels += 1

    def _children(self, node: Array, rows: Array, splits: Splits) -> Array:
        right = np.zeros(node.shape, dtype=bool)
        for m in range(splits.column.shape[1]):
            column = splits.column[:, m]
            place = rows[:, column]
            goes = place > splits.place[:, m].astype(place.dtype)
            if self.any_missing:
                goes = np.where(place == self.missing[column], ~splits.missing_left[:, m], goes)
            right |= goes & (node == m)
        children: Array = 2 * node + right
        return children


def _same(one: Tree, other: Tree) -> bool:
    return one is other or (
        np.array_equal(one.values, other.values)
        and all(
            np.array_equal(a, b)
            for levels in zip(one.levels, other.levels, strict=True)
            for a, b in zip(*levels, strict=True)
        )
    )


class Grown(NamedTuple):
    """What was grown."""

    trees: tuple[Tree, ...]
    outputs: Array  # (looks, n, E, K): of user 0's rows
    intercepts: Array  # (looks, E, K): user 0's
    looks: tuple[int, ...]


Growing = Generator[Level, Array | None, Grown]


def grow(own: Part, bins: Bins, growth: Growth) -> Growing:
    """Grow ensembles; yield each `Level`, and be sent sums of the peers' histograms, or None.

    Sums of which a level is made are checked, and are left out where they cannot be.
    """
    k = len(own.grows)
    rate = growth.rate * ((k - 1) / k if own.family.name == "softmax" and k > 1 else 1.0)
    trees, seen = tuple[Tree, ...](), list[tuple[Array, Array]]()
    for t in range(growth.trees):
        levels, values, bounds = tuple[Splits, ...](), np.zeros(0), FREE
        for _ in range(growth.depth):
            asked = Level(trees, levels)
            sums = own.answer(asked)
            answered = yield asked
            if answered is not None:
                sums = sums + answered
            splits, values, bounds = _best(sums, bins, growth, bounds)
            levels = (*levels, splits)
        trees = (*trees, tree := Tree(levels, rate * values))
        own.grown(tree)
        if t + 1 in growth.looks:
            seen.append((own.outputs(), own.intercepts[0]))
    outputs, intercepts = (np.stack(each) for each in zip(*seen, strict=True))
    return Grown(trees, outputs, intercepts, growth.looks)


def in_grains(numbers: Array) -> Array:
    """Return numbers rounded to whole grains.

    Example:
        >>> in_grains(np.array([0.1, -3.0])).tolist()
        [0.099609375, -3.0]
    """
    rounded: Array = np.rint(numbers / GRAIN) * GRAIN
    return rounded


def outputs_grown(family: Family, outputs: int) -> list[int]:
    """Return the outputs that have trees: all, and of two classes the second."""
    return [1] if family.name == "softmax" and outputs == 2 else list(range(outputs))


def _newton(sums: Array, ridge: float, bounds: Array) -> Array:
    """Return the Newton steps of nodes, within their bounds."""
    step: Array = -sums[..., 0] / (np.maximum(sums[..., 1], 0.0) + ridge)
    return np.clip(step, bounds[..., 0], bounds[..., 1]) if bounds.ndim > 1 else step


def _gain(sums: Array, steps: Array, ridge: float) -> Array:
    """Return by how much steps lower the loss, twice."""
    curvature = np.maximum(sums[..., 1], 0.0) + ridge
    return -steps * (2 * sums[..., 0] + curvature * steps)


def _best(sums: Array, bins: Bins, growth: Growth, bounds: Array) -> tuple[Splits, Array, Array]:
    """Return the best split of each node, and of its children the steps, (L, 2 M), and their bounds.

    Where outputs may only rise in a column, no step to the left is above that to the right, and
    the mean of both bounds all that is below them: as in scikit-learn.
    """
    starts, many = bins.starts, len(sums)
    column_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    signs = np.array((*growth.signs, 0)) if growth.signs else np.zeros(len(starts) - 1, dtype=int)
    running = np.concatenate([np.zeros_like(sums[:1]), np.cumsum(sums, 0)])
    left = running[1:] - running[starts[:-1]][column_of]
    whole = running[starts[1]]
    missing = sums[starts[1:] - 1]  # of each column; the column of users has none
    missing[-1] = 0.0
    ways = [left]
    if missing[..., -1].any():
        ways.append(left + missing[column_of])
    gains = []
    for each in ways:
        other = whole - each
        low, high = (_newton(side, growth.ridge, bounds) for side in (each, other))
        gain = _gain(each, low, growth.ridge) + _gain(other, high, growth.ridge)
        fewest = growth.fewest - 1e-3  # masks round
        few = (each[..., -1] < fewest) | (other[..., -1] < fewest)
        gain[few | ((high - low) * signs[column_of, None, None] < 0)] = -np.inf
        gain[starts[1:] - 1] = -np.inf  # nothing is beyond a column's last bin
        gains.append(gain)
    every = np.concatenate(gains)
    where = every.argmax(0)
    parent = _gain(whole, _newton(whole, growth.ridge, bounds), growth.ridge)
    splits = np.take_along_axis(every, where[None], 0)[0] > parent + 1e-9
    place, also_missing = where % many, where >= many
    sides = np.take_along_axis(np.concatenate(ways), where[None, ..., None], 0)[0]
    sides = np.where(splits[..., None], sides, whole)
    column = np.where(splits, column_of[place], len(starts) - 2)
    found = Splits(column, np.where(splits, place, many), also_missing | ~splits)
    steps = np.stack([_newton(each, growth.ridge, bounds) for each in (sides, whole - sides)], 2)
    if signs.any():
        bounds = np.broadcast_to(bounds, (*splits.shape, 2))[:, :, None].repeat(2, 2)
        sign, middle = signs[column], steps.mean(2)
        for side in (0, 1):  # a sign of 1 bounds the left from above, the right from below
            end = 1 - side
            for way, which in ((1, end), (-1, side)):
                now = (sign == way) & splits
                bounds[:, :, side, which] = np.where(now, middle, bounds[:, :, side, which])
        bounds = bounds.reshape(len(splits), -1, 2)
    return found, steps.reshape(len(splits), -1), bounds


def peers_here(
    bins: Bins,
    peers: Sequence[Rows],
    weights: Array,
    *,
    family: Family,
    growth: Growth,
    seed: int = 0,
) -> Callable[[Level], Array | None]:
    """Return what asks peers whose rows are at hand, all at once.

    Args:
        bins: where columns may be split.
        peers: the rows of each.
        weights: of each in each ensemble, (N, E).
        family: of the loss.
        growth: how ensembles grow.
        seed: of the rows that a tree sees, where not all.
    """
    sizes = [len(rows.inputs) for rows in peers]
    if not sum(sizes):
        return lambda _: None
    kept, share = rows_kept(sum(sizes), growth, seed)
    owners = np.repeat(np.arange(len(peers)), sizes)[kept]
    inputs, targets = (np.concatenate([one[i] for one in peers])[kept] for i in (0, 1))
    counts = np.concatenate([rows.counts for rows in peers])[kept]
    places = bins.places(inputs, mine=False)
    settings: dict[str, Any] = {"family": family, "growth": growth, "seed": seed, "counts": counts}
    part = Part(places, targets, owners, weights[owners] / share, bins=bins, **settings)
    return part.answer


def rows_kept(n: int, growth: Growth, seed: int = 0) -> tuple[Any, float]:
    """Return which of n rows of peers are kept, of which trees draw theirs, and their share of all."""
    most = 4 * growth.most_rows
    if n <= most:
        return slice(None), 1.0
    return np.sort(np.random.default_rng([seed, n]).choice(n, most, replace=False)), most / n


def driven(growing: Growing, ask: Callable[[Level], Array | None]) -> Grown:
    """Return what is grown, by a function that asks the peers."""
    try:
        level = next(growing)
        while True:
            level = growing.send(ask(level))
    except StopIteration as end:
        return cast("Grown", cast("Any", end).value)
