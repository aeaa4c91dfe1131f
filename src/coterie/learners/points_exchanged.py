"""Gradients at several points in one exchange: the peers are elsewhere, and asked at all points at once."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from coterie.engines.capabilities import AsksAtPoints
from coterie.engines.engine import Answers, Question
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.engines.sketch import Sketch, sketch_key
from coterie.learners.points import Judged, Points, Sums, combined
from coterie.learners.spec import RunSpec


class PointsExchanged(Points):
    """The same as `Points`, to rounding, in one exchange; and by sketches where peers show no more than these.

    User 0 computes its own gradients between asking and waiting. Points that are not finite are not sent.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: AsksAtPoints,
        parts: Tensor,
        forward_options: ForwardOptions = DEFAULT_FORWARD,
    ) -> None:
        super().__init__(spec, engine, parts, forward_options)
        self._exchange, self._sketch = engine, engine.capabilities.sketch

    def ask(self, points: Tensor, step: int, weights: Tensor) -> Callable[[], Sums]:
        """Ask for the peers' sums; see `Points.ask`."""
        waiting = self._asked(points, step, weights.masked_fill(weights == 0, math.nan))
        return lambda: self._sums(waiting(), points)

    def judge(self, points: Tensor, step: int, weights: Tensor, parts: Sequence[int]) -> Callable[[], Judged]:
        """Ask for every peer's gradients, or sums and sketches; see `Points.judge`."""
        sketched = 0 if self._sketch is None else int(points[:-1].isfinite().all(1).sum())
        last = weights[-1:].masked_fill(weights[-1:] == 0, math.nan)
        asked = torch.cat([weights[:-1], last])
        waiting = self._asked(points, step, asked, rows=self._sketch is None, sketched=sketched)
        return partial(self._answered, waiting, points, step, weights, parts)

    def _answered(
        self,
        waiting: Callable[[], Answers | None],
        points: Tensor,
        step: int,
        weights: Tensor,
        parts: Sequence[int],
    ) -> Judged:
        """Compute user 0's gradients, wait for the peers, and return both in one form."""
        ours, trunks = self.on_all(points[:-1], step, parts), points[:-1]
        answers, usable = waiting(), trunks.isfinite().all(1)
        left_out = {} if answers is None else answers.left_out
        if self._sketch is None:
            rows = points.new_full((len(points), len(self.names), self.d), math.nan)
            if answers is not None and answers.rows is not None:
                rows[points.isfinite().all(1)] = answers.rows
            return Judged(rows[:-1], ours, combined(rows[-1:], weights[-1:], {}), left_out)
        sketches = points.new_full((len(trunks), len(self.names), self._sketch), math.nan)
        if answers is not None and answers.sketches is not None:
            sketches[usable] = answers.sketches
        sketch = Sketch(self.d, self._sketch, sketch_key(self.spec.seed, step))
        return Judged(sketches, sketch(ours), self._sums(answers, points), left_out)

    def _asked(
        self, points: Tensor, step: int, weights: Tensor, *, rows: bool = False, sketched: int = 0
    ) -> Callable[[], Answers | None]:
        """Ask at the points that are finite and where anybody is asked."""
        usable = points.isfinite().all(1)
        asked = weights[usable]
        if asked.isnan().all():
            return lambda: None
        sent, buffers = points[usable], {}
        if self._carried:
            held = []
            for point in sent:
                with self._at(point):
                    held.append({name: buffer.clone() for name, buffer in self.spec.model.named_buffers()})
            buffers = {name: torch.stack([each[name] for each in held]) for name in held[0]}
        question = Question(sent[:, : self.d], step, asked, rows, sketched, buffers)
        return self._exchange.ask(question)

    def _sums(self, answers: Answers | None, points: Tensor) -> Sums:
        """Return sums at all points, zeros at those that were not sent."""
        sums, answered = torch.zeros_like(points[:, : self.d]), points.new_zeros(len(points))
        if answers is None or answers.sums is None:
            return Sums(sums, answered)
        usable = points.isfinite().all(1)
        sums[usable], answered[usable] = answers.sums, answers.answered
        if answers.refused is None:
            return Sums(sums, answered, answers.left_out)
        refused = torch.zeros(len(points), len(self.names), dtype=torch.bool)
        refused[usable.cpu()] = answers.refused
        return Sums(sums, answered, answers.left_out, refused)
