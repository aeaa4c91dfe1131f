"""Examples: held in memory, read from a data set, or drawn from a stream."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from coterie.errors import DataError, attributing_errors_to
from coterie.users.sampling import seeded
from coterie.users.trees import NOTHING, Tree, device_of, leaves, mapped, n_rows

Array: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any] | Mapping[str, Any]
"""What one row an example can be had from.

A tensor, an array, nested lists, or dicts and tuples of those.
"""

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch of a list of items: a pair (inputs, targets), or one dict."""


def as_tree_pair(data: Any, whose: str) -> tuple[Tree, Tree]:
    """Return inputs and targets as nestings of tensors."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        kind = (
            f"{type(data).__name__} of {len(data)}"
            if isinstance(data, tuple | list)
            else type(data).__name__
        )
        raise DataError(f"the examples of {whose} must be a pair (inputs, targets), got {kind}")
    inputs, targets = data
    made = as_tree(inputs, "inputs", whose)
    if not leaves(made):
        raise DataError(f"the inputs of {whose} hold no tensor; give one row an example")
    return made, NOTHING if targets is None else _as_classes(as_tree(targets, "targets", whose))


def as_tree(values: Any, what: str, whose: str) -> Tree:
    """Return a nesting of tensors.

    Dicts and tuples as they are, and lists where they hold tensors.
    """
    if isinstance(values, Mapping):
        return {key: as_tree(value, what, whose) for key, value in values.items()}
    if isinstance(values, tuple | list) and any(_has_rows(value) for value in values):
        return type(values)(as_tree(value, what, whose) for value in values)
    return _as_tensor(values, what, whose)


def collated(items: list[Any], collate: Collate | None, target: str | None) -> tuple[Tree, Tree]:
    """Return the inputs and targets of several items, as `collate` makes them, or stacked when it is None."""
    if collate is not None:
        return as_tree_pair(pair_of(collate(items), target), "a batch made by `collate`")
    inputs, targets = zip(*(pair_of(item, target) for item in items), strict=True)
    return _stacked(inputs), NOTHING if targets[0] is None else _as_classes(_stacked(targets))


def pair_of(item: Any, target: str | None) -> tuple[Any, Any]:
    """Return input and target of an item.

    Of a tuple the last is the target, of a dict that which `target` names.

    Example:
        >>> pair_of({"ids": 1, "label": 2}, "label"), pair_of((1, 2, 3), None), pair_of({"ids": 1}, None)
        (({'ids': 1}, 2), ((1, 2), 3), ({'ids': 1}, None))
    """
    if isinstance(item, Mapping):
        if target is None:
            return item, None
        if target not in item:
            raise DataError(
                f"an example has no {target!r}, its target; it has {', '.join(map(str, item))}"
            )
        return {key: value for key, value in item.items() if key != target}, item[target]
    if isinstance(item, tuple | list):
        *inputs, last = item
        return (
            (last, None) if not inputs else (inputs[0] if len(inputs) == 1 else tuple(inputs), last)
        )
    return item, None


def _stacked(values: Sequence[Any]) -> Tree:
    """Return several examples as one nesting; floats of Python or NumPy take the default dtype."""
    plain, spec = tree_flatten(values[0], is_leaf=_is_numbers)
    columns = zip(*(tree_leaves(value, is_leaf=_is_numbers) for value in values), strict=True)
    try:
        made = [
            default_collate([np.asarray(v) if isinstance(v, list) else v for v in column])
            for column in columns
        ]
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(
            f"examples cannot be stacked: {why}; where their sizes differ, give `collate`, which"
            " makes a batch of a list of examples"
        ) from error
    for leaf, value in zip(made, plain, strict=True):
        if not isinstance(leaf, Tensor):
            raise DataError(f"an example holds {value!r}, which is no number; encode it as numbers")
    return tree_unflatten(
        [_default(leaf, value) for leaf, value in zip(made, plain, strict=True)], spec
    )


def _default(tensor: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_default_dtype())


def _as_classes(targets: Tree) -> Tree:
    """Return targets with classes as torch's losses take them: whole numbers of 64 bits."""
    short = (torch.uint8, torch.int8, torch.int16, torch.int32)
    return targets.long() if isinstance(targets, Tensor) and targets.dtype in short else targets


def _is_numbers(value: Any) -> bool:
    """Say whether a value is a list of numbers, which is one leaf."""
    return isinstance(value, list) and all(isinstance(each, int | float) for each in value)


def _has_rows(value: Any) -> bool:
    """Say whether a value is a part of a nesting: it holds a tensor or an array that has rows."""
    if isinstance(value, Mapping):
        return True
    if isinstance(value, tuple | list):
        return any(map(_has_rows, value))
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _as_tensor(values: Any, what: str, whose: str) -> Tensor:
    """Return a tensor; floating-point arrays take torch's default dtype, as lists do in `torch.tensor`."""
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_meta:
            kind = "on the meta device" if values.is_meta else f"{values.layout}"
            raise DataError(
                f"the {what} of {whose} are {kind}; make them dense numbers first:"
                " `tensor.to_dense()`"
            )
        tensor = values.detach()
    else:
        try:
            tensor = torch.as_tensor(np.require(values, requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the {what} of {whose} cannot be made a tensor: {error}; encode them as numbers,"
                " or give `collate` where examples have unequal sizes"
            ) from error
        if tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
    if not tensor.ndim:
        raise DataError(f"the {what} of {whose} must have one row an example, got a single number")
    return tensor


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
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor):
            indices = indices.to(self.inputs.device)
            return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)
        taken: tuple[Tree, Tree] = mapped(
            lambda leaf: leaf.index_select(0, indices.to(leaf.device)), (self.inputs, self.targets)
        )
        return taken

    def to(self, device: torch.device) -> Self:
        """Return the same examples on another device."""
        return type(self)(*mapped(lambda leaf: leaf.to(device), (self.inputs, self.targets)))

    def cut(self, rows: slice) -> Self:
        """Return some examples on the same memory."""
        return type(self)(*mapped(lambda leaf: leaf[rows], (self.inputs, self.targets)))


@dataclass(frozen=True, eq=False)
class FromDataset:
    """Examples read by index when they are needed.

    From a `torch.utils.data.Dataset`, or anything alike.
    """

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
        raise DataError(
            "a stream has no examples to take by index; hold some out as a set of their own"
        )

    def fresh(self, size: int, seed: int, step: int, whose: str) -> tuple[Tree, Tree]:
        """Return a batch of new examples."""
        with attributing_errors_to(f"the stream of {whose}"), seeded(seed, "stream", step):
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


def as_examples(
    data: Any, whose: str, collate: Collate | None = None, target: str | None = None
) -> Examples:
    """Return examples from (inputs, targets), a data set or a stream's function, checked."""
    first = data[0] if isinstance(data, tuple) and data else data
    if isinstance(first, DataLoader):
        raise DataError(
            f"{whose} has a DataLoader, but batches are drawn by (seed, user, step); give its data"
            " set: `coterie.User.from_dataset(name, loader.dataset)`"
        )
    if isinstance(first, Dataset) and first is not data:
        raise DataError(
            f"{whose} has a data set for inputs; write `coterie.User.from_dataset(name, dataset)`"
        )
    if isinstance(data, Tensor | np.ndarray | str | bytes | Mapping):
        kind = type(data).__name__
        raise DataError(
            f"the examples of {whose} must be a pair (inputs, targets) or a data set, got {kind}"
        )
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
        if isinstance(data, IterableDataset) or not (
            hasattr(data, "__len__") and hasattr(data, "__getitem__")
        ):
            raise DataError(
                f"the dataset of {whose} must have a length and be read by index (a map-style"
                " Dataset)"
            )
        examples = FromDataset(data, torch.device("cpu"), collate, target)
    if not len(examples):
        raise DataError(f"{whose} has no examples; leave it out, or give it some")
    return examples


def some_of(examples: Examples, places: np.ndarray[Any, Any]) -> Examples:
    """Return those of some examples at these places, in order; themselves where that is all.

    Example:
        >>> rows = InMemory(torch.arange(3.0)[:, None], torch.arange(3))
        >>> some_of(rows, np.array([0, 2])).targets.tolist()
        [0, 2]
    """
    if len(places) == len(examples):
        return examples
    if isinstance(examples, FromDataset):
        return replace(examples, dataset=Subset(examples.dataset, places.tolist()))
    return InMemory(*examples.take(torch.from_numpy(places)))


def from_columns(
    data: Any, whose: str, inputs: str | Sequence[str], target: str | None, collate: Collate | None
) -> Examples:
    """Return examples from columns of a `datasets.Dataset`.

    In memory, or read by index for `collate`.
    """
    wanted = [inputs] if isinstance(inputs, str) else list(inputs)
    named = [*wanted, *([target] if target else [])]
    missing = [column for column in named if column not in getattr(data, "column_names", ())]
    if missing or not wanted:
        there = ", ".join(getattr(data, "column_names", ())) or "none"
        raise DataError(
            f"{whose} has no column {', '.join(missing) or 'of inputs'}; its columns are: {there}"
        )
    data = data.select_columns(named).with_format("torch")
    if collate is not None:
        return as_examples(data, whose, collate, target)
    columns = data[:]
    for column, values in columns.items():
        if not isinstance(values, Tensor):
            kind = type(values[0]).__name__ if len(values) else "nothing"
            raise DataError(
                f"the column {column!r} of {whose} is not one tensor ({kind} in a row, perhaps of"
                " unequal sizes); pad it to one size, encode it as numbers, or give `collate`,"
                " which makes a batch of a list of rows"
            )
    taken = (
        columns[inputs]
        if isinstance(inputs, str)
        else {column: columns[column] for column in wanted}
    )
    return as_examples((taken, columns[target] if target else None), whose)


def _in_memory(data: Any, whose: str) -> InMemory:
    """Return (inputs, targets) as examples of as many rows in each tensor, none of whose targets is NaN."""
    inputs, targets = as_tree_pair(data, whose)
    counts = {len(leaf) for leaf in leaves(inputs)}, {len(leaf) for leaf in leaves(targets)}
    if len(counts[0]) > 1 or (targets is not NOTHING and counts[1] != counts[0]):
        n_inputs, n_targets = (" and ".join(map(str, sorted(each))) for each in counts)
        raise DataError(
            f"{whose} has {n_inputs} inputs but {n_targets} targets; give one target for each input"
            if len(counts[0]) == 1
            else (
                f"the inputs of {whose} have parts of {n_inputs} rows; give each part a row an example"
                " (of a list of examples make one tensor by `torch.stack`, or give `collate`)"
            )
        )
    for leaf in leaves(targets):
        if leaf.is_floating_point() and bool(leaf.isnan().any()):
            row = int(leaf.isnan().reshape(len(leaf), -1).any(1).nonzero()[0])
            raise DataError(
                f"a target of {whose} is NaN (example {row}); drop the examples without a target"
            )
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
