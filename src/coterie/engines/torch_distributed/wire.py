"""What travels between user 0 and its peers under torch.distributed, the same at both ends.

User 0 broadcasts a `Request`. Each peer answers with its gradient and four notes: whether it can be used, the
relative error of its compression, and the seconds spent computing and waiting. A sum has four places for every
peer, of which each fills its own, so that one reduce brings the sum and all the notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coterie.engines.torch_distributed.request import Ask, Request, laid_out
from coterie.errors import KnobError
from coterie.gradients.gradients import is_finite
from coterie.gradients.parameters import Parameters

Compress: TypeAlias = Literal["bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOTES = 4


@dataclass(frozen=True)
class Notes:
    """What a peer says of its answer."""

    answered: bool
    rounding: float
    computing: float
    waiting: float

    @classmethod
    def of(cls, numbers: Tensor) -> Notes:
        """Read the notes from four numbers."""
        answered, *rest = numbers.tolist()
        return cls(answered == 1, *rest)


class Wire:
    """The messages of one run, and the tensors they are made in.

    Args:
        model: whose point and gradients travel.
        n_peers: how many peers there are.
        compress: what the point and the gradients are rounded to on the way; None leaves them as they are.
        moves_buffers: whether the model's buffers change from step to step, and so must travel too.
        backend: torch.distributed's, which says where tensors must be.
    """

    def __init__(
        self, model: nn.Module, n_peers: int, compress: Compress | None, moves_buffers: bool, backend: str
    ) -> None:
        if compress is not None and compress not in DTYPES:
            raise KnobError(f'`compress` must be "bf16", "fp16" or None, got {compress!r}')
        parameters = Parameters(model)
        self.model, self.n_peers, self.size, self.dtype = model, n_peers, parameters.size, parameters.dtype
        self.sent_as = self.dtype if compress is None else DTYPES[compress]
        self.device = torch.device("cpu") if backend == "gloo" else parameters.device
        point = torch.empty(self.size, dtype=self.sent_as)
        self.frame = Request(n_peers, point, dict(model.named_buffers()) if moves_buffers else {}, self.device)
        self._answers: dict[Ask, Tensor] = {}

    def send_frame(self) -> dist.Work:
        """Begin to send user 0's message to everybody, or to receive it."""
        return _begun(dist.broadcast(self.frame.bytes, 0, async_op=True))

    def collect(self, ask: Ask, answer: Tensor | None = None) -> tuple[dist.Work, Tensor]:
        """Begin to collect the answers: their sum, or a row for every rank, with user 0's empty.

        Args:
            ask: what for.
            answer: this peer's; None for user 0.
        """
        if ask is Ask.SUM:
            total = self.empty_answer(ask) if answer is None else answer
            return _begun(dist.reduce(total, 0, async_op=True)), total
        if answer is not None:
            return _begun(dist.gather(answer, None, 0, async_op=True)), answer
        own = self.empty_answer(ask)
        rows = own.new_empty(self.n_peers + 1, len(own))
        return _begun(dist.gather(own, list(rows.unbind()), 0, async_op=True)), rows

    def empty_answer(self, ask: Ask) -> Tensor:
        """Return an answer of zeros: a gradient that cannot be used."""
        places = NOTES * (self.n_peers if ask is Ask.SUM else 1)
        return torch.zeros(self.size + places, dtype=self.sent_as, device=self.device)

    def answer(
        self, ask: Ask, position: int, gradient: Tensor | None, weight: float, seconds: tuple[float, float]
    ) -> Tensor:
        """Return a peer's answer, in a tensor that the next answer overwrites.

        Args:
            ask: what was asked.
            position: the peer's place among the peers.
            gradient: its gradient; None where it was not asked.
            weight: its weight, by which it is multiplied where the sum was asked for.
            seconds: of computing and waiting.
        """
        if ask not in self._answers:
            self._answers[ask] = self.empty_answer(ask)
        answer = self._answers[ask]
        sent, notes = answer[: self.size], answer[self.size :].zero_()
        answered = rounding = 0.0
        if gradient is not None:
            rounding = self._put(gradient, weight if ask is Ask.SUM else 1.0, sent)
            answered = float(is_finite(sent))
        if not answered:
            sent.zero_()
        start = NOTES * (position if ask is Ask.SUM else 0)
        notes[start : start + NOTES] = torch.tensor([answered, rounding * answered, *seconds])
        return answer

    def notes(self, ask: Ask, answers: Tensor) -> list[Notes]:
        """Return all peers' notes from what was collected."""
        found = answers[self.size :].view(-1, NOTES) if ask is Ask.SUM else answers[1:, self.size :]
        return [Notes.of(numbers) for numbers in found]

    def _put(self, gradient: Tensor, weight: float, sent: Tensor) -> float:
        """Write a weighted gradient into a message, and return the relative error of that."""
        if (gradient.dtype, gradient.device) == (sent.dtype, sent.device):
            torch.mul(gradient, weight, out=sent)
            return 0.0
        exact = gradient * weight
        return relative_error(exact, sent.copy_(exact))

    def share_what_stays(self) -> None:
        """Give the peers user 0's frozen parameters and buffers, once, so that all have the same model."""
        still = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        still += list(self.model.buffers())
        room, views = laid_out(still, self.device)
        if not still:
            return
        for view, tensor in zip(views, still, strict=True):
            view.copy_(tensor)
        dist.broadcast(room, 0)
        for view, tensor in zip(views, still, strict=True):
            tensor.copy_(view)


def relative_error(exact: Tensor, sent: Tensor) -> float:
    """Return ‖sent − exact‖ / ‖exact‖, without looking where nothing was rounded.

    Example:
        >>> round(relative_error(torch.tensor([1.0, 1.01]), torch.tensor([1.0, 1.01]).bfloat16()), 5)
        0.00154
    """
    if sent.dtype == exact.dtype:
        return 0.0
    return float((sent.to(exact) - exact).norm() / exact.norm().clamp(min=torch.finfo(exact.dtype).tiny))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise KnobError("this process is not part of torch.distributed's group")
    return work
