"""User 0's message to its peers as one run of bytes.

What is asked, the step, the weights, the points.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from coterie.engines.engine import LocalWork, Question
from coterie.errors import PeerLost

ALIGNMENT = 64
"""Every part begins at a multiple of so many bytes, as torch's own tensors do.

A pass then takes the same way.
"""


class Ask(IntEnum):
    """What user 0 asks for."""

    END = 0
    NOTHING = 1
    SUM = 2
    ROWS = 3
    # nothing yet: the next messages have as many points as stands in the place of the step, and
    # what
    POINTS = 4
    # is added to steps from them where one stands in the place of the sketches
    # a key for masked sums, in a note; which agreement it is for stands in the place of the step
    OFFER = 5
    JOIN = 6  # to join the sums of that agreement, which is in a note
    PART = 7  # the masked part of a sum


class PackedRequest:
    """Tensors of several types that lie one after the other in one tensor of bytes, sent as one message.

    There are points like x, at each a weight for each of `n_peers`, what is added to steps from it
    where `added`, those buffers of the model that move, and a tag of so many bytes.
    """

    def __init__(
        self,
        n_peers: int,
        n_points: int,
        x: Tensor,
        buffers: Mapping[str, Tensor],
        device: torch.device,
        *,
        added: bool = False,
        tag: int = 0,
    ) -> None:
        head, weights = (
            torch.zeros(7, dtype=torch.int64),
            torch.zeros(n_points, n_peers, dtype=torch.float64),
        )
        add = x.expand(n_points if added else 0, *x.shape)
        stacked = [tensor.expand(n_points, *tensor.shape) for tensor in (x, *buffers.values())]
        views = laid_out(
            [head, weights, add, *stacked, torch.zeros(tag, dtype=torch.uint8)], device
        )
        self.bytes, (self._head, self.weights, self._add, self.points, *moved, self.tag) = views
        # step size and decay of steps that peers take
        self._rates = self._head[5:].view(torch.float64)
        self.body = self.bytes[: len(self.bytes) - tag]
        self.buffers = dict(zip(buffers, moved, strict=True))

    def fill(self, ask: Ask, question: Question) -> None:
        """Write a message."""
        work = question.work
        self.ask(
            ask,
            question.step,
            question.sketched,
            0 if work is None else work.count,
            question.batch_size or 0,
        )
        if work is not None:
            self._rates.copy_(torch.tensor([work.lr, work.decay], dtype=torch.float64))
            if work.add is not None:
                self._add.copy_(work.add)
        self.weights.copy_(question.weights)
        self.points.copy_(question.points)
        for name, buffer in self.buffers.items():
            buffer.copy_(question.buffers[name])

    def ask(self, ask: Ask, *numbers: int) -> None:
        """Write what is asked.

        The step, how many sketches, local steps, the size of a batch; leave all else.
        """
        self._head[:5].copy_(torch.tensor([ask, *numbers, *[0] * (4 - len(numbers))]))

    def read(self) -> tuple[Ask, int, int]:
        """Return what is asked, the step, and how many points are sketched."""
        ask, step, sketched, *_ = self._head.tolist()
        if ask not in list(Ask) or not 0 <= sketched <= len(self.points):
            raise PeerLost(
                f"a message is not one of user 0: it asks for {ask}, with {sketched} sketches"
            )
        return Ask(ask), step, sketched

    @property
    def batch_size(self) -> int | None:
        """The size of a batch, where it is another than the run's."""
        return int(self._head[4]) or None

    def work(self, like: Tensor) -> LocalWork | None:
        """Return the steps that peers are to take, unchecked.

        None where a gradient is asked for.
        """
        count, (lr, decay) = int(self._head[3]), self._rates.tolist()
        add = self._add.to(like) if len(self._add) else None
        return LocalWork(count, lr, add, decay) if count else None


def laid_out(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return bytes that hold tensors like these, and a view of them for each."""
    places, end = [], 0
    for part in parts:
        start = ALIGNMENT * math.ceil(end / ALIGNMENT) if part.numel() else end
        places.append(slice(start, end := start + part.nbytes))
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return memory, [
        memory[at].view(p.dtype).view(p.shape) for at, p in zip(places, parts, strict=True)
    ]
