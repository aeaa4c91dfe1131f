"""Users: a name, examples, and batches that depend only on (seed, user, step)."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from coterie.errors import DataError
from coterie.users.examples import Array, Draw, FromStream, InMemory, as_examples
from coterie.users.sampling import draw, random_key, seeded

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch from (output, target), as in `torch.nn.functional`."""

HeldOut: TypeAlias = tuple[Array, Array] | Dataset[Any] | None


def check_names(names: Sequence[str]) -> None:
    """Refuse users of the same name."""
    if len(set(names)) < len(names):
        shown = ", ".join(names)
        raise DataError(f"users must have different names: weights and batches go by them; got {shown}")


class User:
    """One user: a name and its examples; for user 0 also those held out for validation and test.

    Args:
        name: the name in weights, records and tables; batches are drawn from it, the seed and the step.
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

    def __init__(
        self, name: str, inputs: Array, targets: Array, *, validation: HeldOut = None, test: HeldOut = None
    ) -> None:
        self._hold(name, (inputs, targets), validation, test)

    @classmethod
    def from_dataset(
        cls, name: str, dataset: Dataset[Any], *, validation: HeldOut = None, test: HeldOut = None
    ) -> Self:
        """Return a user whose examples are the (input, target) pairs of a map-style `Dataset`.

        A `TensorDataset` is held in memory; any other is read batch by batch, random transforms included,
        which then draw from (seed, user, step) too.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
            >>> User.from_dataset("a", data)
            User('a', 4 examples)
        """
        user = cls.__new__(cls)
        user._hold(name, dataset, validation, test)
        return user

    @classmethod
    def stream(cls, name: str, draw: Draw, *, validation: HeldOut = None, test: HeldOut = None) -> Self:
        """Return a user who draws new examples for every batch.

        Args:
            name: as in `User`.
            draw: a function of (size, seed, step) that returns inputs and targets, always the same ones for the
                same three numbers; `seed` is already the user's own.
            validation: as in `User`.
            test: as in `User`.

        Example:
            >>> import numpy as np
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
        """Whether new examples are drawn for every batch."""
        return isinstance(self.examples, FromStream)

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        return f"User({self.name!r}, {'a stream' if self.is_stream else f'{len(self)} examples'})"

    def batch(self, size: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return a batch that depends only on (seed, user, step); all examples when `size` exceeds their number.

        One example is drawn from each of `size` equal slices of the examples: every example has the same
        chance, batches of different steps are independent, and none is drawn twice when `size` divides them.
        """
        if isinstance(self.examples, FromStream):
            return self.examples.fresh(size, random_key(seed, self.name), step, f"user {self.name!r}")
        size = min(size, len(self))
        return self.take(draw([random_key(seed, self.name)], [len(self)], size, [step])[0, 0], seed=seed, step=step)

    def take(self, indices: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return the examples at these indices; random transforms draw from (seed, user, step)."""
        if isinstance(self.examples, InMemory):
            return self.examples.take(indices)
        with seeded(seed, self.name, step):
            return self.examples.take(indices)

    def to(self, device: torch.device) -> Self:
        """Return the same user with its training examples on another device."""
        user = copy.copy(self)
        user.examples = self.examples.to(device)
        return user

    def fingerprint(self) -> str:
        """Return a digest of the training examples, by which a resumed run recognises its data.

        Examples that are read from a `Dataset` are only counted.
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
        self.examples = as_examples(examples, f"user {name!r}")
        self.validation = None if validation is None else as_examples(validation, f"validation set of {name!r}")
        self.test = None if test is None else as_examples(test, f"test set of {name!r}")
