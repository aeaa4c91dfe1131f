"""Examples: held in memory, read from a data set, or drawn from a stream."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from coterie.errors import DataError, blaming
from coterie.users.reading import Collate, as_tree_pair, collated, pair_of
from coterie.users.sampling import seeded
from coterie.users.trees import NOTHING, Tree, device_of, leaves, mapped, n_rows


class Examples(Protocol):
    """Examples that can be counted and taken by index."""

    def __len__(self) -> int: ...
    def take(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Return the inputs and targets at these indices."""

    def to(self, device: torch.device) -> Self:
        """Return the same examples on another device."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """Examples held as tensors, or as nestings of tensors that are indexed together."""

    inputs: Tree
    targets: Tree

    def __len__(self) -> int:
        return n_rows(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return device_of(self.inputs)

    def take(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Return the inputs and targets at these indices."""
        indices = indices.to(self.device)
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor):
            return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)
        return self._mapped(lambda leaf: leaf.index_select(0, indices))

    def to(self, device: torch.device) -> Self:
        """Return the same examples on another device."""
        return type(self)(*self._mapped(lambda leaf: leaf.to(device)))

    def cut(self, rows: slice) -> Self:
        """Return some examples on the same memory."""
        return type(self)(*self._mapped(lambda leaf: leaf[rows]))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> tuple[Tree, Tree]:
        return mapped(function, self.inputs), mapped(function, self.targets)


@dataclass(frozen=True, eq=False)
class FromDataset:
    """Examples read by index when they are needed: from a `torch.utils.data.Dataset`, or anything alike."""

    dataset: Dataset[Any]
    device: torch.device
    collate: Collate | None = None  # makes a batch of a list of items
    target: str | None = None  # the key of the target, where items are dicts

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked for __len__ in `as_examples`

    def take(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Return the inputs and targets at these indices."""
        items = [self.dataset[i] for i in indices.tolist()]
        inputs, targets = collated(items, self.collate, self.target)
        return _moved(inputs, self.device), _moved(targets, self.device)

    def to(self, device: torch.device) -> Self:
        """Return the same examples, with batches on another device."""
        return replace(self, device=device)


Draw: TypeAlias = Callable[[int, int, int], tuple[Any, Any]]
"""A function from (size, seed, step) to inputs and targets, the same for the same three numbers."""

STREAM_LENGTH = sys.maxsize
"""The length of a stream: larger than any batch."""


@dataclass(frozen=True, eq=False)
class FromStream:
    """Examples that are drawn for one batch and not kept."""

    draw: Draw
    device: torch.device

    def __len__(self) -> int:
        return STREAM_LENGTH

    def take(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Refuse: a stream has no indices."""
        raise DataError("a stream has no examples to take by index; hold some out as a set of their own")

    def fresh(self, size: int, seed: int, step: int, whose: str) -> tuple[Tree, Tree]:
        """Return a batch of new examples."""
        with blaming(f"the stream of {whose}"), seeded(seed, "stream", step):
            drawn = self.draw(size, seed, step)
        inputs, targets = as_tree_pair(drawn, whose)
        for what, tree in (("inputs", inputs), ("targets", targets)):
            if len(leaves(tree)) and n_rows(tree) != size:
                counts = f"{size} examples and gave {n_rows(tree)} {what}"
                raise DataError(f"the stream of {whose} was asked for {counts}; give as many")
        return _moved(inputs, self.device), _moved(targets, self.device)

    def to(self, device: torch.device) -> Self:
        """Return the same stream, with batches on another device."""
        return replace(self, device=device)


def as_examples(data: Any, whose: str, collate: Collate | None = None, target: str | None = None) -> Examples:
    """Return examples from (inputs, targets), a data set or a stream's function, checked."""
    first = data[0] if isinstance(data, tuple) and data else data
    if isinstance(first, DataLoader):
        raise DataError(
            f"{whose} has a DataLoader, but batches are drawn by (seed, user, step); give its data set: "
            "`coterie.User.from_dataset(name, loader.dataset)`"
        )
    if isinstance(first, Dataset) and first is not data:
        raise DataError(f"{whose} has a data set for inputs; write `coterie.User.from_dataset(name, dataset)`")
    if isinstance(data, Tensor | np.ndarray | str | bytes | Mapping):
        kind = type(data).__name__
        raise DataError(f"the examples of {whose} must be a pair (inputs, targets) or a data set, got {kind}")
    if callable(data):
        return FromStream(data, torch.device("cpu"))
    if isinstance(data, TensorDataset) and collate is None:
        data = pair_of(data.tensors, target)
    if isinstance(data, tuple | list) and collate is not None:
        inputs, targets = data
        data = _Paired(inputs, targets, whose)
    if isinstance(data, tuple | list):
        examples: Examples = _in_memory(data, whose)
    else:
        if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(f"the dataset of {whose} must have a length and be read by index (a map-style Dataset)")
        examples = FromDataset(data, torch.device("cpu"), collate, target)
    if not len(examples):
        raise DataError(f"{whose} has no examples; leave it out, or give it some")
    return examples


def from_columns(
    data: Any, whose: str, inputs: str | Sequence[str], target: str | None, collate: Collate | None
) -> Examples:
    """Return examples from columns of a `datasets.Dataset`: in memory, or read by index for `collate`."""
    wanted = [inputs] if isinstance(inputs, str) else list(inputs)
    named = [*wanted, *([target] if target else [])]
    missing = [column for column in named if column not in getattr(data, "column_names", ())]
    if missing or not wanted:
        there = ", ".join(getattr(data, "column_names", ())) or "none"
        raise DataError(f"{whose} has no column {', '.join(missing) or 'of inputs'}; its columns are: {there}")
    data = data.select_columns(named).with_format("torch")
    if collate is not None:
        return as_examples(data, whose, collate, target)
    columns = data[:]
    for column, values in columns.items():
        if not isinstance(values, Tensor):
            kind = type(values[0]).__name__ if len(values) else "nothing"
            raise DataError(
                f"the column {column!r} of {whose} is not one tensor ({kind} in a row, perhaps of unequal sizes); "
                "pad it to one size, encode it as numbers, or give `collate`, which makes a batch of a list of rows"
            )
    taken = columns[inputs] if isinstance(inputs, str) else {column: columns[column] for column in wanted}
    return as_examples((taken, columns[target] if target else None), whose)


def _in_memory(data: Any, whose: str) -> InMemory:
    """Return (inputs, targets) as examples of as many rows in each tensor, none of whose targets is NaN."""
    inputs, targets = as_tree_pair(data, whose)
    counts = {len(leaf) for leaf in leaves(inputs)}, {len(leaf) for leaf in leaves(targets)}
    if len(counts[0]) > 1 or (targets is not NOTHING and counts[1] != counts[0]):
        ours, theirs = (" and ".join(map(str, sorted(each))) for each in counts)
        raise DataError(
            f"{whose} has {ours} inputs but {theirs} targets; give one target for each input"
            if len(counts[0]) == 1
            else f"the inputs of {whose} have parts of {ours} rows; give each part a row an example (of a list of "
            "examples make one tensor by `torch.stack`, or give `collate`)"
        )
    for leaf in leaves(targets):
        if leaf.is_floating_point() and bool(leaf.isnan().any()):
            row = int(leaf.isnan().reshape(len(leaf), -1).any(1).nonzero()[0])
            raise DataError(f"a target of {whose} is NaN (example {row}); drop the examples without a target")
    return InMemory(inputs, targets)


def _moved(tree: Tree, device: torch.device) -> Tree:
    return mapped(lambda leaf: leaf.to(device), tree)


def plain_targets(examples: Examples | None) -> Tensor | None:
    """Return the targets where they are one tensor in memory, else None."""
    held = examples.targets if isinstance(examples, InMemory) else None
    return held if isinstance(held, Tensor) else None


class _Paired(Dataset[tuple[Any, Any]]):
    """Sequences of inputs and of targets, of any size each, as a data set."""

    def __init__(self, inputs: Sequence[Any], targets: Sequence[Any] | None, whose: str) -> None:
        self.inputs = inputs
        self.targets = [NOTHING] * len(inputs) if targets is None else targets
        if len(self.inputs) != len(self.targets):
            counts = f"{len(self.inputs)} inputs but {len(self.targets)} targets"
            raise DataError(f"{whose} has {counts}; give one target for each input")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.targets[index]
