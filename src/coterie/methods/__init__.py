"""The methods that coterie is compared with, over the same users, record and costs.

See docs/methods.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from coterie.errors import KnobError, did_you_mean
from coterie.methods.clients import Clients
from coterie.methods.clusters import HypCluster, UserCentric
from coterie.methods.corrections import AffPCL, AuxMom, AuxMVR, Mime, Scaffold
from coterie.methods.fair import AFL, QFFL
from coterie.methods.fedavg import FedAvg, FedProx, FineTuning, Sampled
from coterie.methods.interpolation import (
    averaging_error,
    averaging_weights,
    data_interpolation,
    interpolation_of_sizes,
)
from coterie.methods.mixtures import APFL, FedALA, Mapper
from coterie.methods.own_variance import MVR, SAGA, SVRG
from coterie.methods.personal import L2GD, Ditto, PerFedAvg, PFedMe
from coterie.methods.rounds import Method
from coterie.methods.shared_part import FedBN, FedPer, FedRep
from coterie.methods.weighting import FedAMP, FedFomo, Selfish, Waffle
from coterie.registry import Computed, Entry, Registry, RunSizes
from coterie.rules import RULES
from coterie.rules.similarity import MirrorDescent, WeightErosion

__all__ = [
    "AFL",
    "APFL",
    "L2GD",
    "METHODS",
    "MVR",
    "QFFL",
    "SAGA",
    "SVRG",
    "AffPCL",
    "AuxMVR",
    "AuxMom",
    "Clients",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedBN",
    "FedFomo",
    "FedPer",
    "FedProx",
    "FedRep",
    "FineTuning",
    "HypCluster",
    "Mapper",
    "Method",
    "Mime",
    "MirrorDescent",
    "PFedMe",
    "PerFedAvg",
    "Sampled",
    "Scaffold",
    "Selfish",
    "UserCentric",
    "Waffle",
    "WeightErosion",
    "averaging_error",
    "averaging_weights",
    "build",
    "data_interpolation",
    "entry_of",
    "register_method",
]

METHODS: Registry[Callable[..., Method]] = Registry("method", "coterie.methods")
register_method = METHODS.register

_FIVE = {"local_steps": 5}
_ROUNDS = {"rounds": Computed(lambda run: max(1, run.steps // 5)), **_FIVE}
_TOGETHER = FedAvg(5)


def _tuned_after(part: float) -> dict[str, Any]:
    """Return fine-tuning after a part of the rounds, of which one at least is left."""
    rounds = Computed(lambda run: max(1, min(round(part * run.steps / 5), run.steps // 5 - 1)))
    return {"rounds": rounds, "together": _TOGETHER}


_TUNED = [_tuned_after(part) for part in (0.3, 0.9)]
_FIVE_OR_TEN = [_FIVE, {"local_steps": 10}]
_HALF = {"method": _TOGETHER, "peers": Computed(lambda run: max(1, len(run.peers) // 2))}
_SAMPLES = [{"method": FedAvg(k)} for k in (1, 5)]
_MOMENTA = [{"momentum": m} for m in (0.0, 0.9)]
_DITTO = [{"penalty": p, "together": _TOGETHER, "personal_steps": 5} for p in (0.03, 0.3)]
_MIXINGS = [{"local_steps": 2, "mixings": mixings} for mixings in ((0.25, 0.5, 0.75), (0.5,))]
_SIZES = {
    "own_examples": Computed(lambda run: run.own_examples),
    "peers": Computed(lambda run: run.sizes),
}


def entry_of(name: str) -> Entry[Callable[..., Any]]:
    """Return the rule or the method that is registered by a name.

    Example:
        >>> entry_of("wga").thing.__name__, entry_of("fedavg").thing.__name__
        ('WeightedAveraging', 'FedAvg')
    """
    if name in RULES:
        return RULES.entry(name)
    if name in METHODS:
        return METHODS.entry(name)
    raise KnobError(
        f"unknown rule {name!r}; the rules are {', '.join(RULES)}, and the methods"
        f" {', '.join(METHODS)}{did_you_mean(name, [*RULES, *METHODS])}"
    )


def build(name: str, knobs: Mapping[str, Any], run: RunSizes) -> Any:
    """Return a rule, or a method, whose rounds are the steps of the run.

    Example:
        >>> build("fedavg-tuned", {}, RunSizes(30, {"a": 100}, steps=100)).rounds
        30
    """
    entry = entry_of(name)
    made = entry.build(knobs, run)
    # Knobs of a method may depend on how many gradients user 0 computes in all its rounds.
    rounds = getattr(made, "gradients_a_round", 1)
    return made if rounds == 1 else entry.build(knobs, replace(run, steps=run.steps * rounds))


RULES.register(
    "data-interpolation",
    interpolation_of_sizes,
    description="Minimise a mixture of the own loss and the mean loss over everybody's examples.",
    defaults=_SIZES | {"mixing": 0.5},
    benchmark_settings=[{"mixing": mixing} for mixing in (0.1, 0.3, 0.6, 0.9)],
)
METHODS.register("fedavg", FedAvg, benchmark_settings=[{"local_steps": 1}, _FIVE])
METHODS.register("fedavg-tuned", FineTuning, defaults=_TUNED[0], benchmark_settings=_TUNED)
METHODS.register("fedavg-sampled", Sampled, defaults=_HALF, benchmark_settings=_SAMPLES)
METHODS.register(
    "fedprox", FedProx, benchmark_settings=[_FIVE | {"penalty": p} for p in (0.1, 1.0)]
)
METHODS.register(
    "afl", AFL, benchmark_settings=[{"weight_lr": rate, "averaged": True} for rate in (0.01, 0.1)]
)
METHODS.register("q-ffl", QFFL, benchmark_settings=[_FIVE | {"q": q} for q in (0.2, 1.0)])
METHODS.register(
    "per-fedavg",
    PerFedAvg,
    benchmark_settings=[{"local_steps": k, "inner_lr": 0.1} for k in (2, 5)],
)
METHODS.register("ditto", Ditto, benchmark_settings=_DITTO)
METHODS.register(
    "apfl", APFL, benchmark_settings=[_FIVE | {"learned": learned} for learned in (False, True)]
)
METHODS.register(
    "l2gd",
    L2GD,
    benchmark_settings=[_FIVE | {"penalty": p, "probability": 0.3} for p in (0.03, 0.3)],
)
METHODS.register("mapper", Mapper, benchmark_settings=_MIXINGS)
METHODS.register(
    "hyp-cluster", HypCluster, benchmark_settings=[_FIVE | {"clusters": q} for q in (2, 3)]
)
METHODS.register(
    "pfedme", PFedMe, benchmark_settings=[{"penalty": p, "inner_lr": 0.1} for p in (0.3, 1.0)]
)
METHODS.register("fedala", FedALA, benchmark_settings=[{"weight_lr": rate} for rate in (1.0, 10.0)])
METHODS.register(
    "fedamp",
    FedAMP,
    benchmark_settings=[{"penalty": p, "scale": s} for p, s in ((0.1, 1.0), (1.0, 10.0))],
)
METHODS.register("fedper", FedPer, benchmark_settings=[{"local_steps": 1}, _FIVE])
METHODS.register("fedrep", FedRep, benchmark_settings=[{"local_steps": k} for k in (1, 5)])
METHODS.register("fedbn", FedBN, benchmark_settings=[])  # no model of the benchmark has BatchNorm
METHODS.register("scaffold", Scaffold, benchmark_settings=[{"local_steps": k} for k in (3, 10)])
METHODS.register("mime", Mime, benchmark_settings=_MOMENTA)
METHODS.register(
    "mime-lite",
    Mime,
    description="Take Mime's steps without its correction, at half as many gradients.",
    defaults={"lite": True},
    benchmark_settings=_MOMENTA,
)
METHODS.register("affpcl", AffPCL, benchmark_settings=[{"alpha": alpha} for alpha in (0.5, 1.0)])
METHODS.register("auxmom", AuxMom, benchmark_settings=[{"rate": rate} for rate in (0.1, 0.5)])
METHODS.register("auxmvr", AuxMVR, benchmark_settings=[{"rate": rate} for rate in (0.1, 0.5)])
METHODS.register("svrg", SVRG, benchmark_settings=_FIVE_OR_TEN)
METHODS.register("saga", SAGA, benchmark_settings=_FIVE_OR_TEN)
METHODS.register(
    "sag",
    SAGA,
    description=(
        "Update one block's gradient in the table, and step by the table's mean: less noise, some"
        " bias."
    ),
    defaults={"biased": True},
    benchmark_settings=_FIVE_OR_TEN,
)
METHODS.register("mvr", MVR, benchmark_settings=[{"rate": rate} for rate in (0.03, 0.3)])
METHODS.register(
    "fedfomo", FedFomo, benchmark_settings=[{"start": start} for start in ("own", "mine")]
)
METHODS.register(
    "waffle", Waffle, defaults=_ROUNDS, benchmark_settings=[{"slope": s} for s in (1.6, 3.2)]
)
METHODS.register(
    "user-centric", UserCentric, benchmark_settings=[{"clusters": c} for c in (None, 2)]
)
METHODS.register("selfish", Selfish, benchmark_settings=[{"alpha": alpha} for alpha in (0.6, None)])
