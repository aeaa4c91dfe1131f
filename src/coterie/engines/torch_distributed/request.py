"""User 0's message to its peers as one run of bytes: what is asked, the step, the weights, the points."""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from coterie.engines.engine import Question
from coterie.errors import PeerLost

ALIGNMENT = 64
"""Every part begins at a multiple of so many bytes, as torch's own tensors do: a pass then takes the same way."""


class Ask(IntEnum):
    """What user 0 asks for."""

    END = 0
    NOTHING = 1
    SUM = 2
    ROWS = 3
    POINTS = 4  # nothing yet: the next messages have as many points as stands in the place of the step


class PackedRequest:
    """Tensors of several types that lie one after the other in one tensor of bytes, sent as one message.

    There are points like x, at each a weight for each of `n_peers`, those buffers of the model that move, and a tag
    of so many bytes.
    """

    def __init__(
        self,
        n_peers: int,
        n_points: int,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        device: torch.device,
        *,
        tag: int = 0,
    ) -> None:
        head, weights = torch.zeros(3, dtype=torch.int64), torch.zeros(n_points, n_peers, dtype=torch.float64)
        stacked = [tensor.expand(n_points, *tensor.shape) for tensor in (x, *buffers.values())]
        views = laid_out([head, weights, *stacked, torch.zeros(tag, dtype=torch.uint8)], device)
        self.bytes, (self._head, self.weights, self.points, *moved, self.tag) = views
        self.body = self.bytes[: len(self.bytes) - tag]
        self.buffers = dict(zip(buffers, moved, strict=True))

    def fill(self, ask: Ask, question: Question) -> None:
        """Write a message."""
        self.ask(ask, question.step, question.sketched)
        self.weights.copy_(question.weights)
        self.points.copy_(question.points)
        for name, buffer in self.buffers.items():
            buffer.copy_(question.buffers[name])

    def ask(self, ask: Ask, step: int = 0, sketched: int = 0) -> None:
        """Write what is asked, and leave the rest as it was."""
        self._head.copy_(torch.tensor([ask, step, sketched]))

    def read(self) -> tuple[Ask, int, int]:
        """Return what is asked, the step, and how many points are sketched."""
        ask, step, sketched = self._head.tolist()
        if ask not in list(Ask) or not 0 <= sketched <= len(self.points):
            raise PeerLost(f"a message is not one of user 0: it asks for {ask}, with {sketched} sketches")
        return Ask(ask), step, sketched


def laid_out(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return bytes that hold tensors like these, and a view of them for each."""
    places, end = [], 0
    for part in parts:
        start = ALIGNMENT * math.ceil(end / ALIGNMENT) if part.numel() else end
        places.append(slice(start, end := start + part.nbytes))
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return memory, [memory[at].view(p.dtype).view(p.shape) for at, p in zip(places, parts, strict=True)]
