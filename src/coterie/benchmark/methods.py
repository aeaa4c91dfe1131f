"""The methods compared. Each is a few ways to train, all tried at the same step sizes; a new one is a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from coterie.adaptive import AdaptiveAveraging
from coterie.data import Task
from coterie.methods import Method
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging

RATES = (0.01, 0.03, 0.1)
"""The step sizes of Adam that a rule is tried at."""

PLAIN_RATES = (0.03, 0.1, 0.3, 1.0)
"""The step sizes of plain gradient steps that a method of `coterie.methods` is tried at."""

BUDGET = 12
"""How many settings, step sizes included, a method may try and choose from by validation: the same for all."""

Steps: TypeAlias = Literal["constant", "decreasing"]


@dataclass(frozen=True)
class Way:
    """One way to train; the step size is left open.

    Args:
        name: what it is called in the results.
        rule: from the task to the rule, or to a method of `coterie.methods`.
        steps: step sizes that stay as they are, or fall linearly to zero.
        tail: take the mean of the parameters over the last half of the steps.
        weight_decay: Adam's, on all parameters.
        start: another way, whose model at its best step size is the one to start from.
        rates: the step sizes that it is tried at.
        options: further arguments of `coterie.train`, such as `guard="held-out"`; there is no guard without.
    """

    name: str
    rule: Callable[[Task], Rule | Method]
    steps: Steps = "constant"
    tail: bool = False
    weight_decay: float = 0.0
    start: Way | None = None
    rates: tuple[float, ...] = RATES
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


def alone(task: Task) -> Rule:
    """Return the rule that asks nobody."""
    return Alone()


def pooled(task: Task) -> Rule:
    """Return the rule that minimises the mean loss over everybody's examples."""
    return WeightedAveraging.pooled(task.me, task.peers)


def adaptive(task: Task) -> Rule:
    """Return the rule that finds its weights from the own examples."""
    return AdaptiveAveraging()


def averaging(alpha: float) -> Way:
    """Return weighted averaging with equal weights of the peers."""
    return Way(f"alpha {alpha:g}", lambda task: WeightedAveraging(alpha))


def correction(share: float, beta: float) -> Way:
    """Return bias correction with α a share of the paper's N/(N + 1)."""

    def rule(task: Task) -> Rule:
        return BiasCorrection(alpha=share * len(task.peers) / (len(task.peers) + 1), beta=beta)

    return Way(f"alpha {share:g} N/(N + 1), beta {beta:g}", rule)


def schedules(rule: Callable[[Task], Rule], start: Way | None = None) -> tuple[Way, Way, Way, Way]:
    """Return a rule with constant steps, with decreasing ones, with the tail averaged, and with weight decay."""
    return (
        Way("constant steps", rule, start=start),
        Way("decreasing steps", rule, steps="decreasing", start=start),
        Way("tail averaged", rule, tail=True, start=start),
        Way("weight decay", rule, weight_decay=0.1, start=start),
    )


AVERAGING = {alpha: averaging(alpha) for alpha in (0.1, 0.3, 0.6, 0.9)}
POOLED = schedules(pooled)

METHODS: Mapping[str, tuple[Way, ...]] = {
    "alone": schedules(alone),
    "pooled": POOLED,
    "fine-tuned": schedules(alone, start=POOLED[0])[:3],
    **{f"wga-{alpha:g}": (way,) for alpha, way in AVERAGING.items()},
    "wga": tuple(AVERAGING.values()),
    "adaptive": schedules(adaptive),
    "adaptive-guarded": tuple(
        replace(way, options={"guard": "held-out"}) for way in schedules(adaptive) if not way.tail
    ),
    "bc": tuple(correction(share, beta) for share in (1, 0.5) for beta in (0.01, 0.1)),
}
"""By name, the ways to choose from by validation; those with one way only are parts of others, for reference.

`alone`: the own examples only. `pooled`: everybody's examples alike; `fine-tuned`: then on alone. `wga-α`: weighted
averaging with that α; `wga`: with the best of the four by validation. `adaptive`: α and τ found from the own
examples. `bc`: bias correction."""
