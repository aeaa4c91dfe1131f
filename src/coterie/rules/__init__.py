"""Rules: from the gradients of one step to the direction that user 0 follows.

An algorithm is a file.
"""

from collections.abc import Callable
from typing import Any

from coterie.registry import Computed, Registry
from coterie.rules.bias_correction import BiasCorrection, OracleCorrection
from coterie.rules.rule import Capturable, FormulaRule, Knob, Rule, State, weights_in
from coterie.rules.similarity import (
    CosineSimilarity,
    FirstOrder,
    MirrorDescent,
    SimilarityGate,
    WeightErosion,
)
from coterie.rules.streams import StreamAveraging
from coterie.rules.weighted_averaging import Alone, WeightedAveraging

__all__ = [
    "RULES",
    "Alone",
    "BiasCorrection",
    "Capturable",
    "FormulaRule",
    "Knob",
    "OracleCorrection",
    "Rule",
    "State",
    "WeightedAveraging",
    "register_rule",
    "weights_in",
]

RULES: Registry[Callable[..., Any]] = Registry("rule", "coterie.rules")
"""What makes a rule from knobs.

Its class, or a function. What chooses a rule before the first step is here too.
"""
register_rule = RULES.register

_HALF = {"alpha": 0.5}
_ALPHAS = [{"alpha": alpha} for alpha in (0.1, 0.3, 0.6, 0.9)]
_POOLED = {
    "alpha": Computed(lambda run: run.peer_examples / (run.peer_examples + run.own_examples)),
    "tau": Computed(lambda run: {name: n / run.peer_examples for name, n in run.sizes.items()}),
}
_PAPER_ALPHAS = (  # the paper's N/(N + 1), and half of it
    Computed(lambda run: len(run.peers) / (len(run.peers) + 1)),
    Computed(lambda run: 0.5 * len(run.peers) / (len(run.peers) + 1)),
)
_CORRECTED = [{"alpha": alpha, "beta": beta} for alpha in _PAPER_ALPHAS for beta in (0.01, 0.1)]
_PENALTIES = [{"penalty": penalty} for penalty in (0.001, 0.01, 0.03, 0.1)]

RULES.register("alone", Alone)
_ALIKE = "Weigh everybody's examples alike."
RULES.register(
    "pooled", WeightedAveraging, defaults=_POOLED, fixed=list(_POOLED), description=_ALIKE
)
RULES.register("wga", WeightedAveraging, defaults=_HALF, benchmark_settings=_ALPHAS)
RULES.register("bc", BiasCorrection, defaults=_HALF | {"beta": 0.01}, benchmark_settings=_CORRECTED)
RULES.register("stream", StreamAveraging, defaults={"horizon": Computed(lambda run: run.steps)})
RULES.register("cosine", CosineSimilarity, defaults=_HALF, benchmark_settings=_ALPHAS)
RULES.register("gate", SimilarityGate, defaults=_HALF, benchmark_settings=_ALPHAS)
RULES.register(
    "first-order", FirstOrder, benchmark_settings=[{"memory": m} for m in (0.0, 0.5, 0.9, 0.99)]
)
RULES.register("weight-erosion", WeightErosion, benchmark_settings=_PENALTIES)
RULES.register(
    "meritfed", MirrorDescent, benchmark_settings=[{"rate": rate} for rate in (0.01, 0.1, 0.3, 1.0)]
)
