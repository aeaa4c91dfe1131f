"""The steps of trunk and branch that are the same work, so that they can be captured as one program."""

from collections.abc import Sequence

from torch import Tensor

from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.choosing.adaptive.directions import peer_sums
from coterie.engines.asking import StackedGradients
from coterie.learners.stack import Stack


class RepeatedSteps:
    """The steps between two Gram matrices, looks or forks, which are the same work.

    See `learners.blocks`.
    """

    def __init__(self, learner: AdaptiveLearner, points: StackedGradients) -> None:
        self.learner, self.points = learner, points
        self.repeats = learner.until_other_work

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples of the next steps, a row for each step."""
        return [self.points.block(step)]

    @property
    def step(self) -> int:
        """The step that comes next."""
        return self.learner.step

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The parameters of all copies."""
        return self.learner.stacks

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What a step reads beside parameters: the peers' weights, how long sums may be, origins."""
        learner = self.learner
        return learner.trunk_weights, learner.pooled_weights, learner.longest, learner.origins

    def numbers(self, step: int) -> list[float]:
        """Return the numbers of a step: none."""
        return []

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the directions of all copies; return user 0's loss."""
        learner = self.learner
        answers = self.points.on(learner.question(), drawn[0])
        own, losses = learner.own_answers(answers)
        learner.direct(own, peer_sums(answers, len(learner.peers.x)))
        return losses[0]

    def taken(self, n: int, losses: Tensor) -> None:
        """Let the learner know that n steps were taken; nothing else is made of their losses."""
        del losses
        self.learner.advanced(n)
