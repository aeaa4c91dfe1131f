"""Examples: held in memory, read from a data set, or drawn from a stream."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from coterie.errors import DataError

Array: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any]


class Examples(Protocol):
    """Examples that can be counted and taken by index."""

    def __len__(self) -> int: ...
    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets at these indices."""

    def to(self, device: torch.device) -> Self:
        """Return the same examples on another device."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """Examples held as two tensors."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets at these indices."""
        indices = indices.to(self.inputs.device)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def to(self, device: torch.device) -> Self:
        """Return the same examples on another device."""
        return type(self)(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, eq=False)
class FromDataset:
    """Examples read from a `torch.utils.data.Dataset` when they are needed."""

    dataset: Dataset[Any]
    device: torch.device

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked for __len__ in `as_examples`

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets at these indices."""
        items = [self.dataset[i] for i in indices.tolist()]
        if any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
            raise DataError(f"an item of a dataset must be a pair (input, target), got {type(items[0]).__name__}")
        inputs, targets = (_collated(column).to(self.device) for column in zip(*items, strict=True))
        return inputs, targets

    def to(self, device: torch.device) -> Self:
        """Return the same examples, with batches on another device."""
        return replace(self, device=device)


Draw: TypeAlias = Callable[[int, int, int], tuple[Array, Array]]
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

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse: a stream has no indices."""
        raise DataError("a stream has no examples to take by index; hold some out as a set of their own")

    def fresh(self, size: int, seed: int, step: int, whose: str) -> tuple[Tensor, Tensor]:
        """Return a batch of new examples."""
        inputs, targets = _as_tensors(self.draw(size, seed, step), whose)
        return inputs.to(self.device), targets.to(self.device)

    def to(self, device: torch.device) -> Self:
        """Return the same stream, with batches on another device."""
        return replace(self, device=device)


def as_examples(data: Any, whose: str) -> Examples:
    """Return examples from (inputs, targets), a `Dataset` or a stream's function, checked."""
    if callable(data):
        return FromStream(data, torch.device("cpu"))
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, Dataset):
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise DataError(f"the dataset of {whose} must have a length and be read by index (a map-style Dataset)")
        examples: Examples = FromDataset(data, torch.device("cpu"))
    else:
        inputs, targets = _as_tensors(data, whose)
        if len(inputs) != len(targets):
            counts = f"{len(inputs)} inputs but {len(targets)} targets"
            raise DataError(f"{whose} has {counts}; give one target for each input")
        if targets.is_floating_point() and bool(targets.isnan().any()):
            row = int(targets.isnan().reshape(len(targets), -1).any(1).nonzero()[0])
            raise DataError(f"a target of {whose} is NaN (example {row}); drop the examples without a target")
        examples = InMemory(inputs, targets)
    if not len(examples):
        raise DataError(f"{whose} has no examples; leave it out, or give it some")
    return examples


def _collated(values: Sequence[Any]) -> Tensor:
    """Return the values of several examples as one tensor; floats of Python or NumPy take the default dtype."""
    tensor: Tensor = default_collate(list(values))
    if isinstance(values[0], Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_default_dtype())


def _as_tensors(data: Any, whose: str) -> tuple[Tensor, Tensor]:
    inputs, targets = data
    return _as_tensor(inputs, "inputs", whose), _as_tensor(targets, "targets", whose)


def _as_tensor(values: Any, what: str, whose: str) -> Tensor:
    """Return a tensor; floating-point arrays take torch's default dtype, as lists do in `torch.tensor`."""
    if isinstance(values, Tensor):
        tensor = values.detach()
    else:
        try:
            tensor = torch.as_tensor(np.require(values, requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the {what} of {whose} cannot be made a tensor: {error}; encode them as numbers"
            ) from error
        if tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
    if not tensor.ndim:
        raise DataError(f"the {what} of {whose} must have one row an example, got a single number")
    return tensor
