"""User 0's message to its peers as one run of bytes: what is asked, the step, the weights, the point."""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every part begins at a multiple of so many bytes, as torch's own tensors do: a pass then takes the same way."""


class Ask(IntEnum):
    """What user 0 asks for."""

    END = 0
    NOTHING = 1
    SUM = 2
    ROWS = 3


class PackedRequest:
    """Tensors of several types that lie one after the other in one tensor of bytes, sent as one message.

    There is a weight for each of `n_peers`, a point like x, and those buffers of the model that move.
    """

    def __init__(self, n_peers: int, x: Tensor, buffers: Mapping[str, Tensor], device: torch.device) -> None:
        head, weights = torch.zeros(2, dtype=torch.int64), torch.zeros(n_peers, dtype=torch.float64)
        views = laid_out([head, weights, x, *buffers.values()], device)
        self.bytes, (self._head, self.weights, self.x, *moved) = views
        self.buffers = dict(zip(buffers, moved, strict=True))

    def fill(self, ask: Ask, step: int, weights: Sequence[float], x: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Write a message; NaN is the weight of a peer that is not asked."""
        self.ask(ask, step)
        self.weights.copy_(torch.tensor(weights, dtype=torch.float64))
        self.x.copy_(x)
        for name, buffer in self.buffers.items():
            buffer.copy_(buffers[name])

    def ask(self, ask: Ask, step: int = 0) -> None:
        """Write what is asked, and leave the rest as it was."""
        self._head.copy_(torch.tensor([ask, step]))

    def read(self) -> tuple[Ask, int]:
        """Return what is asked and the step."""
        ask, step = self._head.tolist()
        return Ask(ask), step


def laid_out(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return bytes that hold tensors like these, and a view of them for each."""
    places, end = [], 0
    for part in parts:
        start = ALIGNMENT * math.ceil(end / ALIGNMENT)
        places.append(slice(start, end := start + part.nbytes))
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return memory, [memory[at].view(p.dtype).view(p.shape) for at, p in zip(places, parts, strict=True)]
