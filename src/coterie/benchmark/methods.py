"""The methods compared. Each is a few ways to train, all tried at the same step sizes; a new one is a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from coterie import aggregators
from coterie.choosing import AdaptiveAveraging, Chooser
from coterie.data import Task
from coterie.methods import (
    APFL,
    L2GD,
    MVR,
    SAGA,
    SVRG,
    Ditto,
    FedAvg,
    FedFomo,
    FineTuning,
    HypCluster,
    Mapper,
    Method,
    Mime,
    PerFedAvg,
    Scaffold,
    Selfish,
    UserCentric,
    Waffle,
    data_interpolation,
)
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging, similarity

RATES = (0.01, 0.03, 0.1)
"""The step sizes of Adam that a rule is tried at."""

PLAIN_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The step sizes of plain gradient steps that a method of `coterie.methods` is tried at."""

BUDGET = 12
"""How many settings, step sizes included, a method may try and choose from by validation: the same for all."""

Steps: TypeAlias = Literal["constant", "decreasing"]
Making: TypeAlias = Callable[[Task, int], Rule | Chooser | Method]
"""From the task, and the gradients that user 0 may compute, to a rule or a method of `coterie.methods`."""


@dataclass(frozen=True)
class Way:
    """One way to train; the step size is left open.

    Args:
        name: what it is called in the results.
        rule: what makes the rule or method.
        steps: step sizes that stay as they are, or fall linearly to zero.
        tail: take the mean of the parameters over the last half of the steps.
        weight_decay: Adam's, on all parameters.
        start: another way, whose model at its best step size is the one to start from.
        rates: the step sizes that it is tried at.
        options: further arguments of `coterie.train`, such as `guard="held-out"`; there is no guard without.
    """

    name: str
    rule: Making
    steps: Steps = "constant"
    tail: bool = False
    weight_decay: float = 0.0
    start: Way | None = None
    rates: tuple[float, ...] = RATES
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


def alone(task: Task, steps: int) -> Rule:
    """Return the rule that asks nobody."""
    return Alone()


def pooled(task: Task, steps: int) -> Rule:
    """Return the rule that minimises the mean loss over everybody's examples."""
    return WeightedAveraging.pooled(task.me, task.peers)


def adaptive(task: Task, steps: int) -> Chooser:
    """Return what finds the weights from the own examples."""
    return AdaptiveAveraging()


def rules(*each: Rule) -> tuple[Way, ...]:
    """Return a way for each of these rules, which are the same for every task."""
    return tuple(Way(repr(rule), _always(rule)) for rule in each)


def methods(*each: Method) -> tuple[Way, ...]:
    """Return a way for each of these methods, which are the same for every task."""
    return tuple(Way(repr(method), _always(method), rates=PLAIN_RATES) for method in each)


def correction(share: float, beta: float) -> Way:
    """Return bias correction with α a share of the paper's N/(N + 1)."""

    def rule(task: Task, steps: int) -> Rule:
        return BiasCorrection(alpha=share * len(task.peers) / (len(task.peers) + 1), beta=beta)

    return Way(f"alpha {share:g} N/(N + 1), beta {beta:g}", rule)


def schedules(rule: Making, start: Way | None = None) -> tuple[Way, Way, Way, Way]:
    """Return a rule with constant steps, with decreasing ones, with the tail averaged, and with weight decay."""
    return (
        Way("constant steps", rule, start=start),
        Way("decreasing steps", rule, steps="decreasing", start=start),
        Way("tail averaged", rule, tail=True, start=start),
        Way("weight decay", rule, weight_decay=0.1, start=start),
    )


def tuned_after(share: float) -> Way:
    """Return FedAvg for a share of the rounds, then own steps."""

    def method(task: Task, steps: int) -> Method:
        return FineTuning(max(1, round(share * steps / 5)), FedAvg(5))

    return Way(f"after {share:g} of the rounds", method, rates=PLAIN_RATES)


def waffle(slope: float) -> Way:
    """Return WAFFLE, whose weights wear away over all rounds."""

    def method(task: Task, steps: int) -> Method:
        return Waffle(max(1, steps // 5), 5, slope)

    return Way(f"slope {slope:g}", method, rates=PLAIN_RATES)


def interpolated(mixing: float) -> Way:
    """Return the mixture of own and pooled examples."""
    return Way(f"mixing {mixing:g}", lambda task, steps: data_interpolation(task.me, task.peers, mixing))


def robust(aggregator: Callable[[int], aggregators.Aggregator]) -> tuple[Way, ...]:
    """Return averaging with a robust aggregator of the peers, of whom just less than half may be bad."""

    def way(alpha: float) -> Way:
        return Way(
            f"alpha {alpha:g}", lambda task, steps: WeightedAveraging(alpha, aggregator=aggregator(_bad(task)))
        )

    return tuple(way(alpha) for alpha in ALPHAS)


def _always(made: Rule | Method) -> Making:
    def make(task: Task, steps: int) -> Rule | Method:
        return made

    return make


def _bad(task: Task) -> int:
    return (len(task.peers) - 1) // 2


ALPHAS = (0.1, 0.3, 0.6, 0.9)
AVERAGING = {alpha: rules(WeightedAveraging(alpha)) for alpha in ALPHAS}
POOLED = schedules(pooled)

METHODS: Mapping[str, tuple[Way, ...]] = {
    "alone": schedules(alone),
    "pooled": POOLED,
    "fine-tuned": schedules(alone, start=POOLED[0])[:3],
    **{f"wga-{alpha:g}": ways for alpha, ways in AVERAGING.items()},
    "wga": tuple(way for ways in AVERAGING.values() for way in ways),
    "adaptive": schedules(adaptive),
    "adaptive-guarded": tuple(
        replace(way, options={"guard": "held-out"}) for way in schedules(adaptive) if not way.tail
    ),
    "bc": tuple(correction(share, beta) for share in (1, 0.5) for beta in (0.01, 0.1)),
    "wga-auto": rules(WeightedAveraging("auto")),
    "bc-auto": rules(BiasCorrection("auto", "auto")),
    "cosine": rules(*map(similarity.CosineSimilarity, ALPHAS)),
    "gate": rules(*map(similarity.SimilarityGate, ALPHAS)),
    "first-order": rules(*map(similarity.FirstOrder, (0.0, 0.5, 0.9, 0.99))),
    "weight-erosion": rules(*map(similarity.WeightErosion, (0.001, 0.01, 0.03, 0.1))),
    "meritfed": rules(*map(similarity.MirrorDescent, (0.01, 0.1, 0.3, 1.0))),
    "wga-median": robust(lambda bad: aggregators.CoordinateMedian()),
    "wga-trimmed": robust(aggregators.TrimmedMean),
    "wga-geometric": robust(lambda bad: aggregators.GeometricMedian()),
    "wga-krum": robust(aggregators.MultiKrum),
    "wga-mixing": robust(lambda bad: aggregators.NearestNeighbourMixing(bad, aggregators.CoordinateMedian())),
    "fedavg": methods(FedAvg(1), FedAvg(5)),
    "fedavg-tuned": tuple(tuned_after(share) for share in (0.3, 0.9)),
    "per-fedavg": methods(PerFedAvg(2, 0.1), PerFedAvg(5, 0.1)),
    "ditto": methods(*(Ditto(penalty, FedAvg(5), 5) for penalty in (0.03, 0.3))),
    "apfl": methods(APFL(5, 0.5, learned=False), APFL(5, 0.5)),
    "l2gd": methods(*(L2GD(5, penalty, 0.3) for penalty in (0.03, 0.3))),
    "mapper": methods(Mapper(2, (0.25, 0.5, 0.75)), Mapper(2, (0.5,))),
    "hyp-cluster": methods(HypCluster(2, 5, 0.1), HypCluster(3, 5, 0.1)),
    "data-interpolation": tuple(interpolated(mixing) for mixing in (0.1, 0.3, 0.6, 0.9)),
    "scaffold": methods(Scaffold(3), Scaffold(10)),
    "mime": methods(Mime(5, 0.0), Mime(5, 0.9)),
    "mime-lite": methods(Mime(5, 0.0, lite=True), Mime(5, 0.9, lite=True)),
    "svrg": methods(SVRG(5), SVRG(10)),
    "saga": methods(SAGA(5), SAGA(10)),
    "sag": methods(SAGA(5, biased=True), SAGA(10, biased=True)),
    "mvr": methods(MVR(10, 0.03), MVR(10, 0.3)),
    "fedfomo": methods(FedFomo(5), FedFomo(5, "mine")),
    "waffle": tuple(waffle(slope) for slope in (1.6, 3.2)),
    "user-centric": methods(UserCentric(5), UserCentric(5, 2)),
    "selfish": methods(Selfish(5, alpha=0.6), Selfish(5)),
}
"""By name, the ways to choose from by validation; those with one way only are parts of others, for reference.

`alone`: the own examples only. `pooled`: everybody's examples alike; `fine-tuned`: then on alone. `wga-α`: weighted
averaging with that α; `wga`: with the best of the four by validation. `adaptive`: α and τ found from the own
examples; `adaptive-guarded`: watched by a shadow trained alone. `bc`: bias correction. `…-auto`: knobs by theory
and measured constants. `wga-median` and the like: a robust aggregator. The others are named after their
systems, see docs/methods.md."""

DEFAULT = tuple(METHODS)[: tuple(METHODS).index("bc") + 1]
"""What `coterie bench` compares if nothing else is asked for: minutes of work, where all take hours."""
