"""Other engines, captured steps, the guard, and peers that are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.support.frozen_cases.cases import case
from tests.support.frozen_cases.library import (
    engine_of,
    flare,
    in_process,
    make,
    one_by_one,
    oracle_of,
    quadratics,
    stopped_run,
    train,
)
from tests.support.frozen_cases.problems import a_run, labelled, spoiled, users, with_bad_peer
from tests.support.frozen_cases.rules import AGGREGATORS, AUTO, OTHER, PLAIN, ROWS, Making
from torch import nn
from torch.nn import functional as f
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR


def other_engines() -> None:
    """Add quadratics and sites; runs over processes are compared with those of one, to the bit."""
    for name, rule in (
        PLAIN | ROWS | AUTO | {"averaging, trimmed": OTHER["averaging, trimmed"]}
    ).items():

        @case(f"flare: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), engine=flare, steps=6)

    for name in ("averaging, tau", "correction", "mirror"):

        @case(f"flare: {name}, batch norm", draws=True)
        def _(rule: Making = (PLAIN | ROWS)[name]) -> Any:
            return a_run(rule(()), "batch norm, dropout", engine=flare, steps=5)

    for name, rule in (PLAIN | ROWS | {"averaging, trimmed": OTHER["averaging, trimmed"]}).items():
        if "tau" in name:
            continue  # of peers with other names

        @case(f"quadratic: {name}")
        def _(rule: Making = rule) -> Any:
            return quadratic_run(lambda _: rule(()))

    @case("quadratic: oracle", bits=True)
    def _() -> Any:
        return quadratic_run(lambda problem: oracle_of(problem, 0.7, noise=0.2, seed=3))

    @case("quadratic: correction, drift")
    def _() -> Any:
        return quadratic_run(lambda _: make("correction", 0.7, 0.1), drift=0.1)


def quadratic_run(rule: Callable[[Any], Any], **more: Any) -> Any:
    """Return a run on noisy quadratics."""
    own = {"curvature": [1.0, 0.5, 2.0], "optimum": [0.0, 1.0, -1.0], "noise": 0.3}
    peers = [
        {"curvature": 1 + 0.2 * k, "optimum": 0.3 * k, "noise": 0.1 + 0.1 * k} for k in range(4)
    ]
    problem = quadratics(own, peers, **more)
    model = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    model.load_state_dict({"weight": torch.tensor([[-1.0], [2.0], [0.5]])})
    me = make(
        "user", "0", torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    )
    options: dict[str, Any] = {"optimizer": SGD, "lr": 0.1, "steps": 12, "evaluate_every": 4}
    return train(model, f.mse_loss, [me], rule(problem), engine=engine_of(problem, 5), **options)


def captured_and_guarded() -> None:
    """Add steps as one program, the guard, and both."""
    for name, rule in (PLAIN | ROWS).items():

        @case(f"captured: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), capture=True, steps=12, evaluate_every=5)

        if name == "alone":
            continue

        @case(f"guarded: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), everyone=users(validation=30), guard="held-out", measure=True)

    options: dict[str, dict[str, Any]] = {
        "Adam, falling": {
            "optimizer": Adam,
            "scheduler": functools.partial(ExponentialLR, gamma=0.8),
        },
        "momentum, cycle": {
            "optimizer": functools.partial(SGD, momentum=0.9, weight_decay=0.01),
            "scheduler": functools.partial(CosineAnnealingLR, T_max=12),
        },
    }
    for name, more in options.items():

        @case(f"captured: correction, {name}")
        def _(more: dict[str, Any] = more) -> Any:
            return a_run(PLAIN["correction"](()), capture=True, steps=12, **more)

    for name, model in {
        "tokens": "tokens",
        "conv": "conv",
        "tied": "tied",
        "regression": "regression",
    }.items():

        @case(f"captured: correction, {name}")
        def _(model: str = model) -> Any:
            return a_run(PLAIN["correction"](()), model, capture=True)

    for capture in (False, True):

        @case(f"guarded: restarts{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = users(validation=120)
            everyone = [everyone[0], *(make("flipped", peer, 3) for peer in everyone[1:])]
            more: dict[str, Any] = {
                "optimizer": Adam,
                "lr": 0.05,
                "capture": capture,
                "guard": "auto",
            }
            return a_run(
                make("averaging", 0.99), everyone=everyone, steps=20, evaluate_every=4, **more
            )

        @case(f"guarded: alone is served{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = users(validation=120)
            everyone = [everyone[0], *(make("flipped", peer, 3) for peer in everyone[1:])]
            more: dict[str, Any] = {"capture": capture, "guard": "held-out", "evaluate_every": 9}
            return a_run(make("averaging", 0.99), everyone=everyone, steps=9, **more)

        @case(f"left out: correction{', captured' * capture}, Adam")
        def _(capture: bool = capture) -> Any:
            return a_run(
                PLAIN["correction"](()), everyone=with_bad_peer(), capture=capture, optimizer=Adam
            )

        @case(f"stopped: own gradient{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = [make("user", "me", *spoiled(labelled(90, 11), 55)), *users()[1:]]
            rule = PLAIN["averaging"](())
            return stopped_run(lambda: a_run(rule, everyone=everyone, capture=capture, steps=90))


def left_out() -> None:
    """Add a peer with gradients that are not finite at some steps."""
    chosen = (
        "averaging, tau",
        "correction, falling",
        "cosine",
        "gate",
        "erosion",
        "mirror",
        "first order",
    )
    for name in chosen:
        rule = (PLAIN | ROWS)[name]
        for where, engine in {"in process": in_process, "flare": flare}.items():

            @case(f"left out: {name}, {where}")
            def _(rule: Making = rule, engine: Any = engine) -> Any:
                return a_run(rule(()), everyone=with_bad_peer(), engine=engine)

    for name in ("mean", "trimmed", "geometric", "krum", "mixing, trimmed", "bucketing, median"):
        # Of three rows one of which may be bad, Krum takes one of the two that are nearest: a tie.
        @case(f"left out: {name}", bits="bucketing" in name or "krum" in name)
        def _(name: str = name) -> Any:
            return a_run(make("averaging", 0.7, pool=AGGREGATORS[name]()), everyone=with_bad_peer())

    @case("left out: one by one")
    def _() -> Any:
        return a_run(PLAIN["correction"](()), everyone=with_bad_peer(), engine=one_by_one)

    for name, method in {
        "FedAvg": {"local_steps": 2},
        "Scaffold": {"local_steps": 2},
        "Ditto": {},
    }.items():

        @case(f"left out: {name}")
        def _(name: str = name, knobs: dict[str, Any] = method) -> Any:
            return a_run(make(name, **knobs), everyone=with_bad_peer(), steps=3)

    @case("left out: averaging, auto")
    def _() -> Any:
        return a_run(AUTO["averaging, auto"](()), everyone=with_bad_peer())

    @case("left out: stream averaging")
    def _() -> Any:
        return a_run(
            make("stream averaging", horizon=30),
            everyone=with_bad_peer(),
            steps=24,
            evaluate_every=6,
        )
