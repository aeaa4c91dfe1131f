"""The steps of trunk and branch that are the same work, so that they can be captured as one program."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.choosing.adaptive.trunk_and_branch import TrunkAndBranch
from coterie.engines.in_process.side_stream import side_stream
from coterie.learners.points_together import PointsTogether
from coterie.learners.stack import Stack


class RepeatedSteps:
    """The steps between two Gram matrices, looks or forks, which are the same work; see `learners.blocks`."""

    def __init__(self, learner: TrunkAndBranch, points: PointsTogether) -> None:
        self.learner, self.points = learner, points
        self.repeats, self.drawn = learner.until_other_work, points.drawn

    @property
    def step(self) -> int:
        """The step that comes next."""
        return self.learner.step

    @property
    def _in_branch(self) -> bool:
        return self.learner.step >= self.learner.half

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The parameters of all copies."""
        return self.learner.alone, self.learner.peers

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What a step reads and changes beside parameters: the peers' weights, how long sums may be, a count."""
        learner = self.learner
        if not self._in_branch:
            return learner.trunk_weights, learner.longest, learner.unheard
        fixed = learner.second_half()
        return fixed.weights, fixed.longest, learner.unheard

    def numbers(self, step: int) -> list[float]:
        """Return α at a step."""
        return [self.learner.schedule.alpha(step) if self._in_branch else 1.0]

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the directions of all copies; return user 0's loss. Its own passes go on beside the peers'."""
        learner, theirs = self.learner, self.learner.peers.x
        with side_stream(theirs.device) as join:
            copies = theirs[: learner.n_folds + 1] if self._in_branch else theirs[:0]
            own = self.points.own_of(torch.cat([learner.alone.x, copies]), drawn[0])
        asked = self.points.sums_of(theirs, drawn[1], self.held[0])
        join()
        if self._in_branch:
            learner.mix(own, asked, numbers[0])
        else:
            learner.follow(own, asked)
        return own.loss

    def taken(self, n: int, losses: Tensor) -> None:
        """Let the learner know that n steps were taken; nothing else is made of their losses."""
        del losses
        self.learner.advanced(n)
