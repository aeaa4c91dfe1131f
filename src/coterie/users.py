"""Users: a name, examples, and batches that depend only on (seed, user, step)."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from coterie.errors import DataError

Array: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"
Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch from (output, target), as in `torch.nn.functional`."""


class Examples(Protocol):
    """Examples that can be counted and taken by index."""

    def __len__(self) -> int: ...
    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets at these indices."""

    def to(self, device: torch.device) -> Examples:
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

    def to(self, device: torch.device) -> InMemory:
        """Return the same examples on another device."""
        return InMemory(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, eq=False)
class FromDataset:
    """Examples read from a `torch.utils.data.Dataset` when they are needed."""

    dataset: Dataset[Any]
    device: torch.device

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked for __len__ in `_as_examples`

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets at these indices."""
        items = [self.dataset[i] for i in indices.tolist()]
        if any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
            raise DataError(f"an item of a dataset must be a pair (input, target), got {type(items[0]).__name__}")
        inputs, targets = (_collated(column).to(self.device) for column in zip(*items, strict=True))
        return inputs, targets

    def to(self, device: torch.device) -> FromDataset:
        """Return the same examples, to be read onto another device."""
        return FromDataset(self.dataset, device)


Draw: TypeAlias = Callable[[int, int, int], tuple[Array, Array]]
"""Fresh inputs and targets from (size, seed, step); the same for the same three numbers."""

ENDLESS = sys.maxsize
"""How many examples a stream counts as having: no batch takes all of them."""


@dataclass(frozen=True, eq=False)
class FromStream:
    """Examples drawn afresh for every batch, none of them twice."""

    draw: Draw
    device: torch.device

    def __len__(self) -> int:
        return ENDLESS

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Say that a stream cannot be taken from by index."""
        raise DataError("a stream has no examples to take by index; hold some out as a set of their own")

    def fresh(self, size: int, seed: int, step: int, whose: str) -> tuple[Tensor, Tensor]:
        """Return a batch of fresh examples."""
        inputs, targets = self.draw(size, seed, step)
        return (
            _as_tensor(inputs, "inputs", whose).to(self.device),
            _as_tensor(targets, "targets", whose).to(self.device),
        )

    def to(self, device: torch.device) -> FromStream:
        """Return the same stream, to be drawn onto another device."""
        return FromStream(self.draw, device)


class User:
    """One user: a name and its examples; for user 0 also those held out for validation and test.

    Args:
        name: how weights, records and tables call this user; part of what its batches are drawn from.
        inputs: the training inputs, one example a row: a tensor, an array or nested lists.
        targets: the training targets, as many as inputs.
        validation: (inputs, targets) held out to choose the best model, or a `Dataset`.
        test: (inputs, targets) held out to report on, used once, or a `Dataset`.

    Example:
        >>> user = User("ward 3", [[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> user
        User('ward 3', 4 examples)
        >>> inputs, targets = user.batch(2, seed=0, step=7)
        >>> torch.equal(inputs, user.batch(2, seed=0, step=7)[0])
        True
    """

    name: str
    examples: Examples
    validation: Examples | None
    test: Examples | None

    def __init__(
        self,
        name: str,
        inputs: Array,
        targets: Array,
        *,
        validation: tuple[Array, Array] | Dataset[Any] | None = None,
        test: tuple[Array, Array] | Dataset[Any] | None = None,
    ) -> None:
        self._hold(name, (inputs, targets), validation, test)

    @classmethod
    def from_dataset(
        cls,
        name: str,
        dataset: Dataset[Any],
        *,
        validation: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
    ) -> User:
        """Return a user whose examples are the (input, target) pairs of a map-style `Dataset`.

        A `TensorDataset` is held in memory; any other is read batch by batch, random transforms included,
        which then draw from (seed, user, step) too.

        Example:
            >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
            >>> User.from_dataset("a", data)
            User('a', 4 examples)
        """
        user = cls.__new__(cls)
        user._hold(name, dataset, validation, test)
        return user

    @classmethod
    def stream(
        cls,
        name: str,
        draw: Draw,
        *,
        validation: tuple[Array, Array] | Dataset[Any] | None = None,
        test: tuple[Array, Array] | Dataset[Any] | None = None,
    ) -> User:
        """Return a user who draws fresh examples for every batch.

        Args:
            name: as ever.
            draw: a function of (size, seed, step) that returns inputs and targets, and the same ones whenever it is
                called with the same numbers; `seed` is already the user's own.
            validation: as ever.
            test: as ever.

        Example:
            >>> def draw(size, seed, step):
            ...     inputs = np.random.default_rng([seed, step]).normal(size=(size, 2))
            ...     return inputs, inputs.sum(1, keepdims=True)
            >>> user = User.stream("sensor", draw)
            >>> user, user.batch(3, seed=0, step=5)[0].shape
            (User('sensor', a stream), torch.Size([3, 2]))
        """
        user = cls.__new__(cls)
        user._hold(name, draw, validation, test)
        return user

    @property
    def is_stream(self) -> bool:
        """Whether examples are drawn afresh for every batch."""
        return isinstance(self.examples, FromStream)

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        return f"User({self.name!r}, {'a stream' if self.is_stream else f'{len(self)} examples'})"

    def batch(self, size: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return a batch that depends on (seed, user, step) alone; all examples when `size` exceeds them.

        One example is drawn from each of `size` equal slices of the examples: every example has the same
        chance, batches of different steps are independent, and none is drawn twice when `size` divides them.
        """
        if isinstance(self.examples, FromStream):
            return self.examples.fresh(size, stream(seed, self.name), step, f"user {self.name!r}")
        size = min(size, len(self))
        indices = draw([stream(seed, self.name)], [len(self)], size, [step])[0, 0]
        if isinstance(self.examples, InMemory):
            return self.examples.take(indices)
        with seeded(seed, self.name, step):
            return self.examples.take(indices)

    def to(self, device: torch.device) -> User:
        """Return the same user with its training examples on another device."""
        user = copy.copy(self)
        user.examples = self.examples.to(device)
        return user

    def fingerprint(self) -> str:
        """Return a digest of the training examples, by which a resumed run knows its data again.

        Examples that are read from a `Dataset` are only counted.

        Example:
            >>> User("a", [[1.0]], [0.5]).fingerprint() == User("b", [[1.0]], [0.5]).fingerprint()
            True
        """
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=8)
        if isinstance(self.examples, InMemory):
            for tensor in (self.examples.inputs, self.examples.targets):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _hold(self, name: str, examples: Any, validation: Any, test: Any) -> None:
        if not isinstance(name, str) or not name:
            raise DataError(f"a user's name must be a non-empty string, got {name!r}")
        self.name = name
        self.examples = _as_examples(examples, f"user {name!r}")
        self.validation = None if validation is None else _as_examples(validation, f"validation set of {name!r}")
        self.test = None if test is None else _as_examples(test, f"test set of {name!r}")


def stream(seed: int, name: str) -> int:
    """Return the 64-bit key of a user's random stream, a hash of the seed and the name.

    Example:
        >>> stream(0, "a") == stream(0, "a") != stream(0, "b")
        True
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw(streams: Sequence[int], sizes: Sequence[int], batch: int, steps: Sequence[int]) -> Tensor:
    """Draw the indices of one batch for each step and user at once, of shape (steps, users, batch).

    A counter-based generator (SplitMix64 of stream, step and position), so that nothing is carried from one
    step to the next.

    Args:
        streams: each user's key, from `stream`.
        sizes: each user's number of examples, at least `batch`.
        batch: how many to draw.
        steps: the steps they are for.

    Example:
        >>> draw([stream(0, "a")], [5], 5, steps=[3])
        tensor([[[0, 1, 2, 3, 4]]])
    """
    position = np.arange(batch)
    counter = _mix(np.array(streams, np.uint64) + _GOLDEN * (np.array(steps, np.uint64)[:, None] + np.uint64(1)))
    bits = _mix(counter[..., None] + _GOLDEN * (position + 1).astype(np.uint64))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    length = np.array(sizes)[:, None]
    indices = ((position + uniform) * (length / batch)).astype(np.int64)
    return torch.from_numpy(np.minimum(indices, length - 1))  # rounding may reach the end of a slice


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴/φ, SplitMix64's increment


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Scramble 64-bit integers: SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@contextlib.contextmanager
def seeded(seed: int, name: str, step: int, device: torch.device | None = None) -> Iterator[None]:
    """Let torch's, NumPy's and Python's generators draw from (seed, user, step) inside, and restore them after."""
    key = stream(seed, f"{name}/{step}")
    on_gpu = device is not None and device.type == "cuda"
    before, numpy_before = random.getstate(), np.random.get_state()  # transforms use it
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)


def _as_examples(data: Any, whose: str) -> Examples:
    """Return examples from (inputs, targets), a `Dataset` or a stream's function, checked."""
    if callable(data):
        return FromStream(data, torch.device("cpu"))
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, Dataset):
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise DataError(f"the dataset of {whose} must have a length and be read by index (a map-style Dataset)")
        if not len(data):
            raise DataError(f"{whose} has no examples; leave it out, or give it some")
        return FromDataset(data, torch.device("cpu"))
    inputs, targets = (
        _as_tensor(values, what, whose) for values, what in zip(data, ("inputs", "targets"), strict=True)
    )
    if len(inputs) != len(targets):
        raise DataError(
            f"{whose} has {len(inputs)} inputs but {len(targets)} targets; give one target for each input"
        )
    if not len(inputs):
        raise DataError(f"{whose} has no examples; leave it out, or give it some")
    if targets.is_floating_point() and bool(targets.isnan().any()):
        row = (
            int(targets.isnan().flatten(1).any(1).nonzero()[0])
            if targets.ndim > 1
            else int(targets.isnan().nonzero()[0])
        )
        raise DataError(f"a target of {whose} is NaN (example {row}); drop the examples without a target")
    return InMemory(inputs, targets)


def _collated(values: Sequence[Any]) -> Tensor:
    """Return the values of several examples as one tensor; floats of Python or NumPy take the default dtype."""
    tensor: Tensor = default_collate(list(values))
    if isinstance(values[0], Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_default_dtype())


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
