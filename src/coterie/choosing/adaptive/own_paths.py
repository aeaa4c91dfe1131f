"""Copies of a large model, one after the other.

In parallel every copy takes one step in each step of a run. Here one copy takes as many steps as
there are copies, until it has taken all of its own. Copies that follow the own examples
(`OwnPaths`) have taken theirs when half of the run is over, and a branch at its end. Of a setting
those blind to a fold come first: once all have been judged, the copy that sees all own examples
follows, and of its points those that win are kept. The trunks (`TrunkPaths`), too, follow one
another where the peers are in this process. The candidates are the same to rounding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from coterie.choosing.adaptive.evaluations import HeldOutEvaluations
from coterie.choosing.memory import give_back
from coterie.engines.asking import GradientsAtPoints
from coterie.engines.engine import Question
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.mixture.families import Array


class Path(NamedTuple):
    """A copy that is to take its steps."""

    kind: str  # of its points
    rate: float  # its step size, in multiples of the optimizer's
    decay: float  # how strongly it is drawn back: alone to 0, a branch to where it began
    part: int  # of the own examples that it sees, or that judge it: all, or all but a fold


class Paths(ABC):
    """Paths that are taken one at a time.

    Args:
        spec: of the run, prepared.
        paths: in the order in which they are taken.
        span: the steps of the run between which each goes.
        within: the steps of the run in which all are taken.
        begin: where one begins, with its buffers.
    """

    def __init__(
        self,
        spec: RunSpec,
        paths: Sequence[Path],
        *,
        span: tuple[int, int],
        within: tuple[int, int],
        begin: Callable[[Path], Tensor],
    ) -> None:
        self.spec, self.paths = spec, paths
        self.begin: Callable[[Path], Tensor] | None = begin  # None, to hold nothing, at the end
        (self.first, self.last), self.within = span, within
        self.taken = 0  # steps, of all copies
        self._stack: Stack | None = None
        self._steps = Steps()

    def follow(self, step: int, rates: Optimizer | None = None) -> None:
        """Take the steps that belong to a step of the run, by the step sizes of `rates` where given."""
        many, (begins, ends) = self.last - self.first, self.within
        total = len(self.paths) * many
        due = min(total, total * (step + 1 - begins) // max(1, ends - begins))
        while self.taken < due:
            path, at = self.paths[self.taken // many], self.first + self.taken % many
            stack = self._stack or self._begun(path)
            if rates is not None:
                stack.set_rates(rates)
            self._direct(path, at, stack)
            self._steps.take([stack])
            self.taken += 1
            self._stepped(path, at + 1, stack)
            if at + 1 == self.last:
                self._stack = None
            del stack  # which the next path's should not stand beside
        if due == total:
            self.begin = None

    def _start(self, path: Path) -> Tensor:
        """Return where a path begins, as a point of its own."""
        if self.begin is None:
            raise AssertionError("all paths are taken")
        give_back()  # what the last one held
        return self.begin(path)[None]

    def _begun(self, path: Path) -> Stack:
        self._stack = Stack(self._start(path).clone(), [(self.spec.at_rate(path.rate), 1)])
        return self._stack

    @abstractmethod
    def _direct(self, path: Path, at: int, stack: Stack) -> None:
        """Write the direction of a path's next step."""

    @abstractmethod
    def _stepped(self, path: Path, step: int, stack: Stack) -> None:
        """Go on after so many steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        stack = self._stack and self._stack.state_dict()
        return {"taken": self.taken, "stack": stack}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.taken, self._stack = state["taken"], None
        if state["stack"] is not None:
            path = self.paths[self.taken // (self.last - self.first)]
            like = next(self.spec.model.parameters())
            x = state["stack"]["x"].to(like)
            self._stack = Stack(x, [(self.spec.at_rate(path.rate), 1)])
            self._stack.load_state_dict(state["stack"])


class TrunkPaths(Paths):
    """Trunks that follow one another; where each ended is kept.

    Args:
        direct: writes the direction of the step of a trunk.
    """

    def __init__(
        self,
        spec: RunSpec,
        paths: Sequence[Path],
        *,
        direct: Callable[[int, int, Stack], None],
        **about: Any,
    ) -> None:
        super().__init__(spec, paths, **about)
        self.direct, self.ends = direct, list[Tensor]()

    def _direct(self, path: Path, at: int, stack: Stack) -> None:
        self.direct(len(self.ends), at, stack)

    def _stepped(self, path: Path, step: int, stack: Stack) -> None:
        if step == self.last:
            self.ends.append(stack.x[0])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        direction = self._stack and self._stack.direction  # which later steps may follow again
        return {**super().state_dict(), "ends": self.ends, "direction": direction}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        super().load_state_dict(state)
        self.ends = list(state["ends"])
        if self._stack is not None:
            self._stack.direction.copy_(state["direction"])


class OwnPaths(Paths):
    """Paths that follow the own examples; of each setting part 0 comes last.

    Args:
        points: user 0 by itself.
        looks: what judges.
        judged: after which steps a path is judged.
    """

    def __init__(
        self,
        spec: RunSpec,
        paths: Sequence[Path],
        *,
        points: GradientsAtPoints,
        looks: HeldOutEvaluations,
        judged: frozenset[int],
        **about: Any,
    ) -> None:
        super().__init__(spec, paths, **about)
        self.points, self.looks, self.judged = points, looks, judged
        # of the first copy that sees all: its loss, and the largest number of its gradient
        self.loss, self.largest = torch.zeros(()), torch.zeros(())
        self._origin = self._buffers = torch.zeros(0)  # where a branch began; moved by passes
        self._blind: dict[int, Array] = {}  # by step: outputs for the rows of the folds judged
        self._nobody = next(spec.model.parameters()).new_zeros(0, 0)

    def _direct(self, path: Path, at: int, stack: Stack) -> None:
        question = Question(
            self._point(stack), at, self._nobody, own=[path.part], into=stack.direction
        )
        answers = self.points.ask(question)
        own, losses = cast("Tensor", answers.sums), cast("Tensor", answers.losses)
        if path.part == 0 and path[:3] == self.paths[0][:3]:
            self.loss, self.largest = losses[0], torch.linalg.vector_norm(own[0], math.inf)
        torch.add(own, stack.x, alpha=path.decay, out=stack.direction)
        if len(self._origin):
            stack.direction.sub_(self._origin, alpha=path.decay)
        if self._buffers.numel() and answers.buffers is not None:
            self._buffers = answers.buffers

    def _stepped(self, path: Path, step: int, stack: Stack) -> None:
        if step in self.judged:
            self._judge(path, step, self._point(stack))
        if step == self.last:
            self._origin = self._buffers = torch.zeros(0)

    def _begun(self, path: Path) -> Stack:
        point, d = self._start(path), self.points.d
        held_back = path.decay and path.kind != "alone"
        self._origin = point[:, :d] if held_back else point.new_zeros(0)
        self._buffers = point[:, d:].clone()
        self._stack = Stack(point[:, :d].clone(), [(self.spec.at_rate(path.rate), 1)])
        if self.first in self.judged:
            self._judge(path, self.first, point)
        return self._stack

    def _point(self, stack: Stack) -> Tensor:
        return torch.cat([stack.x, self._buffers], 1) if self._buffers.numel() else stack.x

    def _judge(self, path: Path, step: int, point: Tensor) -> None:
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
            **super().state_dict(),
            "origin": self._origin,
            "buffers": self._buffers,
            "blind": {step: torch.from_numpy(each) for step, each in self._blind.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        super().load_state_dict(state)
        like = next(self.spec.model.parameters())
        self._origin, self._buffers = (state[name].to(like) for name in ("origin", "buffers"))
        self._blind = {step: each.cpu().numpy() for step, each in state["blind"].items()}
