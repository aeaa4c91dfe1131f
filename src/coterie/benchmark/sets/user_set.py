"""The data sets by name: where each is read from, and what it is learned with."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from coterie.benchmark.tasks import Population
from coterie.errors import DataError
from coterie.registry import Registry
from coterie.tables.models import linear, mlp


def cnn(n_inputs: int, n_outputs: int, channels: int = 8) -> nn.Module:
    """Return a network with two convolutions, for square pictures of one channel."""
    side = math.isqrt(n_inputs) // 4
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * side * side, n_outputs),
    )


class Elman(nn.Module):
    """The plainest recurrent cell: h ← tanh(x + W h + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(x + self.linear(state))


class Recurrent(nn.Module):
    """A recurrent network over characters: at every place the logits of the next one.

    It steps through a cell, from input and state to the next state, that `torch.func` can map over
    users, as it cannot `nn.RNN` and `nn.GRU`.
    """

    def __init__(self, n_characters: int, cell: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_characters, width)
        self.cell = cell
        self.output = nn.Linear(width, n_characters)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits of shape (texts, characters, places)."""
        embedded = self.embedding(characters).unbind(1)
        state = torch.zeros_like(embedded[0])
        states = []
        for x in embedded:
            state = self.cell(x, state)
            states.append(state)
        logits: Tensor = self.output(torch.stack(states, dim=1))
        return logits.transpose(1, 2)


MakeModel: TypeAlias = Callable[[int, int], nn.Module]
"""What makes a model from the numbers of inputs and outputs."""

MODELS: Mapping[str, MakeModel] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "rnn": lambda n_inputs, n_outputs: Recurrent(n_outputs, Elman(32)),
    "gru": lambda n_inputs, n_outputs: Recurrent(n_outputs, nn.GRUCell(32, 32)),
}


Read: TypeAlias = Callable[[Path], Population]


@dataclass(frozen=True)
class UserSet:
    """A set of users' data.

    The loss is the cross-entropy or, without classes, the squared error.
    """

    name: str
    read: Read  # reads the examples from the set's folder
    # names in `MODELS`, or functions of inputs and outputs
    models: tuple[str | MakeModel, ...] = ("linear",)
    own_examples: int = 30  # how many examples user 0 has
    most_peers: int = 10  # how many peers it has, at most
    folder: str = ""  # its folder within the folder of all data; its name when empty
    files: tuple[str, ...] = ()  # what must be there
    source: str = "its owner"  # where to get it
    batch_size: int = 32  # how many examples each user draws for a gradient

    @property
    def __wrapped__(self) -> Read:
        """The reader, whose docstring describes the set."""
        return self.read

    @property
    def makers(self) -> dict[str, MakeModel]:
        """What makes each model, by name."""
        pairs = [(m, MODELS[m]) if isinstance(m, str) else (m.__name__, m) for m in self.models]
        return dict(pairs)

    def missing(self, data: Path | None) -> str | None:
        """Say what the set lacks in the folder of all data and where to get it, or None where all of it is there.

        Example:
            >>> UserSet("vowels", Population, files=("a.data",)).missing(Path("nowhere"))
            'vowels needs nowhere/vowels/a.data, which is not there: get it from its owner'
        """
        if self.files and data is None:
            return (
                f"{self.name} is read from a folder: name it with `--data`; it is had from"
                f" {self.source}"
            )
        for file in self.files:
            path = self.place(data) / file
            if not path.is_file():
                return f"{self.name} needs {path}, which is not there: get it from {self.source}"
        return None

    def place(self, data: Path | None) -> Path:
        """Return the set's folder."""
        return (data or Path()) / (self.folder or self.name)


SETS: Registry[UserSet] = Registry("set", "coterie.data_sets")


def register_set(name: str, **about: Any) -> Callable[[Read], Read]:
    """Make the reader of a set known.

    A decorator of a function from the set's folder to a `Population`.

    Args:
        name: what the set is called.
        about: the further arguments of `UserSet`.
    """

    def register(read: Read) -> Read:
        SETS.register(name, UserSet(name, read, **about))
        return read

    return register


@functools.lru_cache(maxsize=2)  # MNIST is large, and one set is done after the other
def load(user_set: UserSet, data: Path | None = None) -> Population:
    """Return the examples of a set, from the folder of all data, with a folder for each set.

    Digits needs none.

    Example:
        >>> from coterie.benchmark.sets import SETS
        >>> len(load(SETS["digits"])), load(SETS["digits"]).names[:2]
        (1797, ['writer 0', 'writer 1'])
    """
    missing = user_set.missing(data)
    if missing:
        raise DataError(missing)
    return user_set.read(user_set.place(data))
