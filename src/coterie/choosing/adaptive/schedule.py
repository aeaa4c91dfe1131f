"""What is done at which step of trunk and branch: judging, evaluations, the fork."""

import functools
from dataclasses import dataclass
from typing import Self

import numpy as np

GRAMS = 12
"""Gram matrices in a trunk, evenly spaced; one at every step gave nothing more."""
EVALUATIONS = 7
"""Evaluations in each half of a run, beside that before the first step."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: the trunk up to `half`, then the branch.

    Example:
        >>> schedule = Schedule.of(60)
        >>> schedule.half, [*schedule.judging][:4]
        (30, [0, 2, 4, 6])
        >>> sorted(schedule.evaluations)
        [0, 1, 2, 3, 5, 10, 17, 30, 31, 32, 33, 35, 40, 47, 60]
    """

    steps: int
    half: int  # the branch's first step
    between_grams: int  # in the trunk every peer is judged so often

    @classmethod
    def of(cls, steps: int) -> Self:
        """Return the schedule of a run of so many steps."""
        half = max(1, round(steps / 2))
        return cls(steps, half, max(1, half // GRAMS))

    @functools.cached_property
    def evaluations(self) -> frozenset[int]:
        """The steps after which all copies are judged: dense where a half begins."""
        after = (
            np.geomspace(max(1, n // 50), max(1, n), EVALUATIONS).round().astype(int)
            for n in (self.half, self.steps - self.half)
        )
        first, second = ({*each.tolist()} for each in after)
        second = {min(self.half + step, self.steps) for step in second}
        return frozenset({0, self.half, self.steps, *first, *second})

    @functools.cached_property
    def judging(self) -> range:
        """The steps that judge every peer by itself."""
        return range(0, self.half, self.between_grams)

    def exchanges(self, every: int) -> tuple[int, int]:
        """Return in how many steps of each half peers are asked.

        Every so many, where they are judged, and at the fork.

        Example:
            >>> Schedule.of(240).exchanges(8), Schedule.of(240).exchanges(1)
            ((24, 15), (120, 120))
        """
        asked = {
            *range(0, self.steps, every),
            *self.judging,
            min(self.half, self.steps - 1),
        }
        first = sum(step < self.half for step in asked)
        return first, len(asked) - first

    def alike(self, step: int) -> int:
        """Return how many steps from this one on are the same work.

        To the next Gram matrix, evaluation or fork.
        """
        ends = [min(each for each in (*self.evaluations, self.steps + 1) if each > step)]
        if step < self.half:
            ends.append(step + -step % self.between_grams)
        return min(ends) - step
