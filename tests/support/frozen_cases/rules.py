"""Every rule and aggregator, with all peers together, one by one, over streams and under attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tests.support.frozen_cases.cases import case
from tests.support.frozen_cases.library import Users, attacked, make, one_by_one
from tests.support.frozen_cases.problems import TAU, a_run, falling, labelled, normal, users
from torch import Tensor
from torch.optim import Adam

Making: TypeAlias = Callable[[Users], Any]
"""A rule for some users."""
AGGREGATORS: dict[str, Callable[[], Any]] = {
    "mean": lambda: make("mean"),
    "median": lambda: make("median"),
    "trimmed": lambda: make("trimmed", f=1),
    "geometric": lambda: make("geometric"),
    "krum": lambda: make("krum", f=1),
    "multi-krum": lambda: make("multi-krum", f=1),
    "multi-krum, two": lambda: make("multi-krum", f=1, m=2),
    "clipping": lambda: make("clipping", radius=0.3),
    "clipping once": lambda: make("clipping", radius=0.5, iterations=1),
    "mixing, trimmed": lambda: make("mixing", f=1, then=make("trimmed", f=1)),
    "mixing, krum": lambda: make("mixing", f=1, then=make("krum", f=1)),
    "bucketing, median": lambda: make("bucketing", size=2, then=make("median")),
    "bucketing, geometric": lambda: make("bucketing", size=2, then=make("geometric"), seed=3),
}
ROWS: dict[str, Making] = {
    "cosine": lambda _: make("cosine", alpha=0.6),
    "gate": lambda _: make("gate", alpha=0.7),
    "erosion": lambda _: make("erosion", penalty=0.03),
    "mirror": lambda _: make("mirror", rate=0.5),
    "first order": lambda _: make("first order", memory=0.7),
}
PLAIN: dict[str, Making] = {
    "alone": lambda _: make("alone"),
    "averaging": lambda _: make("averaging", 0.6),
    "averaging, tau": lambda _: make("averaging", 0.7, TAU),
    "averaging, falling": lambda _: make("averaging", falling),
    "averaging, all": lambda _: make("averaging", 1.0),
    "correction": lambda _: make("correction", 0.7, 0.1),
    "correction, tau": lambda _: make("correction", 0.8, 0.2, TAU),
    "correction, half from zero": lambda _: make(
        "correction", 0.6, 0.2, correction=0.5, start="zero"
    ),
    "correction, paper": lambda _: make("correction", 0.9, 0.1, warm_up=False),
    "correction, falling": lambda _: make("correction", falling, falling, correction=0.7),
}
OTHER: dict[str, Making] = {
    "pooled": lambda everyone: make("pooled", everyone[0], everyone[1:]),
    "data interpolation": lambda everyone: make(
        "data interpolation", everyone[0], everyone[1:], mixing=0.4
    ),
    "oracle": lambda _: make("oracle", alpha=0.7, bias=lambda x: 0.05 * x, tau=TAU),
    **{
        f"averaging, {name}": lambda _, pool=pool: make("averaging", 0.7, pool=pool())  # type: ignore[misc]
        for name, pool in AGGREGATORS.items()
    },
    "correction, trimmed": lambda _: make("correction", 0.8, 0.2, pool=make("trimmed", f=1)),
    "correction, geometric": lambda _: make(
        "correction", falling, 0.2, start="zero", pool=make("geometric")
    ),
}
AUTO: dict[str, Making] = {
    "averaging, auto": lambda _: make("averaging", "auto"),
    "averaging, auto with tau": lambda _: make("averaging", "auto", TAU),
    "averaging, auto with aggregator": lambda _: make("averaging", "auto", pool=make("median")),
    "correction, auto": lambda _: make("correction", "auto", "auto"),
    "correction, auto alpha": lambda _: make("correction", "auto", 0.2, TAU),
    "correction, auto beta": lambda _: make("correction", 0.7, "auto", warm_up=False),
}


def rules_in_process() -> None:
    """Add every rule, with all peers together and one by one."""
    for name, rule in (PLAIN | ROWS | OTHER).items():
        # aggregators like many
        sizes = (20, 26, 7, 15, 21, 12, 18) if name in OTHER else (20, 26, 7, 15, 21)

        @case(f"in process: {name}", bits="bucketing" in name)
        def _(rule: Making = rule, sizes: Sequence[int] = sizes) -> Any:
            everyone = users(sizes)
            return a_run(rule(everyone), everyone=everyone, measure=True)

        @case(f"one by one: {name}", bits="bucketing" in name)
        def _(rule: Making = rule, sizes: Sequence[int] = sizes) -> Any:
            everyone = users(sizes)
            return a_run(rule(everyone), everyone=everyone, engine=one_by_one, steps=5)

    for name, rule in AUTO.items():

        @case(f"in process: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), optimizer=Adam, lr=0.02)

        @case(f"one by one: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), engine=one_by_one, steps=4)

    for single in (False, True):

        @case(f"in process: adaptive, {'single' if single else 'mixed'}")
        def _(single: bool = single) -> Any:
            return a_run(make("adaptive", single=single), model="linear", steps=16, measure=True)

    @case("in process: adaptive, held out")
    def _() -> Any:
        everyone = users((14, 26, 15, 21), validation=10, shift=1.0)
        return a_run(
            make("adaptive", single=True), everyone=everyone, steps=12, optimizer=Adam, lr=0.05
        )

    @case("in process: adaptive, batch norm")
    def _() -> Any:
        everyone = users((14, 15, 21), kind="images")
        return a_run(make("adaptive", single=True), "batch norm", everyone, steps=6)

    @case("in process: nothing said")
    def _() -> Any:
        return a_run(None, "regression", users((8, 20, 11), kind="numbers"), steps=6)


def fresh(name: str, shift: float) -> Any:
    """Return a user who draws fresh examples."""

    def draw(size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([seed, step])
        inputs = torch.from_numpy(random.standard_normal((size, 5)))
        truth = normal(5, 1, seed=7) + shift
        return inputs.float(), (
            inputs @ truth + torch.from_numpy(random.standard_normal((size, 1)))
        ).float()

    return make("stream", name, draw, test=labelled(12, 92, kind="numbers"))


def streams() -> None:
    """Add users with fresh samples."""
    for name, rule in {
        "stream averaging": lambda: make("stream averaging", horizon=40),
        "adaptive": lambda: make("adaptive"),
        "averaging": lambda: make("averaging", 0.5),
        "correction, auto": lambda: make("correction", "auto", "auto"),
        "first order": lambda: make("first order"),
    }.items():

        @case(f"stream: {name}")
        def _(rule: Callable[[], Any] = rule) -> Any:
            everyone = [
                fresh(who, shift)
                for who, shift in {"me": 0.0, "a": 0.02, "b": 0.1, "c": 2.0}.items()
            ]
            return a_run(
                rule(), "regression", everyone, steps=30, lr=0.02, batch_size=4, measure=True
            )

    @case("in process: stream averaging")
    def _() -> Any:
        return a_run(make("stream averaging", horizon=30), steps=26, evaluate_every=5)

    @case("one by one: stream averaging")
    def _() -> Any:
        return a_run(make("stream averaging", horizon=30), steps=22, engine=one_by_one)


def under_attack() -> None:
    """Add the attacks."""
    several: dict[str, Callable[[], Any]] = {
        "scaled": lambda: make("scaled", factor=-5.0),
        "sign flip": lambda: make("sign flip"),
        "inner product": lambda: make("inner product", epsilon=0.3),
        "little": lambda: make("little"),
        "little, z": lambda: make("little", z=0.7),
        "mimic": lambda: make("mimic", row=1),
        "drift": lambda: make("drift", z=1.2, period=3),
    }
    for name, attack in several.items():
        for by, rule in {
            "averaging": PLAIN["averaging"],
            "trimmed": OTHER["correction, trimmed"],
        }.items():

            @case(f"attacked: {name}, {by}")
            def _(attack: Callable[[], Any] = attack, rule: Making = rule) -> Any:
                return a_run(rule(()), engine=attacked(["b", "d"], attack()))

    @case("attacked: labels")
    def _() -> Any:
        me, *peers = users()
        everyone = [me, make("flipped", peers[0], 3), *peers[1:]]
        return a_run(make("averaging", 0.7, pool=make("median")), everyone=everyone)
