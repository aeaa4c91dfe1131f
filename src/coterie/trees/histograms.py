"""What user 0 asks of peers elsewhere while trees grow: sums of histograms of their rows, no more."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from coterie.errors import DataError
from coterie.mixture.families import FAMILIES, Array, Family
from coterie.mixture.posterior import Rows
from coterie.trees.boosting import (
    BOUND,
    FARTHEST,
    GRAIN,
    MOST_EDGES,
    Bins,
    Growth,
    Level,
    Part,
    Splits,
    Tree,
    in_grains,
    outputs_grown,
    rows_kept,
)

MOST_NUMBERS = 4_000_000
"""So many numbers are in an answer at most."""
MOST_TREES, MOST_DEPTH, MOST_ENSEMBLES = 1000, 6, 64
ROUNDING = 2.0**-29
"""What masks may round for each of n peers, of n times what a number is at most."""


@dataclass(frozen=True, eq=False)
class Histograms:
    """What user 0 asks of peers about a level of trees: a kind of work, as `EStep` is.

    A peer answers by (slopes, curvatures, rows) for each bin of each node. Every number of it lies
    in [−1, 1], in units that follow from the question alone. The question holds all trees that
    are grown: a peer that has missed some, or was started again, grows them anew.

    Args:
        family: the name of the loss's family.
        bins: where columns may be split, by user 0's rows.
        shift: of the targets, (K,); user 0's mean.
        scale: of the targets, user 0's spread.
        ensembles: how many grow side by side.
        level: whose nodes are asked for.
        examples: how many examples a peer has at most.

    Example:
        >>> x, y = np.array([[0.0], [1.0], [1.0]]), np.array([[0.0], [1.0], [2.0]])
        >>> asked = Histograms("squared", Bins((np.array([0.5]),)), np.zeros(1), 1.0, 1, Level((), ()), 3.0)
        >>> told = asked.checked(asked.answer(asked.rows(Rows(x, y))))
        >>> told[:2, 0, 0, 2].round(6).tolist()
        [1.0, 2.0]
    """

    family: str
    bins: Bins
    shift: Array
    scale: float
    ensembles: int
    level: Level
    examples: float = 1.0
    told: ClassVar[str] = "histograms"
    layer: ClassVar[str] = ""

    @property
    def gradients(self) -> int:
        """As how many gradients an answer counts: one at each ensemble."""
        return self.ensembles

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of an answer: bins, trees that grow, nodes, and three numbers."""
        return int(self.bins.starts[-1]), self._lanes, 2 ** len(self.level.levels), 3

    @property
    def _lanes(self) -> int:
        family = FAMILIES.get(self.family)
        return 0 if family is None else self.ensembles * len(outputs_grown(family, len(self.shift)))

    def wrong(self) -> str | None:
        """Return what is wrong with the question, whoever made it, if anything is."""
        edges, trees, levels = self.bins.edges, *self.level
        if self.family not in BOUND or not edges or self.shift.ndim != 1 or not len(self.shift):
            return "it knows no trees of this loss, or there are no columns"
        rising = all(np.isfinite(each).all() and (np.diff(each) > 0).all() for each in edges)
        scaled = np.isfinite(self.shift).all() and 0 < self.scale < np.inf
        if not rising or not scaled or not 1 <= self.examples < 2**53:
            return "edges of bins must rise, and the scale and the number of examples be positive"
        if not 1 <= self.ensembles <= MOST_ENSEMBLES or len(trees) > MOST_TREES:
            return f"it answers for 1 to {MOST_ENSEMBLES} ensembles of {MOST_TREES} trees at most"
        if len(levels) > MOST_DEPTH or np.prod(self.shape) > MOST_NUMBERS:
            return f"it gives {MOST_NUMBERS} numbers at most; ask for fewer bins, classes or levels"
        every = [*levels, *(each for tree in trees for each in tree.levels)]
        known = all(((each.column >= 0) & (each.column <= len(edges))).all() for each in every)
        if not known or not all(np.isfinite(tree.values).all() for tree in trees):
            return "trees must split columns that there are, and have finite leaves"
        return None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many columns and outputs a model with such trees has."""
        return len(self.bins.edges), len(self.shift)

    def about(self) -> Hashable:
        """Return what must be the same for a peer to go on from what it holds."""
        parts = [np.concatenate([[len(each)], each]) for each in self.bins.edges]
        numbers = np.concatenate([*parts, self.shift, [self.scale, self.ensembles]])
        return self.family, numbers.tobytes()

    def rows(self, rows: Rows) -> Part:
        """Return a peer's rows in bins; one that holds a number that is not finite does not count."""
        rows, growth = rows.finite(), Growth()
        kept, share = rows_kept(len(rows.inputs), growth)
        inputs, targets, counts = rows.inputs[kept], rows.targets[kept], rows.counts[kept]
        return Part(
            self.bins.places(inputs, mine=False),
            (targets - self.shift) / self.scale,
            np.zeros(len(inputs), dtype=np.int64),
            np.full((len(inputs), self.ensembles), 1 / share),
            family=self._family,
            bins=self.bins,
            growth=growth,
            counts=counts,
        )

    @property
    def _family(self) -> Family:
        return FAMILIES[self.family]

    def answer(self, rows: Part, norm: float | None = None, fewest: int = 1) -> Array:
        """Return what a peer with these rows tells.

        Args:
            rows: the peer's, see `Histograms.rows`.
            norm: what the slopes of an ensemble's mean loss are clipped to, over all bins.
            fewest: how many rows are in a bin that is told, see `merged`.
        """
        sums = rows.answer(self.level)
        if norm is not None and norm < np.inf:
            n = max(1.0, float(rows.weights[:, 0].sum()))
            length = np.sqrt(np.square(sums[..., 0]).sum((0, 2)))[:, None] / n
            slopes = sums[..., 0] * (norm / np.maximum(length, norm))
            sums = np.concatenate([slopes[..., None], sums[..., 1:]], -1)
        if fewest > 1:
            sums = merged(sums, self.bins, fewest * rows.heaviest)
        answer: Array = np.clip(sums / self._units, -1, 1)
        return answer

    @property
    def _units(self) -> Array:
        """What each of the three numbers is at most: a peer may have up to twice what it tells."""
        per_row = np.array([FARTHEST.get(self.family, 1.0), BOUND[self.family], 1.0])
        return 2 * self.examples * per_row

    @property
    def numbers(self) -> int:
        """How many numbers the question has."""
        parts = self.message().values()
        return sum(int(each.size) for each in parts if isinstance(each, np.ndarray))

    def rows_in(self, sums: Array) -> Array:
        """Return how many rows are in all nodes of each tree that grows, by its last column."""
        rows: Array = sums[self.bins.starts[-2] :, :, :, 2].sum((0, 2))
        return rows

    def checked(self, numbers: Array, root: Array | None = None, peers: int = 1) -> Array:
        """Return the sums in an answer, or in a weighted sum of answers; refuse what cannot be.

        A `DataError` where numbers are not finite, columns do not add up to the same, or rows have
        slopes or curvatures that no rows have.

        Args:
            numbers: what was answered.
            root: how many rows were in the root of each tree, where that is known: there may not be
                more in its nodes.
            peers: of how many it is the sum; none tells of more than the question says.
        """
        units = self._units
        sums = in_grains(numbers.reshape(self.shape) * units)  # what masks round is mended
        left = "its histograms are left out"
        if not np.isfinite(sums).all():
            raise DataError(f"a histogram holds numbers that are not finite; {left}")
        if np.abs(numbers).max() > peers * (1 + 1e-6):
            raise DataError(f"a histogram tells of more rows than a peer says it has; {left}")
        totals = np.add.reduceat(sums, self.bins.starts[:-1], axis=0)
        rounded = (MOST_EDGES + 2) * (GRAIN + ROUNDING * peers**2 * units)  # of a column
        slack = 1e-6 * np.abs(sums).sum(0) + rounded
        if (np.abs(totals - totals[-1:]) > slack).any():
            raise DataError(f"the columns of a histogram do not add up to the same sums; {left}")
        rows = np.maximum(sums[..., 2], 0.0)
        allowed = rows[..., None] * (units / units[2]) * (1 + 1e-6) + slack
        if (sums[..., 1:] < -slack[..., 1:]).any():
            names = ("curvature", "number of rows")
            which = int((sums[..., 1:] < -slack[..., 1:]).any((0, 1, 2)).argmax())
            raise DataError(f"a histogram has a negative {names[which]}; {left}")
        if (np.abs(sums[..., :2]) > allowed[..., :2]).any():
            raise DataError(f"a histogram has slopes that so few rows cannot have; {left}")
        spare = slack[..., 2].sum(1)
        if root is not None and (self.rows_in(sums) > root + spare).any():
            raise DataError(f"the nodes of a tree have more rows than its root; {left}")
        return sums

    def message(self) -> dict[str, Any]:
        """Return it as plain data and arrays."""
        (trees, levels), lanes = self.level, self._lanes
        splits = [_packed(tree.levels, lanes) for tree in trees]
        values = [tree.values for tree in trees]
        return {
            "told": self.told,
            "family": self.family,
            "edges": np.concatenate([np.zeros(0), *self.bins.edges]),
            "edges_of": np.array([len(each) for each in self.bins.edges]),
            "shift": np.array(self.shift, dtype=np.float64),
            "scale": float(self.scale),
            "ensembles": self.ensembles,
            "examples": float(self.examples),
            "splits": np.stack(splits) if splits else np.zeros((0, lanes, 0, 3), dtype=np.int32),
            "values": np.stack(values) if values else np.zeros((0, lanes, 1)),
            "growing": _packed(levels, lanes),
        }

    @classmethod
    def of_message(cls, fields: Mapping[str, Any]) -> "Histograms | str":
        """Return what a message asks for, its numbers as they come, or what is wrong with it."""
        kinds = {"edges": "f", "shift": "f", "values": "f"}
        kinds |= dict.fromkeys(("edges_of", "splits", "growing"), "i")
        held = {name: fields.get(name) for name in kinds}
        arrays = {k: np.array(v) for k, v in held.items() if isinstance(v, np.ndarray)}
        plain = (("family", str), ("scale", float), ("ensembles", int), ("examples", float))
        if (
            any(name not in arrays or arrays[name].dtype.kind != kinds[name] for name in kinds)
            or any(type(fields.get(name)) is not kind for name, kind in plain)
            or not 0 < fields["ensembles"] <= MOST_ENSEMBLES
            or any(arrays[name].ndim != 1 for name in ("edges", "edges_of", "shift"))
            or (arrays["edges_of"] < 0).any()
            or arrays["edges_of"].sum() != len(arrays["edges"])
        ):
            return "histograms must have a loss, bins, targets' units and trees"
        edges = tuple(np.split(arrays["edges"], np.cumsum(arrays["edges_of"])[:-1]))
        about = (fields["family"], Bins(edges), arrays["shift"], fields["scale"])
        bare = cls(*about, fields["ensembles"], Level((), ()), fields["examples"])
        levels = _unpacked(arrays["growing"], bare._lanes)
        splits, values = arrays["splits"], arrays["values"]
        grown = [_unpacked(each, bare._lanes) for each in splits] if splits.ndim == 4 else [None]
        many = 2 ** len(grown[0] or ()) if grown else 1
        if levels is None or None in grown or values.shape != (len(splits), bare._lanes, many):
            return "trees must have all splits of their levels, and a value for each leaf"
        trees = (
            Tree(lv, leaves) for lv, leaves in zip(grown, values, strict=True) if lv is not None
        )
        return cls(*about, fields["ensembles"], Level(tuple(trees), levels), fields["examples"])


def _packed(levels: tuple[Splits, ...], lanes: int) -> Array:
    """Return the splits of a tree's first levels, (lanes, nodes, 3)."""
    parts = [np.stack([np.asarray(each) for each in level], -1) for level in levels]
    empty = np.zeros((lanes, 0, 3), dtype=np.int32)
    return np.concatenate([empty, *parts], 1).astype(np.int32)


def _unpacked(splits: Array, lanes: int) -> tuple[Splits, ...] | None:
    """Return the levels in `_packed`; None where that is none."""
    nodes = splits.shape[1] if splits.ndim == 3 else -1
    depth = (nodes + 1).bit_length() - 1
    if nodes < 0 or splits.shape != (lanes, 2**depth - 1, 3) or depth > MOST_DEPTH:
        return None
    parts = [splits[:, 2**level - 1 : 2 ** (level + 1) - 1] for level in range(depth)]
    return tuple(Splits(each[..., 0], each[..., 1], each[..., 2] != 0) for each in parts)


def merged(sums: Array, bins: Bins, fewest: float) -> Array:
    """Return histograms in which a bin has no row, or `fewest` at least: others join the next.

    A node with fewer rows than that is empty.

    Example:
        >>> bins = Bins((np.array([0.5, 1.5]),))
        >>> merged(np.array([1.0, 3, 1, 0, 5, 0]).reshape(6, 1, 1, 1), bins, 2).ravel()
        array([0., 5., 0., 0., 5., 0.])
    """
    out, starts = np.zeros_like(sums), bins.starts
    for first, end in pairwise(starts):
        carried, last = np.zeros_like(sums[0]), np.full(sums.shape[1:3], -1)
        for place in range(first, end):
            carried = carried + sums[place]
            full = carried[..., -1] >= fewest
            out[place][full] = carried[full]
            last[full], carried[full] = place, 0.0
        e, m = np.nonzero(last >= 0)
        out[last[e, m], e, m] += carried[e, m]
    return out
