"""Trees as one module of tensors: no code and no pickle is needed to keep or to load them."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.mixture.families import Array
from coterie.trees.boosting import Bins, Tree

AT_ONCE = 2**22
"""So many leaves are looked up at once."""


class Nodes(NamedTuple):
    """The nodes of several trees, (M,) each but for `value`, and where each tree begins."""

    column: Array  # that a node splits; one beyond all inputs says whose row it is, which is 1
    threshold: Array  # at or below it: left
    missing_left: Array
    left: Array  # a leaf is its own child
    right: Array
    value: Array  # (M, K)
    roots: Array  # (T,)
    depth: int


class Trees(nn.Module):
    """A sum of trees, plus a base and a linear part; or the logarithm of it, where trees give shares of classes.

    The values of the nodes and the slopes are its parameters. A value that is missing (NaN) goes where a
    node says, and is 0 in the linear part.

    Args:
        n_inputs: the number of columns.
        n_outputs: K.
        nodes: how many there are in all trees.
        trees: how many trees there are.

    Example:
        >>> stump = Nodes(*map(np.array, ([0, 0, 0], [0.5, 0, 0], [True] * 3, [1, 1, 2], [2, 1, 2])),
        ...     np.array([[0.0], [1.0], [2.0]]), np.array([0]), 1)
        >>> Trees.of(stump, n_inputs=1)(torch.tensor([[0.3], [0.7], [torch.nan]])).flatten()
        tensor([1., 2., 1.], grad_fn=<ViewBackward0>)
    """

    column: Tensor
    threshold: Tensor
    missing_left: Tensor
    left: Tensor
    right: Tensor
    roots: Tensor
    base: Tensor
    depth: Tensor
    logarithm: Tensor

    def __init__(self, n_inputs: int, n_outputs: int, nodes: int, trees: int) -> None:
        super().__init__()
        self.n_inputs, self.is_mine = n_inputs, 1.0  # 0 for rows of another user
        for name, kind, size in (
            ("column", torch.long, nodes),
            ("threshold", torch.float32, nodes),
            ("missing_left", torch.bool, nodes),
            ("left", torch.long, nodes),
            ("right", torch.long, nodes),
            ("roots", torch.long, trees),
            ("base", torch.float32, n_outputs),
            ("depth", torch.long, 1),
            ("logarithm", torch.bool, 1),
        ):
            self.register_buffer(name, torch.zeros(size, dtype=kind))
        self.value = nn.Parameter(torch.zeros(nodes, n_outputs))
        self.slopes = nn.Parameter(torch.zeros(n_inputs, n_outputs))

    @classmethod
    def of(
        cls,
        nodes: Nodes,
        *,
        n_inputs: int,
        base: Array | float = 0.0,
        slopes: Array | float = 0.0,
        logarithm: bool = False,
    ) -> Self:
        """Return the module of some nodes."""
        made = cls(n_inputs, nodes.value.shape[1], len(nodes.column), len(nodes.roots))
        down = np.asarray(nodes.threshold, dtype=np.float32)
        # rounded down: a single-precision input is on the side where it was
        down = np.where(down > nodes.threshold, np.nextafter(down, np.float32(-np.inf)), down)
        settings: dict[str, Any] = nodes._asdict() | {"threshold": down}
        settings |= {"base": base, "slopes": slopes, "logarithm": logarithm}
        with torch.no_grad():
            for name, value in settings.items():
                held: Tensor = getattr(made, name)
                held.copy_(torch.as_tensor(np.array(value)))
        return made

    @property
    def saved_as(self) -> str:
        """What a file calls a module of this size."""
        return f"trees:{len(self.column)}:{len(self.roots)}"

    @classmethod
    def sized(cls, name: str, n_inputs: int, n_outputs: int) -> Self:
        """Return an empty module of the size that `saved_as` names.

        Example:
            >>> Trees.sized("trees:3:1", 2, 1).saved_as
            'trees:3:1'
        """
        sizes = name.split(":")[1:]
        if len(sizes) != 2 or not all(each.isdecimal() and int(each) for each in sizes):
            raise ModelError(f"trees are named as trees:NODES:TREES, got {name!r}")
        nodes, trees = map(int, sizes)
        return cls(n_inputs, n_outputs, nodes, trees)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for a batch of inputs."""
        flat = inputs.flatten(1)
        rows = torch.cat([flat, flat.new_full((len(flat), 1), self.is_mine)], 1)
        size = max(1, AT_ONCE // len(self.roots))
        sums = [self._sums(each) for each in torch.split(rows, size)] or [self.base[None][:0]]
        outputs = torch.cat(sums) + self.base + flat.nan_to_num() @ self.slopes
        return outputs.log() if bool(self.logarithm) else outputs

    def _sums(self, rows: Tensor) -> Tensor:
        at = self.roots.expand(len(rows), -1)
        for _ in range(min(int(self.depth), len(self.column))):
            value = rows.gather(1, self.column[at])
            left = torch.where(value.isnan(), self.missing_left[at], value <= self.threshold[at])
            at = torch.where(left, self.left[at], self.right[at])
        return nn.functional.embedding_bag(at, self.value, mode="sum")


def for_another_user(model: nn.Module) -> nn.Module | None:
    """Return a model whose trees take the leaves of another user with the same values.

    None where no tree tells user 0 from others. How far its predictions are from the model's is how
    far user 0's leaves are shifted.
    """
    changed, differs = deepcopy(model), False
    for part in changed.modules():
        if isinstance(part, Trees):
            part.is_mine = 0.0
            differs |= bool((part.column == part.n_inputs).any())
    return changed if differs else None


def of_boosted(
    trees: Sequence[Tree], ensemble: int, bins: Bins, grows: Sequence[int], outputs: int
) -> Nodes:
    """Return the nodes of one of the ensembles that were grown; a tree's are in levels, from its root.

    Args:
        trees: that were grown.
        ensemble: the number of one.
        bins: where columns may be split.
        grows: the outputs that have trees.
        outputs: how many there are.
    """
    starts, depth = bins.starts, len(trees[0].levels)
    edges = np.full(starts[-1] + 1, np.inf)  # rows of a node that is not split are all left
    for start, each in zip(starts, bins.edges, strict=False):
        edges[start : start + len(each)] = each
    edges[starts[-2]] = 0.5
    inner, size = 2**depth - 1, 2 ** (depth + 1) - 1
    lanes = slice(ensemble * len(grows), (ensemble + 1) * len(grows))
    splits = [
        np.concatenate([np.concatenate([lv[i][lanes] for lv in tree.levels], 1) for tree in trees])
        for i in range(3)
    ]  # (T, inner) each: column, place, missing_left
    many = len(splits[0])

    def padded(values: Array, leaves: Any) -> Array:
        filled = np.full((many, size), leaves)
        filled[:, :inner] = values
        return filled.ravel()

    value = np.zeros((many, size, outputs))
    leaves = np.concatenate([tree.values[lanes] for tree in trees])
    which = np.tile(grows, len(trees))
    value[np.arange(many)[:, None], np.arange(inner, size), which[:, None]] = leaves
    roots = size * np.arange(many)
    own = np.arange(size)
    child = np.where(own < inner, 2 * own + 1, own)
    left, right = ((roots[:, None] + child + (own < inner) * side).ravel() for side in (0, 1))
    return Nodes(
        padded(splits[0], 0),
        padded(edges[np.minimum(splits[1], starts[-1])], 0.0),
        padded(splits[2].astype(bool), leaves=True),
        left,
        right,
        value.reshape(-1, outputs),
        roots,
        depth,
    )


def joined(parts: Sequence[Nodes], values: Sequence[Array]) -> Nodes:
    """Return the nodes of several sums of trees as those of one, with other values."""
    firsts = np.cumsum([0, *(len(each.column) for each in parts[:-1])])
    moved = [
        each._replace(left=each.left + first, right=each.right + first, roots=each.roots + first)
        for each, first in zip(parts, firsts, strict=True)
    ]
    names = ("column", "threshold", "missing_left", "left", "right", "roots")
    whole = {name: np.concatenate([getattr(each, name) for each in moved]) for name in names}
    return Nodes(**whole, value=np.concatenate(values), depth=max(each.depth for each in parts))


def of_forest(trees: Sequence[Any], classes: Array | None, n_outputs: int) -> Nodes:
    """Return the nodes of scikit-learn's trees; their values are divided by the number of trees.

    Args:
        trees: fitted ones, as in `estimators_` of a forest.
        classes: the number of each class that they know; None where they give numbers.
        n_outputs: K.
    """
    parts, first, roots = [], 0, []
    for one in (each.tree_ for each in trees):
        own = np.arange(one.node_count)
        leaf = one.children_left < 0
        value = np.zeros((one.node_count, n_outputs))
        value[:, slice(None) if classes is None else classes] = (
            one.value[:, :, 0] if classes is None else one.value[:, 0]
        )
        column = np.where(leaf, 0, one.feature)
        threshold = np.where(leaf, 0.0, one.threshold)
        missing = one.missing_go_to_left.astype(bool)
        left, right = (
            np.where(leaf, own, c) + first for c in (one.children_left, one.children_right)
        )
        parts.append((column, threshold, missing, left, right, value * leaf[:, None] / len(trees)))
        roots.append(first)
        first += one.node_count
    depth = max(each.get_depth() for each in trees)
    column, threshold, missing, left, right, value = map(np.concatenate, zip(*parts, strict=True))
    return Nodes(column, threshold, missing, left, right, value, np.array(roots), depth)
