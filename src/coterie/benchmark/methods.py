"""The methods compared.

Registered rules, methods and aggregators, and what the benchmark makes of them itself.
"""

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.aggregators import AGGREGATORS
from coterie.benchmark.contenders import (
    PLAIN_RATES,
    RATES,
    Contender,
    Knobs,
    MethodSetting,
    schedules,
)
from coterie.benchmark.tools import OURS, TOOLS, Tool
from coterie.errors import KnobError, did_you_mean
from coterie.methods import METHODS, entry_of
from coterie.registry import Computed, Entry
from coterie.rules import RULES

ALPHAS = (0.1, 0.3, 0.6, 0.9)
ROBUST = "wga-"
"""With the name of an aggregator behind it: weighted averaging with that aggregator."""

_POOLED = MethodSetting(Knobs(RULES.entry("pooled")))
_PLAIN = {
    name: MethodSetting(Knobs(RULES.entry(name)), lrs=PLAIN_RATES, plain_steps=True)
    for name in ("alone", "pooled")
}
_AUTO = {"alpha": "auto", "beta": "auto"}

VARIANTS: Mapping[str, tuple[MethodSetting, ...]] = {
    "fine-tuned": schedules(Knobs(RULES.entry("alone")), start=_POOLED)[:3],
    **{
        f"wga-{alpha:g}": (MethodSetting(Knobs(RULES.entry("wga"), {"alpha": alpha})),)
        for alpha in ALPHAS
    },
    "adaptive": (MethodSetting(Knobs(RULES.entry("adaptive")), lrs=RATES[:1], as_it_comes=True),),
    **{
        f"{name}-plain": (each, replace(each, lr_schedule="decreasing"))
        for name, each in _PLAIN.items()
    },
    "wga-auto": (MethodSetting(Knobs(RULES.entry("wga"), {"alpha": "auto"})),),
    "bc-auto": (MethodSetting(Knobs(RULES.entry("bc"), _AUTO)),),
}
"""Settings by name that are not those of one registered thing.

`fine-tuned`: pooled, then on alone. `wga-α`: weighted averaging with that α alone. `adaptive` has
candidates of its own in the place of settings. `alone-plain` and `pooled-plain` take plain steps as methods do:
what a method gains or loses beside them is not Adam's. `…-auto`: knobs by theory and measured
constants."""

DEFAULT = ("alone", "pooled", "fine-tuned", *(f"wga-{alpha:g}" for alpha in ALPHAS), "wga")
DEFAULT += ("adaptive", "bc", "alone-plain", "pooled-plain", *OURS, *TOOLS)
"""What `coterie bench` compares if nothing else is asked for.

Minutes of work, where all take hours.
"""


def names() -> list[str]:
    """Return the names of everything that can be compared."""
    registered = [
        prefix + name
        for prefix, registry in (("", RULES), (ROBUST, AGGREGATORS), ("", METHODS))
        for name in registry
        if registry.entry(name).benchmark_settings != []
    ]
    return list(dict.fromkeys((*DEFAULT, *VARIANTS, *registered)))


def contender(name: str) -> Contender | Tool:
    """Return what is compared under a name: settings of coterie to choose from, or a plain tool.

    A rule that says nothing of its `benchmark_settings` is tried with four schedules of the
    optimizer, a method with two: each then has as many settings to choose from as the others.

    Example:
        >>> from coterie.registry import RunSizes
        >>> [setting.label(RunSizes(10, {"a": 30}, 60)) for setting in contender("wga").settings[:2]]
        ['alpha 0.1, constant steps', 'alpha 0.3, constant steps']
    """
    if name not in names():
        hint = did_you_mean(name, names())
        raise KnobError(f"unknown method {name!r}; the methods are {', '.join(names())}{hint}")
    if name in (fitted := {**OURS, **TOOLS}):
        return fitted[name]
    if name in VARIANTS:
        return Contender(name, VARIANTS[name])
    if name in RULES:
        rule = RULES.entry(name)
        if rule.benchmark_settings is None:
            return Contender(name, schedules(Knobs(rule)))
        return Contender(
            name, tuple(MethodSetting(Knobs(rule, knobs)) for knobs in rule.benchmark_settings)
        )
    if name in METHODS:
        return Contender(name, _plain(METHODS.entry(name)))
    return Contender(name, _robust(AGGREGATORS.entry(name.removeprefix(ROBUST))))


def _plain(method: Entry[Any]) -> tuple[MethodSetting, ...]:
    if method.benchmark_settings is None:
        constant = MethodSetting(Knobs(method), lrs=PLAIN_RATES)
        return (constant, replace(constant, lr_schedule="decreasing"))
    return tuple(
        MethodSetting(Knobs(method, knobs), lrs=PLAIN_RATES) for knobs in method.benchmark_settings
    )


def _robust(aggregator: Entry[Any]) -> tuple[MethodSetting, ...]:
    """Return averaging with an aggregator in the place of the peers' mean, for each α and each of its settings."""
    wga = RULES.entry("wga")
    return tuple(
        MethodSetting(
            Knobs(wga, {"alpha": alpha, "aggregator": Computed(Knobs(aggregator, knobs))})
        )
        for knobs in aggregator.benchmark_settings or ({},)
        for alpha in ALPHAS
    )


def swept(name: str, knobs: Sequence[str]) -> list[str | Contender]:
    """Return a contender for each combination of values of knobs, `NAME=VALUE,VALUE`.

    The name itself where it takes none of them.

    Example:
        >>> [getattr(each, "name", each) for each in swept("wga", ["alpha=0.1,0.3"])]
        ['wga(alpha=0.1)', 'wga(alpha=0.3)']
        >>> swept("alone", ["alpha=0.1"])
        ['alone']
    """
    if name not in (*RULES, *METHODS):
        return [name]
    entry, choices = entry_of(name), []
    for pair in knobs:
        knob, equals, values = pair.partition("=")
        if not equals:
            raise KnobError(f"`knob` must be NAME=VALUE,VALUE, got {pair!r}")
        if knob in entry.parameters:
            choices.append([(knob, value.strip()) for value in values.split(",")])
    if not choices:
        return [name]
    swept_over: list[str | Contender] = []
    for chosen in itertools.product(*choices):
        text = ", ".join(f"{knob}={value}" for knob, value in chosen)
        make = Knobs(entry, {knob: _literal(value) for knob, value in chosen})
        rates = RATES if name in RULES else PLAIN_RATES
        swept_over.append(Contender(f"{name}({text})", (MethodSetting(make, lrs=rates),)))
    return swept_over


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
