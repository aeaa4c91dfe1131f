"""What user 0 makes of the messages that it collected under torch.distributed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.engines.engine import Answers, Question
from coterie.engines.rounding import Compress
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.wire import Notes, Outcome, Wire
from coterie.gradients.gradients import Gradients, add_up, complete, is_finite, receive


class Reading:
    """Reads sums, rows and sketches of the peers with these names, in order."""

    def __init__(self, wire: Wire, names: Sequence[str], compress: Compress | None) -> None:
        self.wire, self.names, self.compress = wire, names, compress

    def with_peers(
        self,
        g: Gradients,
        answers: Tensor,
        weights: Mapping[str, float],
        notes: Mapping[str, Notes],
        *,
        rows: bool,
    ) -> Gradients:
        """Return user 0's gradient together with what the peers sent at the same point."""
        own = g.own
        kept = tuple(name for name in weights if notes[name].outcomes[0] is Outcome.GRADIENT)
        left_out = {
            name: self._reason(notes[name].outcomes[0]) for name in weights if name not in kept
        }
        if answers.ndim == 1:  # the sum alone
            total = answers[: self.wire.size].to(own.dtype)
            if not is_finite(total):
                left_out, kept = dict.fromkeys(weights, "the sum is not finite"), ()
            peers, share = complete(own, total, sum(weights[name] for name in kept))
            return replace(g, peers=peers, answered=share, left_out=left_out)
        gradients = (
            (name, answers[1 + self.names.index(name), : self.wire.size].to(own.dtype))
            for name in kept
        )
        if not rows:
            peers, share, also = add_up(own, gradients, weights)
            return replace(g, peers=peers, answered=share, left_out=left_out | also)
        matrix, kept, also = receive(own, dict(gradients))
        return g.with_peers(matrix, kept, weights, left_out | also, rows=rows)

    def at_points(
        self,
        question: Question,
        ask: Ask,
        answers: Tensor,
        sketches: Tensor | None,
        notes: Mapping[str, Notes],
    ) -> Answers:
        """Return what the peers answered at several points."""
        points, n = question.points, self.wire.n_numbers
        outcomes = torch.tensor([notes[name].outcomes for name in self.names]).T
        usable, refused = (
            (outcomes == Outcome.GRADIENT).to(points.device),
            outcomes == Outcome.REFUSED,
        )
        left_out = self._left_out(question, outcomes)
        weights = question.weights.masked_fill(~usable, 0.0).to(points)
        shown = None
        if sketches is not None:
            shown = (
                sketches[1:]
                .view(len(self.names), question.sketched, -1)
                .transpose(0, 1)
                .to(points.dtype)
            )
        if ask is Ask.SUM:
            sums = answers[:n].view_as(points).to(points.dtype)
            lost = ~sums.isfinite().all(1)
            if lost.any():
                left_out = dict.fromkeys(self.names, "the sum is not finite") | left_out
            there = weights.sum(1).masked_fill(lost, 0.0)
            return Answers(
                sums.masked_fill(lost[:, None], 0.0),
                there,
                left_out,
                sketches=shown,
                refused=refused,
            )
        rows = answers[1:, :n].view(len(self.names), *points.shape).transpose(0, 1).to(points.dtype)
        if question.rows:
            return Answers(
                None,
                weights.sum(1),
                left_out,
                rows.masked_fill(~usable[:, :, None], math.nan),
                shown,
            )
        return Answers(
            torch.bmm(weights[:, None], rows).squeeze(1), weights.sum(1), left_out, sketches=shown
        )

    def _left_out(self, question: Question, outcomes: Tensor) -> dict[str, str]:
        """Return the peers that were asked at a point and gave nothing there, each with the first reason."""
        lost = ~question.weights.isnan().cpu() & (outcomes != Outcome.GRADIENT)
        first = {
            name: int(lost[:, k].int().argmax())
            for k, name in enumerate(self.names)
            if lost[:, k].any()
        }
        codes = {name: int(outcomes[at, self.names.index(name)]) for name, at in first.items()}
        return {name: self._reason(Outcome(code)) for name, code in codes.items()}

    def _reason(self, outcome: Outcome) -> str:
        if outcome is Outcome.REFUSED:
            return "refused"
        return "not finite" if self.compress is None else f"not finite in {self.compress}"
