"""User 0's message to its peers as one run of bytes: what is asked, the step, the weights, the point."""

from __future__ import annotations

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

    Args:
        n_peers: how many weights there are.
        x: a vector like the point that is sent.
        buffers: those of the model that move, sent along.
        device: where the bytes are.

    Example:
        >>> sent, received = (PackedRequest(2, torch.zeros(3), {}, torch.device("cpu")) for _ in range(2))
        >>> sent.fill(Ask.SUM, 7, [0.25, 0.75], torch.ones(3), {})
        >>> received.bytes.copy_(sent.bytes).numel()
        140
        >>> received.read(), received.weights.tolist(), received.x
        ((<Ask.SUM: 2>, 7), [0.25, 0.75], tensor([1., 1., 1.]))
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
    """Return bytes that hold tensors like these, and a view of them for each.

    Example:
        >>> memory, views = laid_out([torch.zeros(2, 2), torch.zeros(3, dtype=torch.bool)], torch.device("cpu"))
        >>> len(memory), [tuple(view.shape) for view in views]
        (67, [(2, 2), (3,)])
    """
    starts, end = [], 0
    for part in parts:
        starts.append(ALIGNMENT * math.ceil(end / ALIGNMENT))
        end = starts[-1] + part.numel() * part.element_size()
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    views = [
        memory[start : start + part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        for start, part in zip(starts, parts, strict=True)
    ]
    return memory, views
