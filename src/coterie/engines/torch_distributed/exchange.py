"""An exchange under torch.distributed.

User 0's question on its way to the peers, and their answers back.
"""

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch import Tensor

from coterie.engines.engine import Question
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.wire import ADDED, Wire


@dataclass(eq=False)
class Exchange:
    """A question on its way; once it has been waited for, the answers are there."""

    ask: Ask
    question: Question
    works: list[dist.Work]  # what has to be waited for, in order
    answers: Tensor
    sketches: Tensor | None

    @classmethod
    def begun(cls, wire: Wire, ask: Ask, question: Question, sketch: int | None) -> Self:
        """Begin to send a question and to collect the answers.

        Sketches have so many numbers each.
        """
        added = question.work is not None and question.work.add is not None
        if (len(question.points), added) != (wire.n_points, wire.added):
            wire.request.ask(Ask.POINTS, len(question.points), int(added))
            wire.send_request().wait()
            wire.take_points(len(question.points), added=added)
        wire.request.fill(ask, wire.rounded(question))
        works = [wire.send_request()]
        collecting, answers = wire.collect(ask)
        works.append(collecting)
        sketches = None
        if question.sketched and sketch:
            collecting, sketches = wire.collect_sketches(question.sketched, sketch)
            works.append(collecting)
        return cls(ask, question, works, answers, sketches)

    def wait(self) -> None:
        """Wait until the answers are there; a lost connection is a RuntimeError."""
        try:
            while self.works:
                self.works[0].wait()
                self.works.pop(0)
        finally:
            self.works.clear()  # they would keep the connections open

    def sizes(self, wire: Wire) -> tuple[int, int, int]:
        """Return the bytes that user 0 sent, those that each peer sent, and those that user 0 received."""
        up = self.answers.element_size() * self.answers.shape[-1]
        received = up if self.ask in ADDED else up * wire.n_peers
        shown = 0 if self.sketches is None else self.sketches[0].nbytes
        return wire.request.bytes.numel(), up + shown, received + shown * wire.n_peers
