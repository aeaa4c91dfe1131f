"""What travels between user 0 and its peers under torch.distributed, the same at both ends.

User 0 broadcasts a `PackedRequest`. Each peer answers with its gradient and four notes: the outcome, the relative
error of its compression, and the seconds spent computing and waiting. A sum has four places for every peer, and
each peer fills its own, so that one reduce brings the sum and all the notes.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coterie.engines.peer import Reply
from coterie.engines.torch_distributed.request import Ask, PackedRequest, laid_out
from coterie.errors import KnobError
from coterie.gradients.gradients import is_finite
from coterie.gradients.parameters import Parameters

Compress: TypeAlias = Literal["bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
N_NOTES = 4


class Outcome(IntEnum):
    """What became of a request: no gradient that can be used, a gradient, or a refusal."""

    NOTHING = 0
    GRADIENT = 1
    REFUSED = 2


@dataclass(frozen=True)
class Notes:
    """What a peer says of its answer."""

    outcome: Outcome
    rounding: float
    computing: float
    waiting: float


class Wire:
    """The messages of one run, and the tensors they are made in.

    Where `moves_buffers`, the model's buffers change from step to step, and so must travel too. The backend says
    on which device the tensors must be.
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
        buffers = dict(model.named_buffers()) if moves_buffers else {}
        self.request = PackedRequest(n_peers, point, buffers, self.device)
        self._answers: dict[Ask, Tensor] = {}

    def send_request(self) -> dist.Work:
        """Begin to send user 0's message to everybody, or to receive it."""
        return _begun(dist.broadcast(self.request.bytes, 0, async_op=True))

    def collect(self, ask: Ask, answer: Tensor | None = None) -> tuple[dist.Work, Tensor]:
        """Begin to collect the answers: their sum, or a row for every rank, with user 0's empty.

        `answer` is this peer's; None for user 0.
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
        places = N_NOTES * (self.n_peers if ask is Ask.SUM else 1)
        return torch.zeros(self.size + places, dtype=self.sent_as, device=self.device)

    def answer(
        self, ask: Ask, position: int, reply: Reply | None, weight: float, seconds: tuple[float, float]
    ) -> Tensor:
        """Return the answer of the peer at this position, in a tensor that the next answer overwrites.

        `reply` is None where it was not asked. `seconds` are of computing and waiting. Where the sum was asked for,
        the gradient is multiplied by the weight.
        """
        if ask not in self._answers:
            self._answers[ask] = self.empty_answer(ask)
        answer = self._answers[ask]
        sent, notes = answer[: self.size], answer[self.size :].zero_()
        outcome, rounding = Outcome.NOTHING if reply is None else Outcome.REFUSED, 0.0
        if reply is not None and reply.gradient is not None:
            rounding = self._put(reply.gradient, weight if ask is Ask.SUM else 1.0, sent)
            outcome = Outcome(int(is_finite(sent)))
        if outcome is not Outcome.GRADIENT:
            sent.zero_()
            rounding = 0.0
        start = N_NOTES * (position if ask is Ask.SUM else 0)
        notes[start : start + N_NOTES] = torch.tensor([float(outcome), rounding, *seconds])
        return answer

    def notes(self, ask: Ask, answers: Tensor) -> list[Notes]:
        """Return all peers' notes from what was collected."""
        notes = answers[self.size :].view(-1, N_NOTES) if ask is Ask.SUM else answers[1:, self.size :]
        return [Notes(Outcome(int(outcome)), *rest) for outcome, *rest in notes.tolist()]

    def _put(self, gradient: Tensor, weight: float, sent: Tensor) -> float:
        """Write a weighted gradient into a message, and return the relative error of that."""
        if (gradient.dtype, gradient.device) == (sent.dtype, sent.device):
            torch.mul(gradient, weight, out=sent)
            return 0.0
        exact = gradient * weight
        return relative_error(exact, sent.copy_(exact))

    def share_constants(self) -> None:
        """Give the peers user 0's frozen parameters and buffers, once, so that all have the same model."""
        frozen = (p.detach() for p in self.model.parameters() if not p.requires_grad)
        constants = [*frozen, *self.model.buffers()]
        if not constants:
            return
        memory, views = laid_out(constants, self.device)
        for view, tensor in zip(views, constants, strict=True):
            view.copy_(tensor)
        dist.broadcast(memory, 0)
        for view, tensor in zip(views, constants, strict=True):
            tensor.copy_(view)


def relative_error(exact: Tensor, sent: Tensor) -> float:
    """Return ‖sent − exact‖ / ‖exact‖; 0 without a comparison where nothing was rounded."""
    if sent.dtype == exact.dtype:
        return 0.0
    return float((sent.to(exact) - exact).norm() / exact.norm().clamp(min=torch.finfo(exact.dtype).tiny))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise KnobError("this process is not part of torch.distributed's group")
    return work
