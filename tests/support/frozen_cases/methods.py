"""The methods that rules are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.support.frozen_cases.cases import Parts, case, parts_of
from tests.support.frozen_cases.library import make, one_by_one
from tests.support.frozen_cases.problems import a_run, users
from torch.optim.lr_scheduler import ExponentialLR

METHODS: dict[str, Callable[[], Any]] = {
    "APFL": lambda: make("APFL", local_steps=2),
    "APFL, not learned": lambda: make("APFL", local_steps=1, mixing=0.3, learned=False),
    "Ditto": lambda: make(
        "Ditto", penalty=0.3, together=make("FedAvg", local_steps=2), personal_steps=2
    ),
    "Ditto, robust": lambda: make("Ditto", together=make("FedAvg", pool=make("trimmed", f=1))),
    "FedAvg": lambda: make("FedAvg", local_steps=3),
    "FedAvg, equal": lambda: make("FedAvg", local_steps=2, shares="equal"),
    "FedAvg, median": lambda: make("FedAvg", local_steps=2, pool=make("median")),
    "FedFomo": lambda: make("FedFomo", local_steps=2),
    "FedFomo, mine": lambda: make("FedFomo", local_steps=2, start="mine"),
    "FineTuning": lambda: make("FineTuning", rounds=1, together=make("FedAvg", local_steps=2)),
    "FineTuning, Scaffold": lambda: make(
        "FineTuning", rounds=2, together=make("Scaffold", local_steps=2)
    ),
    "HypCluster": lambda: make("HypCluster", clusters=1, local_steps=2),
    "HypCluster, three": lambda: make("HypCluster", clusters=3, local_steps=2, spread=0.3),
    "L2GD": lambda: make("L2GD", local_steps=2, penalty=0.3, probability=0.4),
    "MVR": lambda: make("MVR", local_steps=3, rate=0.2),
    "Mapper": lambda: make("Mapper", local_steps=2),
    "Mime": lambda: make("Mime", local_steps=2, momentum=0.8),
    "Mime, lite": lambda: make("Mime", local_steps=2, lite=True),
    "PerFedAvg": lambda: make("PerFedAvg", local_steps=2, inner_lr=0.05),
    "PerFedAvg, Hessian-free": lambda: make(
        "PerFedAvg", local_steps=2, inner_lr=0.05, difference=0.01
    ),
    "SAGA": lambda: make("SAGA", local_steps=4),
    "SAGA, biased": lambda: make("SAGA", local_steps=4, biased=True),
    "SVRG": lambda: make("SVRG", local_steps=3),
    "Scaffold": lambda: make("Scaffold", local_steps=2),
    "Scaffold, option 1": lambda: make("Scaffold", local_steps=2, option=1, server_lr=0.7),
    "Selfish": lambda: make("Selfish", local_steps=2, internal=("b",)),
    "Selfish, weighed": lambda: make("Selfish", local_steps=2, internal=("a", "d"), alpha=0.3),
    "UserCentric": lambda: make("UserCentric", local_steps=2, blocks=3),
    "UserCentric, clusters": lambda: make("UserCentric", local_steps=2, clusters=2, blocks=2),
    "Waffle": lambda: make("Waffle", rounds=3, local_steps=2),
    "AFL": lambda: make("AFL", local_steps=2, weight_lr=0.1),
    "FedPer": lambda: make("FedPer", local_steps=2),
    "FedProx": lambda: make("FedProx", local_steps=2, penalty=0.3),
    "FedRep": lambda: make("FedRep", local_steps=1, head_steps=2),
    "PFedMe": lambda: make("PFedMe", local_steps=2, inner_steps=2),
    "QFFL": lambda: make("QFFL", local_steps=2, q=1.5),
    "Sampled": lambda: make("Sampled", make("Scaffold", local_steps=2), peers=2),
}


def federated_methods() -> None:
    """Add every method."""
    for name, method in METHODS.items():

        @case(f"method: {name}", draws="three" in name)
        def _(method: Callable[[], Any] = method) -> Any:
            return a_run(
                method(), everyone=users(validation=10, shift=0.8), steps=3, evaluate_every=1
            )

    for name in ("FedAvg", "Ditto", "Scaffold, option 1", "SAGA"):

        @case(f"method, tokens: {name}")
        def _(method: Callable[[], Any] = METHODS[name]) -> Any:
            return a_run(
                method(), "tokens", steps=2, scheduler=functools.partial(ExponentialLR, gamma=0.5)
            )

        @case(f"method, one by one: {name}")
        def _(method: Callable[[], Any] = METHODS[name]) -> Any:
            return a_run(method(), steps=2, engine=one_by_one)

    @case("method: averaging of means")
    def _() -> Parts:
        grains = {
            grain: make("averaging weights", [9, 20, 40], 1.0, 0.3, grain)
            for grain in ("fine", "coarse")
        }
        return parts_of({}, **grains)
