"""One line of a figure: its setting, its exact values and its sampled runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.rules import Rule
from coterie.rules.knobs import Knob
from coterie.theory.dynamics import FloatArray
from coterie.theory.quadratic import NoisyQuadratic
from coterie.users.sampling import random_key

TRIALS = 100


@dataclass(frozen=True, eq=False)
class Series:
    """One line of a figure."""

    label: str  # its name in `results.json`
    legend: str  # its name in the figure
    x: FloatArray  # where it is recorded, mostly steps
    exact: FloatArray  # the exact values there
    # the level after infinitely many steps; None where that has no meaning
    stationary: float | None = None
    mean: FloatArray | None = None  # of the sampled runs; None where nothing is sampled
    error: FloatArray | None = None  # the standard error of that mean
    knobs: str = ""  # in words

    def results(self) -> dict[str, float | None]:
        """Return what `results.json` says of it."""
        return {
            "exact_final": float(self.exact[-1]),
            "exact_stationary": self.stationary,
            "sampled_final_mean": None if self.mean is None else float(self.mean[-1]),
            "sampled_final_se": None if self.error is None else float(self.error[-1]),
        }


@dataclass(frozen=True, eq=False)
class Line:
    """A rule with its knobs on a problem: what one line of a figure shows."""

    label: str  # its name in `results.json`
    legend: str  # its name in the figure
    problem: NoisyQuadratic
    rule: Rule
    lr: Knob
    average_from: int | None = None  # after this step, the mean of the iterates since then is shown
    knobs: str = ""  # in words

    def final(self, steps: int) -> float:
        """Return the exact expected loss after `steps` steps."""
        return float(
            self.problem.expected(self.rule, self.lr, [steps], average_from=self.average_from).loss[
                -1
            ]
        )

    def series(self, steps: Sequence[int], seed: int) -> Series:
        """Return the exact curve and 100 sampled runs.

        Their noise depends on the seed and the label.
        """
        law = self.problem.law(self.rule, self.lr, steps, average_from=self.average_from)
        exact = law.expected()
        losses = self.problem.loss(law.paths(TRIALS, random_key(seed, self.label) % 2**63))
        settles = self.average_from is None and not callable(self.lr)
        level = self.problem.stationary(self.rule, float(self.lr)) if settles else None  # type: ignore[arg-type]
        x, error = exact.steps.astype(float), losses.std(0, ddof=1) / np.sqrt(TRIALS)
        return Series(
            self.label, self.legend, x, exact.loss, level, losses.mean(0), error, self.knobs
        )


def recorded(steps: int, first: int = 1, points: int = 160) -> list[int]:
    """Return the steps to record: equally spaced on a logarithmic axis."""
    return sorted({round(step) for step in np.geomspace(first, steps, points)})
