"""What is done at which step of trunk and branch.

Judging, evaluations, the fork, and the peers' weight after it.
"""

import math
from dataclasses import dataclass
from typing import Self

GRAMS = 12
"""Gram matrices in a trunk, evenly spaced; one at every step gave nothing more."""
EVALUATIONS = 20
"""Evaluations in a run."""
FIRST, LAST = 2.2, -4.6
"""The logit of α at the branch's first and last step: α falls from .9 to .01."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: the trunk up to `half`, then the branch.

    Example:
        >>> schedule = Schedule.of(60)
        >>> schedule.half, [step for step in range(60) if schedule.judges(step)][:4]
        (30, [0, 2, 4, 6])
        >>> round(schedule.alpha(30), 2), round(schedule.alpha(59), 2)
        (0.9, 0.01)
    """

    steps: int
    half: int  # the branch's first step
    between_grams: int  # in the trunk every peer is judged so often
    between_evaluations: int

    @classmethod
    def of(cls, steps: int) -> Self:
        """Return the schedule of a run of so many steps."""
        half = max(1, round(steps / 2))
        return cls(steps, half, max(1, half // GRAMS), max(1, steps // EVALUATIONS))

    def judges(self, step: int) -> bool:
        """Say whether a step judges every peer by itself."""
        return step < self.half and step % self.between_grams == 0

    def judged(self, steps: int) -> list[int]:
        """Return which of the first steps judge."""
        return list(range(0, min(steps, self.half), self.between_grams))

    def exchanges(self, every: int) -> int:
        """Return in how many steps peers are asked.

        Every so many, where they are judged, and at the fork.

        Example:
            >>> Schedule.of(240).exchanges(8), Schedule.of(240).exchanges(1)
            (39, 240)
        """
        return len(
            {*range(0, self.steps, every), *self.judged(self.steps), min(self.half, self.steps - 1)}
        )

    def evaluates(self, steps: int) -> bool:
        """Say whether there is an evaluation after so many steps."""
        return steps % self.between_evaluations == 0 or steps in (self.half, self.steps)

    def alpha(self, step: int) -> float:
        """Return the peers' weight at a step of the branch."""
        done = (step - self.half) / max(1, self.steps - self.half - 1)
        return 1 / (1 + math.exp(-(FIRST + (LAST - FIRST) * min(1.0, done))))

    def alike(self, step: int) -> int:
        """Return how many steps from this one on are the same work.

        To the next Gram matrix, evaluation or fork.
        """
        ends = [step - step % self.between_evaluations + self.between_evaluations, self.steps]
        if step < self.half:
            ends += [step + -step % self.between_grams, self.half]
        return min(ends) - step
