"""Copies of a large model that follow the own examples, one after the other.

In parallel every copy takes one step in each step of a run. Here one copy takes as many steps as
there are copies, until it has taken all of its own. Of a setting those blind to a fold come first:
once all have been judged, the copy that sees all own examples follows, and of its points those
that win are kept. The candidates are the same to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from coterie.choosing.adaptive.evaluations import HeldOutEvaluations
from coterie.engines.asking import GradientsAtPoints
from coterie.engines.engine import Question
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.mixture.families import Array


class OwnPath(NamedTuple):
    """A copy that is to follow the own examples."""

    kind: str  # of its points
    rate: float  # its step size, in multiples of the optimizer's
    decay: float  # how strongly it is drawn back: alone to 0, a branch to where it began
    part: int  # of the own examples that it sees: all, or all but a fold


class OwnPaths:
    """Paths that are taken one at a time.

    Args:
        spec: of the run, prepared.
        points: user 0 by itself.
        looks: what judges.
        paths: in the order in which they are taken; of each setting part 0 last.
        span: the steps of the run between which each goes.
        judged: after which of them it is judged.
        begin: where one begins, with its buffers.
    """

    def __init__(
        self,
        spec: RunSpec,
        points: GradientsAtPoints,
        looks: HeldOutEvaluations,
        paths: Sequence[OwnPath],
        *,
        span: tuple[int, int],
        judged: frozenset[int],
        begin: Callable[[OwnPath], Tensor],
    ) -> None:
        self.spec, self.points, self.looks, self.paths = spec, points, looks, paths
        (self.first, self.last), self.judged, self.begin = span, judged, begin
        self.taken = 0  # steps, of all copies
        self.loss, self.own = torch.zeros(()), torch.zeros(1)  # of the first copy that sees all
        self._stack: Stack | None = None
        self._origin = self._buffers = torch.zeros(0)  # where a branch began; moved by passes
        self._blind: dict[int, Array] = {}  # by step: outputs for the rows of the folds judged
        self._steps, self._nobody = Steps(), points.start().new_zeros(0, 0)

    def follow(self, step: int, rates: Optimizer | None = None) -> None:
        """Take the steps that belong to a step of the run, by the step sizes of `rates` where given."""
        many = self.last - self.first
        while self.taken < len(self.paths) * (step + 1 - self.first):
            path, at = self.paths[self.taken // many], self.first + self.taken % many
            stack = self._stack or self._begun(path)
            answers = self.points.ask(
                Question(self._point(stack), at, self._nobody, own=[path.part])
            )
            own, losses = cast("Tensor", answers.sums), cast("Tensor", answers.losses)
            if path.part == 0 and path[:3] == self.paths[0][:3]:
                self.loss, self.own = losses[0], own[0]
            if rates is not None:
                stack.set_rates(rates)
            torch.add(own, stack.x, alpha=path.decay, out=stack.direction)
            if len(self._origin):
                stack.direction.sub_(self._origin, alpha=path.decay)
            self._steps.take([stack])
            if answers.buffers is not None:
                self._buffers = answers.buffers
            self.taken += 1
            if at + 1 in self.judged:
                self._judge(path, at + 1, self._point(stack))
            if at + 1 == self.last:
                self._stack = None

    def _begun(self, path: OwnPath) -> Stack:
        point, d = self.begin(path)[None], self.points.d
        held_back = path.decay and path.kind != "alone"
        self._origin = point[:, :d].clone() if held_back else point[:0, :d]
        self._buffers = point[:, d:].clone()
        self._stack = Stack(point[:, :d].clone(), [(self.spec.at_rate(path.rate), 1)])
        if self.first in self.judged:
            self._judge(path, self.first, point)
        return self._stack

    def _point(self, stack: Stack) -> Tensor:
        return torch.cat([stack.x, self._buffers], 1) if self._buffers.numel() else stack.x

    def _judge(self, path: OwnPath, step: int, point: Tensor) -> None:
        """Judge a blind copy on its fold, and the one that sees all by what the blind ones gave."""
        looks = self.looks
        if path.part == 0:
            looks.add_point(path.kind, point[0], self._blind.pop(step))
            return
        given = looks.judged(point, looks.rows)[0]
        blind = self._blind.setdefault(step, np.full_like(given, np.nan))
        which = looks.folds == path.part - 1
        blind[which] = given[which]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "taken": self.taken,
            "stack": self._stack and self._stack.state_dict(),
            "origin": self._origin,
            "buffers": self._buffers,
            "blind": {step: torch.from_numpy(each) for step, each in self._blind.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.taken = state["taken"]
        like = self.points.start()
        self._origin, self._buffers = (state[name].to(like) for name in ("origin", "buffers"))
        self._blind = {step: each.cpu().numpy() for step, each in state["blind"].items()}
        self._stack = None
        if state["stack"] is not None:
            path = self.paths[self.taken // (self.last - self.first)]
            spec = self.spec.at_rate(path.rate)
            self._stack = Stack(state["stack"]["x"].to(like), [(spec, 1)])
            self._stack.load_state_dict(state["stack"])
