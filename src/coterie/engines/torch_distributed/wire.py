"""What travels between user 0 and its peers under torch.distributed, the same at both ends.

User 0 broadcasts a `PackedRequest` of P points. Each peer answers with a gradient for each and P +
3 notes: the outcome at each point, the relative error of its compression, and the seconds spent
computing and waiting. Sums have places for every peer's notes, and each peer fills its own, so that
one reduce brings the sums and all the notes. Where sketches are asked for, they are gathered after
that. Masked parts of sums are whole numbers; the notes beside them are the bits of floating-point
ones.
"""

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coterie.engines.engine import Question
from coterie.engines.requests import Reply
from coterie.engines.rounding import HALVES, Compress, Rounding, relative_error
from coterie.engines.torch_distributed.request import Ask, PackedRequest, laid_out
from coterie.engines.torch_distributed.seal import TAG_BYTES, Seal
from coterie.errors import KnobError, PeerLost
from coterie.gradients.gradients import is_finite
from coterie.gradients.parameters import Parameters
from coterie.privacy.masks import N_CHECKS, Words

N_OTHER_NOTES = 3
ADDED = (Ask.SUM, Ask.PART)
"""What is added up on the way."""

_UNSEALED = "a message has no tag of this cluster's secret: it is not user 0's"


class Outcome(IntEnum):
    """What became of a request at a point.

    No gradient that can be used, a gradient, or a refusal.
    """

    NOTHING = 0
    GRADIENT = 1
    REFUSED = 2


@dataclass(frozen=True)
class Notes:
    """What a peer says of its answer."""

    outcomes: tuple[Outcome, ...]  # at each point
    rounding: float
    computing: float
    waiting: float


class Wire:
    """The messages of one run, and the tensors they are made in.

    Where `moves_buffers`, the model's buffers change from step to step, and so must travel too. The
    backend says on which device the tensors must be. With a seal, what user 0 sends is tagged.
    """

    def __init__(
        self,
        model: nn.Module,
        n_peers: int,
        compress: Compress | None,
        moves_buffers: bool,
        backend: str,
        *,
        seal: Seal | None = None,
    ) -> None:
        if compress is not None and compress not in HALVES:
            raise KnobError(f'`compress` must be "bf16", "fp16" or None, got {compress!r}')
        parameters = Parameters(model)
        self.model, self.n_peers, self.size, self.dtype = (
            model,
            n_peers,
            parameters.size,
            parameters.dtype,
        )
        self.sent_as = self.dtype if compress is None else HALVES[compress]
        self.device = torch.device("cpu") if backend == "gloo" else parameters.device
        self.moving = dict(model.named_buffers()) if moves_buffers else {}
        self.seal, self.tag_bytes = seal, 0 if seal is None else TAG_BYTES
        self.take_points(1)

    def take_points(self, n: int, *, added: bool = False) -> None:
        """Let messages have so many points from now on, and what is added to steps from them."""
        self.n_points, self.added, point = n, added, torch.empty(self.size, dtype=self.sent_as)
        self.request = PackedRequest(
            self.n_peers, n, point, self.moving, self.device, added=added, tag=self.tag_bytes
        )
        self._answers: dict[Ask, Tensor] = {}
        self._roundings: dict[object, Rounding] = {}

    def send_request(self) -> dist.Work:
        """Begin to send user 0's message to everybody."""
        if self.seal is not None:
            self.request.tag.copy_(self.seal.tag(self.request.body))
        return _begun(dist.broadcast(self.request.bytes, 0, async_op=True))

    def receive_request(self) -> None:
        """Wait for user 0's message; `PeerLost` where it is not user 0's."""
        _begun(dist.broadcast(self.request.bytes, 0, async_op=True)).wait()
        if self.seal is not None and not self.seal.fits(self.request.body, self.request.tag):
            raise PeerLost(_UNSEALED)

    def collect(self, ask: Ask, answer: Tensor | None = None) -> tuple[dist.Work, Tensor]:
        """Begin to collect the answers: their sums, or a row for every rank, with user 0's empty.

        `answer` is this peer's; None for user 0.
        """
        if ask in ADDED:
            total = self.empty_answer(ask) if answer is None else answer
            return _begun(dist.reduce(total, 0, async_op=True)), total
        return self._gathered(
            self.empty_answer(ask) if answer is None else answer, to_me=answer is None
        )

    def collect_sketches(
        self, n: int, k: int, sketches: Tensor | None = None
    ) -> tuple[dist.Work, Tensor]:
        """Begin to collect every peer's sketches (n, k).

        `sketches` are this peer's, and None for user 0.
        """
        mine = torch.zeros(n * k, dtype=self.sent_as, device=self.device)
        if sketches is not None:
            mine.copy_(sketches.flatten())
        return self._gathered(mine, to_me=sketches is None)

    def _gathered(self, mine: Tensor, *, to_me: bool) -> tuple[dist.Work, Tensor]:
        if not to_me:
            return _begun(dist.gather(mine, None, 0, async_op=True)), mine
        rows = mine.new_empty(self.n_peers + 1, len(mine))
        return _begun(dist.gather(mine, list(rows.unbind()), 0, async_op=True)), rows

    @property
    def n_numbers(self) -> int:
        """How many numbers the gradients at all points are."""
        return self.n_points * self.size

    def empty_answer(self, ask: Ask) -> Tensor:
        """Return an answer of zeros: gradients that cannot be used."""
        places = (self.n_points + N_OTHER_NOTES) * (self.n_peers if ask in ADDED else 1)
        if ask is Ask.PART:
            return torch.zeros(
                self.n_numbers + N_CHECKS + places, dtype=torch.int32, device=self.device
            )
        return torch.zeros(self.n_numbers + places, dtype=self.sent_as, device=self.device)

    def answer(
        self,
        ask: Ask,
        position: int,
        given: Tensor,
        reply: Reply | None,
        seconds: tuple[float, float],
    ) -> Tensor:
        """Return the answer of the peer at this position, in a tensor that the next answer overwrites.

        `reply` has a row for each point that is `given`; it is None where none is. `seconds` are of
        computing and waiting. Where sums were asked for, gradients are multiplied by weights.
        """
        if ask not in self._answers:
            self._answers[ask] = self.empty_answer(ask)
        answer, weights = self._answers[ask], self.request.weights[:, position].tolist()
        sent, notes = (
            answer[: self.n_numbers].view(self.n_points, -1),
            answer[self.n_numbers :].zero_(),
        )
        gradients = iter(() if reply is None or reply.gradients is None else reply.gradients)
        outcomes, rounding = [], 0.0
        for place, (row, weight, is_given) in enumerate(
            zip(sent, weights, given.tolist(), strict=True)
        ):
            gradient = next(gradients, None) if is_given else None
            outcome = Outcome.NOTHING if math.isnan(weight) else Outcome.REFUSED
            if gradient is not None:
                error = self._put(gradient, weight if ask is Ask.SUM else 1.0, row, (ask, place))
                outcome = Outcome(int(is_finite(row)))
                rounding = max(rounding, error) if outcome is Outcome.GRADIENT else rounding
            if outcome is not Outcome.GRADIENT:
                row.zero_()
            outcomes.append(float(outcome))
        mine = [*outcomes, rounding, *seconds]
        start = len(mine) * (position if ask is Ask.SUM else 0)
        notes[start : start + len(mine)] = torch.tensor(mine)
        return answer

    def part(
        self, position: int, words: Words | None, outcome: Outcome, seconds: tuple[float, float]
    ) -> Tensor:
        """Return the masked answer of the peer at this position, zeros where it has no part.

        At one point.
        """
        answer = self.empty_answer(Ask.PART)
        if words is not None:
            answer[: len(words)] = torch.from_numpy(words.view(np.int32))
        notes = torch.tensor([float(outcome), 0.0, *seconds], dtype=torch.float32)
        answer[self.n_numbers + N_CHECKS :].view(-1, len(notes))[position] = notes.view(torch.int32)
        return answer

    def notes(self, ask: Ask, answers: Tensor) -> list[Notes]:
        """Return all peers' notes from what was collected."""
        n, each = self.n_points, self.n_points + N_OTHER_NOTES
        if ask is Ask.PART:
            notes = answers[self.n_numbers + N_CHECKS :].view(torch.float32).view(-1, each)
        else:
            notes = (
                answers[self.n_numbers :].view(-1, each)
                if ask is Ask.SUM
                else answers[1:, self.n_numbers :]
            )
        known = {float(outcome): outcome for outcome in Outcome}
        return [
            Notes(tuple(known.get(o, Outcome.NOTHING) for o in note[:n]), *note[n:])
            for note in notes.tolist()
        ]

    def rounded(self, question: Question) -> Question:
        """Return a question with its points as they are sent, with what the last message of this form lost."""
        return replace(question, points=self._rounded(question.points, Ask.POINTS))

    def _rounded(self, exact: Tensor, which: object) -> Tensor:
        """Return what is sent of a vector in the place of one message.

        The same where nothing is rounded.
        """
        if self.sent_as == self.dtype:
            return exact
        return self._roundings.setdefault(which, Rounding(self.sent_as))(exact)

    def _put(self, gradient: Tensor, weight: float, sent: Tensor, which: object) -> float:
        """Write a weighted gradient into a message, and return the relative error of that."""
        if (gradient.dtype, gradient.device) == (sent.dtype, sent.device):
            torch.mul(gradient, weight, out=sent)
            return 0.0
        exact = gradient * weight
        return relative_error(exact, sent.copy_(self._rounded(exact, which)))

    def share_constants(self, *, mine: bool) -> None:
        """Give the peers user 0's frozen parameters and buffers, once, so that all have the same model.

        `mine`: this is user 0.
        """
        frozen = (p.detach() for p in self.model.parameters() if not p.requires_grad)
        constants = [*frozen, *self.model.buffers()]
        if not constants:
            return
        memory, (*views, tag) = laid_out(
            [*constants, torch.zeros(self.tag_bytes, dtype=torch.uint8)], self.device
        )
        for view, tensor in zip(views, constants, strict=True):
            view.copy_(tensor)
        body = memory[: len(memory) - self.tag_bytes]
        if self.seal is not None and mine:
            tag.copy_(self.seal.tag(body))
        dist.broadcast(memory, 0)
        if self.seal is not None and not mine and not self.seal.fits(body, tag):
            raise PeerLost(_UNSEALED)
        for view, tensor in zip(views, constants, strict=True):
            tensor.copy_(view)


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise KnobError("this process is not part of torch.distributed's group")
    return work
