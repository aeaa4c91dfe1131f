"""Who gains: the verdict on every user's model, the mean over users, and the worst-off of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie.evaluation.metrics import less_is_better
from coterie.recording.result import Difference
from coterie.reporting.verdict import LEVEL, Finding, Verdict, difference, with_error
from coterie.training.run import Run

COUNTED: dict[Finding, str] = {
    "better": "better off than alone",
    "worse": "worse off",
    "mixed": "better off in one measure and worse off in another",
    "unclear": "without a clear difference",
    "alone": "served a model trained alone",
    "unknown": "not compared with training alone",
    "constant": "served nothing better than a constant",
}
"""What is said of users whose verdicts are alike."""


@dataclass(frozen=True)
class Gain:
    """What a user has of the others: the verdict on its model, and the numbers that it rests on."""

    name: str
    verdict: Verdict
    # the chosen metric and the loss; no difference where Alone is served
    measures: Mapping[str, Difference]
    # the loss on test examples beside that of the pooled model ("alone" in it), where there is one
    beside_pooled: Difference | None = None

    def differences(self) -> dict[str, str]:
        """Return the differences with their standard errors.

        Nothing where the model trained alone is served.
        """
        if self.verdict.finding == "alone":
            return {}
        return {k: difference(one) for k, one in self.measures.items()}


@dataclass(frozen=True)
class Overall:
    """One measure over all users who can be compared."""

    measure: str
    users: int
    mean: float  # of the differences to Alone
    error: float  # its standard error over test examples, for these very users
    worst: tuple[str, float]  # who is worst off, and its number
    worst_alone: tuple[str, float]  # who would be, trained alone

    def __str__(self) -> str:
        (name, value), (other, alone) = self.worst, self.worst_alone
        return (
            f"{self.measure} against alone: {mean_in_words(self.mean, self.error, self.users)}; the"
            f" worst-off is {name} with {value:.4g}, alone it would be {other} with {alone:.4g}"
        )


def gain_of(name: str, run: Run) -> Gain:
    """Return what a user has of the others."""
    verdict = run.verdict
    if verdict.measures or verdict.finding != "alone":
        return Gain(name, verdict, verdict.measures)
    end = run.record.end
    measures = end.test or end.validation
    metric = [key for key in measures if key != "loss"][:1]
    same = {
        key: Difference(
            ours=measures[key], alone=measures[key], error=0.0, less_is_better=less_is_better(key)
        )
        for key in [*metric, "loss"]
        if key in measures
    }
    return Gain(name, verdict, same)


def overall(gains: Sequence[Gain]) -> list[Overall]:
    """Return mean and worst-off user in each measure that all users who can be compared have."""
    compared = [gain for gain in gains if gain.measures]
    if not compared:
        return []
    totals = []
    for key in compared[0].measures:
        each = {gain.name: gain.measures[key] for gain in compared if key in gain.measures}
        less = any(one.less_is_better for one in each.values())
        worst = max if less else min
        mean, error = mean_of(list(each.values()))
        totals.append(
            Overall(
                measure=key,
                users=len(each),
                mean=mean,
                error=error,
                worst=worst(
                    ((name, one.ours) for name, one in each.items()), key=lambda pair: pair[1]
                ),
                worst_alone=worst(
                    ((name, one.alone) for name, one in each.items()), key=lambda pair: pair[1]
                ),
            )
        )
    return totals


def counted(gains: Sequence[Gain]) -> str:
    """Say of how many users which verdict is made."""
    counts = Counter[str](gain.verdict.finding for gain in gains)
    parts = [f"{counts[finding]} {words}" for finding, words in COUNTED.items() if counts[finding]]
    return f"Of {len(gains)} users: {', '.join(parts)}."


def beside_pooled(gains: Sequence[Gain]) -> str:
    """Say whether a model of its own for each is better than one for all; "" where that is not known."""
    each = [gain.beside_pooled for gain in gains if gain.beside_pooled is not None]
    if not each:
        return ""
    mean, error = mean_of(each)
    clear = abs(mean) > 2 * error
    which = ("better" if mean < 0 else "worse") if clear else "not clearly better or worse"
    return f"A model for each is {which} than one pooled model for all: loss {mean_in_words(mean, error, len(each))}."


def mean_in_words(mean: float, error: float, users: int) -> str:
    """Return a mean over users with its error, where that is known."""
    what = " (one standard error)" if math.isfinite(error) else ""
    return f"{with_error(mean, error)} in the mean of {users} user{'' if users == 1 else 's'}{what}"


def mean_of(each: Sequence[Difference]) -> tuple[float, float]:
    """Return the mean of users' differences, and its standard error for these very users."""
    n = len(each)
    mean = sum(one.difference for one in each) / n
    return mean, math.sqrt(sum(one.error**2 for one in each)) / n


def by_chance(gains: Sequence[Gain]) -> str:
    """Say how many clear differences chance may make of several comparisons.

    "" where there are none.
    """
    made = sum(gain.verdict.comparison is not None for gain in gains)
    if made < 2:
        return ""
    return (
        f"By chance alone about {made * LEVEL:.2g} of {made} comparisons would show a clear"
        " difference."
    )
