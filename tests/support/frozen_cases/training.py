"""Models, optimizers, runs that are resumed, and many runs at once."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.frozen_cases.cases import case
from tests.support.frozen_cases.library import Users, flare, make, numbers_of, told_of, train_many
from tests.support.frozen_cases.methods import METHODS
from tests.support.frozen_cases.problems import (
    LOSSES,
    MODELS,
    TAU,
    a_run,
    falling,
    network,
    users,
    with_bad_peer,
)
from tests.support.frozen_cases.rules import PLAIN, ROWS, Making
from torch import nn
from torch.nn import functional as f
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau


def models_and_optimizers() -> None:
    """Add every kind of model, optimizer and schedule."""
    for model in MODELS:
        rules = {
            "averaging": PLAIN["averaging, tau"],
            "correction": PLAIN["correction"],
            "first order": ROWS["first order"],
        }
        for name, rule in rules.items():

            @case(f"{model}: {name}", draws="dropout" in model)
            def _(model: str = model, rule: Making = rule) -> Any:
                return a_run(rule(()), model, steps=6, measure=True)

    for model in ("batch norm, dropout", "batch norm", "dropout"):

        @case(f"{model}: guarded", draws="dropout" in model)
        def _(model: str = model) -> Any:
            everyone = users(kind=MODELS[model][1], validation=20)
            return a_run(
                PLAIN["averaging"](()), model, everyone, guard="held-out", optimizer=Adam, lr=0.02
            )

        @case(f"{model}: FedAvg", draws="dropout" in model)
        def _(model: str = model) -> Any:
            return a_run(make("FedAvg", local_steps=2), model, steps=2)

        @case(f"{model}: in evaluation mode")
        def _(model: str = model) -> Any:
            return a_run(PLAIN["correction"](()), model, prepare=lambda made: made.eval())

    for name in ("averaging", "correction, half from zero", "mirror"):

        @case(f"double: {name}")
        def _(rule: Making = (PLAIN | ROWS)[name]) -> Any:
            everyone = users(dtype=torch.float64, validation=15)
            return a_run(
                rule(()), everyone=everyone, prepare=lambda made: made.double(), measure=True
            )

    def groups(model: nn.Module) -> Any:
        first, second = model[0], model[2]  # type: ignore[index]  # a sequence of layers
        rates = [
            {"params": first.parameters(), "lr": 0.02},
            {"params": second.parameters(), "momentum": 0.8},
        ]
        return SGD(rates, lr=0.05, weight_decay=0.02)

    def a_part(model: nn.Module) -> Any:
        return Adam(model[2].parameters(), lr=0.05, betas=(0.8, 0.9))  # type: ignore[index]  # a sequence

    optimizers: dict[str, dict[str, Any]] = {
        "momentum": {"optimizer": functools.partial(SGD, momentum=0.9, nesterov=True)},
        "Adam": {"optimizer": Adam, "lr": 0.03},
        "Adam by default": {"optimizer": None, "lr": None},
        "AdamW, cosine": {
            "optimizer": AdamW,
            "scheduler": functools.partial(CosineAnnealingLR, T_max=8),
        },
        "RMSprop": {"optimizer": RMSprop, "lr": 0.01},
        "groups": {"optimizer of": groups},
        "groups, falling": {
            "optimizer of": groups,
            "scheduler": functools.partial(ExponentialLR, gamma=0.7),
        },
        "a part": {"optimizer of": a_part},
        "cycle": {"scheduler": functools.partial(OneCycleLR, max_lr=0.3, total_steps=9)},
        "plateau": {
            "lr": 0.9,
            "scheduler": functools.partial(ReduceLROnPlateau, patience=0, factor=0.3),
            "everyone": users(validation=15),
        },
    }
    for name, options in optimizers.items():
        for rule_name in ("averaging, tau", "correction"):

            @case(f"{name}: {rule_name}, optimizer")
            def _(options: dict[str, Any] = options, rule: Making = PLAIN[rule_name]) -> Any:
                return a_run(rule(()), **options)

    @case("autocast: averaging", bits=True)
    def _() -> Any:
        return a_run(PLAIN["averaging"](()), passing=make("passing", autocast=torch.bfloat16))

    @case("autocast: mirror, conv, channels last", bits=True)
    def _() -> Any:
        passing = make("passing", autocast=torch.bfloat16, channels_last=True)
        return a_run(ROWS["mirror"](()), "conv", passing=passing)

    @case("channels last: correction, conv")
    def _() -> Any:
        return a_run(PLAIN["correction"](()), "conv", passing=make("passing", channels_last=True))

    @case("seeds and batches: averaging")
    def _() -> Any:
        return {
            f"{s}, {b}": a_run(PLAIN["averaging"](()), seed=s, batch_size=b)
            for s in (0, -3)
            for b in (1, 64)
        }


def half_and_half(rule: Callable[[], Any], everyone: Callable[[], Users], **options: Any) -> Any:
    """Return a run that was stopped half way and taken up again."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "steps": 10,
            "checkpoint_every": 4,
            "evaluate_every": 2,
        } | options
        half = settings["steps"] // 2
        settings |= {"out": Path(folder) / "run"}
        stopped = a_run(
            rule(),
            everyone=everyone(),
            callbacks=[lambda step: told_of(step)[0] == half],
            **settings,
        )
        assert numbers_of(stopped)["step"] == half
        return a_run(rule(), everyone=everyone(), resume=True, **settings)


def resumed() -> None:
    """Add runs that were stopped half way and taken up again."""
    adam: dict[str, Any] = {
        "optimizer": Adam,
        "lr": 0.05,
        "scheduler": functools.partial(ExponentialLR, gamma=0.8),
    }
    momentum = {"optimizer": functools.partial(SGD, momentum=0.9)}
    held_out = functools.partial(users, validation=15)
    runs: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "alone": (lambda: make("alone"), adam),
        "averaging": (lambda: make("averaging", 0.7, TAU), momentum),
        "correction": (lambda: make("correction", 0.7, 0.1), adam),
        "correction, falling": (
            lambda: make("correction", falling, falling),
            momentum | {"measure": True},
        ),
        "first order": (lambda: make("first order"), adam),
        "erosion": (lambda: make("erosion"), {}),
        "trimmed": (lambda: make("averaging", 0.7, pool=make("trimmed", f=1)), {}),
        "auto": (lambda: make("averaging", "auto"), {}),
        "adaptive": (lambda: make("adaptive", single=True), momentum),
        "captured": (lambda: make("correction", 0.7, 0.1), adam | {"capture": True}),
        "guarded": (lambda: make("averaging", 0.95), adam | {"guard": "held-out"}),
        "stream averaging": (lambda: make("stream averaging", horizon=30), {"steps": 24}),
        "plateau": (
            lambda: make("averaging", 0.5),
            {"scheduler": functools.partial(ReduceLROnPlateau, patience=0)},
        ),
        **{
            name: (METHODS[name], {"steps": 4})
            for name in ("FedAvg", "Ditto", "SAGA", "Scaffold", "FedFomo")
        },
        "Waffle": (METHODS["Waffle"], {"steps": 3}),
    }
    for name, (rule, options) in runs.items():

        @case(f"resumed: {name}")
        def _(rule: Callable[[], Any] = rule, options: dict[str, Any] = options) -> Any:
            return half_and_half(rule, held_out, **options)

    @case("resumed: left out")
    def _() -> Any:
        return half_and_half(lambda: make("correction", 0.7, 0.1), with_bad_peer, **adam)

    @case("resumed: batch norm, dropout", draws=True)
    def _() -> Any:
        everyone = functools.partial(users, kind="images", validation=15)
        return half_and_half(
            lambda: make("correction", 0.7, 0.1),
            everyone,
            model="batch norm, dropout",
            lr=0.03,
            **momentum,
        )

    @case("resumed: flare")
    def _() -> Any:
        return half_and_half(lambda: make("mirror"), held_out, engine=flare)


def many() -> None:
    """Add many runs at once."""

    def mixed() -> list[dict[str, Any]]:
        one, other = users(validation=15), users((7, 12, 19), shift=1.0)
        short = [
            make("averaging", 0.5),
            make("correction", 0.8, 0.1),
            make("alone"),
            make("adaptive", single=True),
        ]
        asked: list[dict[str, Any]] = [
            {"users": one, "rule": rule(one), "seed": k % 3, "lr": (0.05, 0.1)[k % 2]}
            for k, rule in enumerate(PLAIN.values())
        ]
        asked += [{"users": other, "rule": rule, "seed": 4} for rule in short]
        asked += [
            {"users": one, "rule": make("averaging", 0.4), "model": network(seed=9), "seed": 1},
            {"users": one, "rule": make("averaging", "auto")},
            {"users": one, "rule": make("averaging", 0.5, pool=make("median")), "seed": 2},
            {"users": one, "rule": make("first order"), "seed": 2},
            {"users": one, "rule": make("FedAvg", local_steps=2), "optimizer": SGD},
            {
                "users": with_bad_peer(3, 9, 15, 21),
                "rule": make("correction", 0.7, 0.1),
                "lr": 0.05,
            },
        ]
        return asked

    optimizers: dict[str, dict[str, Any]] = {
        "SGD": {"optimizer": SGD},
        "momentum, falling": {
            "optimizer": functools.partial(SGD, momentum=0.9),
            "scheduler": functools.partial(ExponentialLR, gamma=0.8),
        },
        "Adam": {"optimizer": Adam},
    }
    for name, options in optimizers.items():

        @case(f"many: {name}")
        def _(options: dict[str, Any] = options) -> Any:
            wanted = mixed()
            if options["optimizer"] is not SGD:
                wanted = [each for each in wanted if "optimizer" not in each]
            settings: dict[str, Any] = {
                "lr": 0.05,
                "steps": 7,
                "batch_size": 6,
                "evaluate_every": 3,
            } | options
            runs = train_many(network(), f.cross_entropy, wanted, **settings)
            return {f"{k}": run for k, run in enumerate(runs)}

    for model in ("regression", "conv", "tokens", "tied", "batch norm, dropout"):

        @case(f"many: {model}", draws="dropout" in model)
        def _(model: str = model) -> Any:
            kind = MODELS[model][1]
            everyone = users(kind=kind, validation=8)
            rules = [PLAIN[name](()) for name in ("averaging, tau", "correction", "alone")]
            wanted = [{"users": everyone, "rule": rule, "seed": k} for k, rule in enumerate(rules)]
            settings: dict[str, Any] = {
                "lr": 0.05,
                "steps": 6,
                "batch_size": 6,
                "evaluate_every": 3,
            }
            runs = train_many(network(model), LOSSES.get(kind, f.cross_entropy), wanted, **settings)
            return {f"{k}": run for k, run in enumerate(runs)}
