"""Members: learners whose gradients come from passes that all take together, and who step when all do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.choosing import AdaptiveAveraging
from coterie.choosing.adaptive.looks import Looks
from coterie.choosing.adaptive.trunk_and_branch import TrunkAndBranch
from coterie.engines.capabilities import Stackable
from coterie.engines.engine import Engine
from coterie.engines.in_process.forward_options import ForwardOptions
from coterie.gradients.gradients import Gradients, is_finite
from coterie.learners.learner import Learner
from coterie.learners.points import Own, Sums
from coterie.learners.points_together import PointsTogether
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Costs, Traffic
from coterie.training import setup


def member_of(
    spec: RunSpec, rule: Any, engine: Engine, costs: Costs, *, guarded: bool, forward_options: ForwardOptions
) -> Learner:
    """Return the learner of a run that may be taken together with others; see `setup.learner_of`."""
    able = isinstance(rule, AdaptiveAveraging) and engine.capabilities.not_stacked is None
    if not able or not isinstance(engine, Stackable):
        return setup.learner_of(spec, rule, engine, costs, guarded=guarded, forward_options=forward_options)
    folds, parts = rule.parts(spec)
    looks = Looks(spec, AnsweredPoints(spec, engine, parts), folds, nested=rule.plan.nested)
    return TrunkMember(spec, engine, costs, looks, guarded=guarded)


class AnsweredPoints(PointsTogether):
    """Points whose gradients in the next step were computed together with those of others."""

    answer: tuple[int, Own, Sums | None] | None = None  # of a step

    def own(self, points: Tensor, step: int, parts: Sequence[int]) -> Own:
        """Return user 0's gradients."""
        if self.answer is not None and self.answer[0] == step:
            return self.answer[1]
        return super().own(points, step, parts)

    def ask(self, points: Tensor, step: int, weights: Tensor) -> Callable[[], Sums]:
        """Return what gives the peers' sums; those that are not finite are looked for one by one."""
        if self.answer is not None and self.answer[0] == step:
            sums = self.answer[2]
            if sums is not None and is_finite(sums.sums):
                return lambda: sums
        return super().ask(points, step, weights)


class TrunkMember(TrunkAndBranch):
    """Trunk and branch of a member: its looks and its fork come when all have stepped."""

    points: AnsweredPoints
    waits = False  # whether it takes its steps together with others

    def advanced(self, n: int) -> None:
        """Go on, or wait for the others."""
        if not self.waits:
            super().advanced(n)

    def go_on(self, n: int) -> None:
        """Go on after steps that all have taken."""
        super().advanced(n)

    def longest_sums(self) -> Tensor:
        """Return how long the peers' sums may be at its points in the next step."""
        return self.second_half().longest if self.step >= self.half else self.longest

    def own_points(self) -> Tensor:
        """Return where own gradients are wanted next, of shape (parts, copies, d)."""
        if self.step < self.half:
            return self.alone.x.unsqueeze(1)
        return torch.stack([self.alone.x, self.peers.x[: self.n_folds + 1]], dim=1)

    def weights(self) -> Tensor | None:
        """Return the peers' weights at its points in the next step; None where each peer is judged by itself."""
        if self.step >= self.half:
            return self.second_half().weights
        return None if self.judges else self.trunk_weights

    @property
    def judges(self) -> bool:
        """Whether the next step judges every peer by itself."""
        return self.schedule.judges(self.step)


class AnsweredEngine:
    """An engine whose next answer was computed together with those of others; else it asks the real one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.capabilities = engine, engine.capabilities  # those of users in this process stay
        self.answer: tuple[int, Gradients] | None = None  # to the next question

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that can be asked."""
        return self.engine.names

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return everybody's gradients; those that are not finite are looked for one by one."""
        answer, self.answer = self.answer, None
        if answer is None or answer[0] != step or rows:
            return self.engine.gradients(x, step, weights, rows)
        g = answer[1]
        if not weights:
            return Gradients(g.own, x=x, own_loss=g.own_loss)
        return g if g.peers is not None and is_finite(g.peers) else self.engine.gradients(x, step, weights)

    def describe(self) -> dict[str, Any]:
        """Return how gradients are computed."""
        return self.engine.describe()

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled."""
        return self.engine.traffic()

    def close(self) -> None:
        """Release the peers."""
        self.engine.close()
