"""The models of the benchmark: linear, with a hidden layer, convolutional, recurrent."""

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

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
