"""Users: a name, examples, and batches that depend only on (seed, user, step)."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from coterie.arguments import instance, is_text, listed, shown
from coterie.errors import DataError, attributing_errors_to
from coterie.users.examples import (
    Array,
    Collate,
    Draw,
    Examples,
    FromStream,
    InMemory,
    as_examples,
    from_columns,
)
from coterie.users.sampling import draw, random_key, seeded
from coterie.users.trees import Tree, form, leaves

Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""The mean loss of a batch from (output, target), as in `torch.nn.functional`."""

HeldOut: TypeAlias = tuple[Array, Array | None] | Dataset[Any] | None

EXAMPLES_COMPARED = 64
"""So many examples of a data set are in its fingerprint."""


def check_names(names: Sequence[str]) -> None:
    """Refuse users of the same name."""
    if len(set(names)) < len(names):
        shown = ", ".join(names)
        raise DataError(
            f"users must have different names: weights and batches go by them; got {shown}"
        )


class User:
    """One user: a name and its examples; for user 0 also those held out for validation and test.

    Inputs and targets are tensors, or any nesting of dicts, tuples and lists of tensors with one
    row an example in each. The model is called as the nesting says: with a dict as
    `model(**inputs)`, with a tuple as `model(*inputs)`, else as `model(inputs)`. The loss gets
    targets nested as they are here.

    Args:
        name: the name in weights, records and tables; batches are drawn from it, the seed and the
            step.
        inputs: the training inputs, one example a row: a tensor, an array, nested lists, dicts and
            tuples of them.
        targets: the training targets, as many as inputs; None where the model computes its loss
            from its inputs, see `coterie.model_loss`.
        validation: (inputs, targets) held out to choose the best model, or a `Dataset`.
        test: (inputs, targets) held out to report on, used once, or a `Dataset`.
        collate: for examples of unequal size: makes (inputs, targets) of a list of (input, target),
            as a `DataLoader`'s `collate_fn` does. `inputs` and `targets` are then sequences of one
            entry an example.

    Example:
        >>> user = User("ward 3", [[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> user
        User('ward 3', 4 examples)
        >>> inputs, targets = user.batch(2, seed=0, step=7)
        >>> torch.equal(inputs, user.batch(2, seed=0, step=7)[0])
        True
        >>> texts = {"ids": torch.zeros(4, 9, dtype=torch.long), "mask": torch.ones(4, 9)}
        >>> {name: part.shape for name, part in User("b", texts, [0, 0, 1, 1]).batch(2, seed=0, step=0)[0].items()}
        {'ids': torch.Size([2, 9]), 'mask': torch.Size([2, 9])}
    """

    def __init__(
        self,
        name: str,
        inputs: Array,
        targets: Array | None = None,
        *,
        validation: HeldOut = None,
        test: HeldOut = None,
        collate: Collate | None = None,
    ) -> None:
        self._hold(name, (inputs, targets), validation, test, partial(as_examples, collate=collate))

    @classmethod
    def from_dataset(
        cls,
        name: str,
        dataset: Dataset[Any],
        *,
        target: str | None = None,
        validation: HeldOut = None,
        test: HeldOut = None,
        collate: Collate | None = None,
    ) -> Self:
        """Return a user whose examples are the items of a map-style `Dataset`.

        An item is an (input, target) pair, a longer tuple, whose last is the target, a dict, or an
        input without a target. A `TensorDataset` is held in memory; any other is read batch by
        batch, random transforms included, which then draw from (seed, user, step) too.

        Args:
            name: as in `User`.
            dataset: the data set; it has a length and is read by index.
            target: the key of the target where items are dicts; without it the whole dict goes into
                the model.
            validation: as in `User`.
            test: as in `User`.
            collate: makes a batch of a list of items: (inputs, targets), or a dict that holds both.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
            >>> User.from_dataset("a", data)
            User('a', 4 examples)
        """
        user = cls.__new__(cls)
        user._hold(
            name, dataset, validation, test, partial(as_examples, collate=collate, target=target)
        )
        return user

    @classmethod
    def from_hugging_face(
        cls,
        name: str,
        dataset: Any,
        inputs: str | Sequence[str],
        target: str | None = None,
        *,
        validation: Any = None,
        test: Any = None,
        collate: Collate | None = None,
    ) -> Self:
        """Return a user whose examples are the rows of a `datasets.Dataset`, held in memory as tensors.

        Args:
            name: as in `User`.
            dataset: the data set; also `validation` and `test`, of the same columns.
            inputs: the column that goes into the model, or several, which go in by their names,
                `model(**inputs)`.
            target: the column of the target; None where the model computes its loss from its
                inputs.
            validation: rows held out to choose the best model.
            test: rows held out to report on.
            collate: for rows of unequal size: makes a batch of a list of rows, such as
                `transformers.DataCollatorWithPadding`. Rows are then read batch by batch.

        Example:
            >>> try:
            ...     from datasets import Dataset
            ... except ImportError:
            ...     pass
            ... else:
            ...     rows = Dataset.from_dict({"ids": [[1, 2], [3, 4]], "label": [0, 1]})
            ...     user = User.from_hugging_face("a", rows, ["ids"], "label")
            ...     assert user.batch(2, seed=0, step=0)[0]["ids"].tolist() == [[1, 2], [3, 4]]
        """
        user = cls.__new__(cls)
        columns = partial(from_columns, inputs=inputs, target=target, collate=collate)
        user._hold(name, dataset, validation, test, columns)
        return user

    @classmethod
    def stream(
        cls, name: str, draw: Draw, *, validation: HeldOut = None, test: HeldOut = None
    ) -> Self:
        """Return a user who draws new examples for every batch.

        Args:
            name: as in `User`.
            draw: a function of (size, seed, step) that returns inputs and targets, always the same
                ones for the same three numbers; `seed` is already the user's own.
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
        user._hold(name, draw, validation, test, as_examples)
        return user

    @property
    def is_stream(self) -> bool:
        """Whether new examples are drawn for every batch."""
        return isinstance(self.examples, FromStream)

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        return f"User({self.name!r}, {'a stream' if self.is_stream else f'{len(self)} examples'})"

    def batch(self, size: int, *, seed: int, step: int) -> tuple[Tree, Tree]:
        """Return a batch that depends only on (seed, user, step).

        All examples when `size` exceeds their number.

        One example is drawn from each of `size` equal slices of the examples: every example has the
        same chance, batches of different steps are independent, and none is drawn twice when `size`
        divides them.
        """
        if isinstance(self.examples, FromStream):
            return self.examples.fresh(
                size, random_key(seed, self.name), step, f"user {self.name!r}"
            )
        size = min(size, len(self))
        return self.take(
            draw([random_key(seed, self.name)], [len(self)], size, [step])[0, 0],
            seed=seed,
            step=step,
        )

    def take(self, indices: Tensor, *, seed: int, step: int) -> tuple[Tree, Tree]:
        """Return the examples at these indices; random transforms draw from (seed, user, step)."""
        if isinstance(self.examples, InMemory):
            return self.examples.take(indices)
        with (
            seeded(seed, self.name, step),
            attributing_errors_to(f"the data set of user {self.name!r}"),
        ):
            return self.examples.take(indices)

    def to(self, device: torch.device) -> Self:
        """Return the same user with its training examples on another device."""
        user = copy.copy(self)
        user.examples = self.examples.to(device)
        return user

    def fingerprint(self) -> str:
        """Return a digest of the training examples, by which a resumed run recognises its data.

        Of examples that are read from a data set it has some, spread over all, and their number. Of
        a stream, which may never give the same again, it has nothing.
        """
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=8)
        held: tuple[Tree, ...] = ()
        if isinstance(self.examples, InMemory):
            held = self.examples.inputs, self.examples.targets
        elif not self.is_stream:
            spread = torch.linspace(
                0, len(self) - 1, min(len(self), EXAMPLES_COMPARED), dtype=torch.float64
            )
            with (
                seeded(0, "fingerprint", 0),
                attributing_errors_to(f"the data set of user {self.name!r}"),
            ):
                held = self.examples.take(spread.long())
        for tree in held:
            if not isinstance(tree, Tensor):
                digest.update(str(form(tree)).encode())
            for leaf in leaves(tree):
                digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
                digest.update(leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _hold(
        self, name: str, examples: Any, validation: Any, test: Any, made: Callable[..., Examples]
    ) -> None:
        if not isinstance(name, str) or not name or not is_text(name):
            wanted = "a non-empty string without control characters"
            raise DataError(f"a user's name must be {wanted}, got {shown(name)}")
        self.name = name
        self.examples = made(examples, f"user {name!r}")
        self.validation = (
            None if validation is None else made(validation, f"validation set of {name!r}")
        )
        self.test = None if test is None else made(test, f"test set of {name!r}")


USER = instance(User, "a `coterie.User`", error=DataError)
"""What user 0 must be."""
PEERS = listed(USER, "a list of `coterie.User`s", {User: "for one peer write `peers=[peer]`"})
"""What its peers must be."""
