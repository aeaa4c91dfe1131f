"""Knobs from the command line: by the types that a rule says they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import coterie
from coterie.aggregators import (
    Aggregator,
    Bucketing,
    CoordinateMedian,
    MultiKrum,
    NearestNeighbourMixing,
)
from coterie.cli.options.registered import knobs_of
from coterie.errors import KnobError
from coterie.methods import METHODS, FedAvg
from coterie.registry import Registry, RunSizes
from coterie.rules import RULES

RUN = RunSizes(10, {"a": 20, "b": 10, "c": 30, "d": 5, "e": 8}, steps=60)


@dataclass(frozen=True)
class Everything:
    """Take a knob of each kind."""

    whole: int = 1
    share: float = 0.5
    yes: bool = True
    word: str = ""
    kind: Literal["a", 2] = "a"
    maybe: float | None = None
    pair: tuple[float, ...] = ()
    by_name: Mapping[str, float] | None = None
    anything: Any = None
    call: Sequence[int] | None = None
    names: Sequence[str] | None = None


def test_options_and_pairs_are_knobs_together() -> None:
    knobs = knobs_of(RULES.entry("bc"), ["warm_up=false", "start=zero"], alpha="0.3", beta=None)
    assert knobs == {"alpha": 0.3, "warm_up": False, "start": "zero"}


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("whole=3", 3),
        ("share=1e-3", 1e-3),
        ("yes=false", False),
        ("word=3", "3"),
        ("kind=2", 2),
        ("maybe=none", None),
        ("maybe=2", 2.0),
        ("pair=(0.5, 1)", (0.5, 1)),
        ('by_name={"a": 0.5, "b": 0.5}', {"a": 0.5, "b": 0.5}),
        ("anything=[1]", [1]),
        ("anything=a=b", "a=b"),
        ("names=2.bias", ("2.bias",)),
        ("names=ward 3, 2", ("ward 3", "2")),
        ("names=['a, b']", ["a, b"]),
        ("names=none", None),
    ],
)
def test_a_knob_has_the_type_of_its_field(pair: str, value: object) -> None:
    registry: Registry[Any] = Registry("thing", "coterie.nothing")
    registry.register("all", Everything)
    ((name, knob),) = knobs_of(registry.entry("all"), [pair]).items()
    assert name == pair.partition("=")[0]
    assert knob == value
    assert type(knob) is type(value)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("whole=1.5", "`--knob whole` must be a whole number, got '1.5'"),
        ("maybe=many", "`--knob maybe` must be a number or none, got 'many'"),
        ("kind=c", '`--knob kind` must be "a" or "2", got \'c\''),
        ("by_name=3", "`--knob by_name` must be a mapping like"),
        ("pair=many", "`--knob pair` must be a list like (1, 2), got 'many'"),
        ("call=many", "`--knob call` must be a list like (1, 2) or none, got 'many'"),
        ("other=3", "`--knob other` does not fit 'all', which takes whole, share"),
    ],
)
def test_a_knob_of_another_type_is_refused(pair: str, words: str) -> None:
    registry: Registry[Any] = Registry("thing", "coterie.nothing")
    registry.register("all", Everything)
    with pytest.raises(KnobError) as error:
        knobs_of(registry.entry("all"), [pair])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "aggregator"),
    [
        ("median", CoordinateMedian()),
        ("multi-krum", MultiKrum(2)),
        ("multi-krum(n_byzantine=1)", MultiKrum(1)),
        ("bucketing(size=3, then=multi-krum(n_byzantine=1))", Bucketing(3, MultiKrum(1))),
        ("mixing", NearestNeighbourMixing(2, CoordinateMedian())),
    ],
)
def test_an_aggregator_by_name(text: str, aggregator: Aggregator) -> None:
    entry = RULES.entry("wga")
    knobs = knobs_of(entry, [f"aggregator={text}"], alpha="auto", beta=None)
    assert entry.build(knobs, RUN) == coterie.WeightedAveraging("auto", aggregator=aggregator)
    with pytest.raises(KnobError, match=r"must be an aggregator \(mean, .*\) or none"):
        knobs_of(entry, ["aggregator=krum(2"])
    assert knobs_of(entry, ["aggregator=none"]) == {"aggregator": None}


def test_a_method_takes_an_aggregator_by_name() -> None:
    entry = METHODS.entry("fedavg")
    assert entry.build(knobs_of(entry, ["aggregator=median"]), RUN) == FedAvg(
        aggregator=CoordinateMedian()
    )
