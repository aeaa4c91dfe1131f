"""The models of the benchmark: linear, with a hidden layer, convolutional, recurrent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from coterie.models import linear, mlp


def cnn(n_inputs: int, n_outputs: int, channels: int = 8) -> nn.Module:
    """Return a network with two convolutions, for square pictures of one channel.

    Example:
        >>> cnn(64, 10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
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


class Recurrent(nn.Module):
    """A recurrent network over characters: at every place the logits of the next one.

    It steps through a cell, which `torch.func` can map over users; `nn.GRU` it cannot.

    Args:
        n_characters: how many characters there are.
        cell: `nn.RNNCell`, or `nn.GRUCell`, which takes nearly twice as long.
        width: of the embedding; the state has twice as much.

    Example:
        >>> Recurrent(5, nn.GRUCell)(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 5, 7])
    """

    def __init__(self, n_characters: int, cell: Callable[[int, int], nn.RNNCellBase], width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_characters, width)
        self.cell = cell(width, 2 * width)
        self.output = nn.Linear(2 * width, n_characters)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits of shape (texts, characters, places)."""
        embedded = self.embedding(characters)
        state = embedded.new_zeros(len(characters), self.cell.hidden_size)
        states = []
        for place in range(characters.shape[1]):
            state = self.cell(embedded[:, place], state)
            states.append(state)
        logits: Tensor = self.output(torch.stack(states, dim=1))
        return logits.transpose(1, 2)


MODELS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "rnn": lambda n_inputs, n_outputs: Recurrent(n_outputs, nn.RNNCell),
    "gru": lambda n_inputs, n_outputs: Recurrent(n_outputs, nn.GRUCell),
}
"""By name, a function of the numbers of inputs and outputs."""
