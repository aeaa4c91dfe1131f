"""Knobs: what may be set in rules and methods, and how a wrong setting is told."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

import numpy as np
from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.arguments import real
from coterie.errors import KnobError, did_you_mean

Knob: TypeAlias = float | Tensor | Callable[[int], float]
"""A number, or a function of the step.

In a captured step a number that the device reads from a tensor.
"""

Auto: TypeAlias = Literal["auto"]
"""A knob that `coterie.train` sets before the first step, by the theory and constants it measures."""


def decided(name: str, knob: Knob | Auto) -> Knob:
    """Return a knob that is not "auto" any more."""
    if isinstance(knob, str):
        raise KnobError(
            f"`{name}` is {knob!r}, which `coterie.train` sets before the first step; in a loop of"
            " your own use `coterie.choosing.chooser_for(rule).choose(spec, engine).rule`"
        )
    return knob


def value_at(name: str, knob: Knob | Auto, step: int) -> float:
    """Return a knob's value at a step."""
    knob = decided(name, knob)
    if isinstance(knob, Tensor):
        # torch takes either, and a captured step must not wait for the number
        return cast("float", knob)
    if not callable(knob):
        return float(knob)  # a number of NumPy would not do in a record or a checkpoint
    value = float(knob(step))
    check_knob(name, value, f" at step {step}")
    return value


def check_knob(name: str, knob: Knob | Auto, where: str = "", *, auto: bool = False) -> None:
    """Check a knob in [0, 1], which may also be a function of the step, or "auto" where that is allowed."""
    if (
        callable(knob)
        or isinstance(knob, Tensor)
        or (auto and isinstance(knob, str) and knob == "auto")
    ):
        return
    if (
        not isinstance(knob, float | int | np.number)
        or isinstance(knob, bool)
        or not 0 <= knob <= 1
    ):
        raise KnobError(f"`{name}` must lie in [0, 1], got {knob!r}{where}")


def check_tau(tau: Mapping[str, float] | None, aggregator: Aggregator | None = None) -> None:
    """Check the weights of the peers, which an aggregator takes the place of."""
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        raise KnobError(
            "`aggregator` must be one such as `coterie.aggregators.TrimmedMean(1)`, got"
            f" {aggregator!r}"
        )
    if tau is None:
        return
    if aggregator is not None:
        raise KnobError(
            "`tau` and `aggregator` were both given, but an aggregator takes all peers alike; leave"
            " one out"
        )
    if not isinstance(tau, Mapping) or not tau:
        raise KnobError(
            f"`tau` must map each peer's name to its weight, got {tau!r}; None gives equal weights"
        )
    for name, weight in tau.items():
        real("be finite and not negative", lambda weight: weight >= 0)(f"tau[{name!r}]", weight)
    if abs(sum(tau.values()) - 1) > 1e-6:
        raise KnobError(
            f"`tau` must sum to 1, got {sum(tau.values()):.6g}; divide each weight by the sum"
        )


def weights_over(
    tau: Mapping[str, float] | None, names: Sequence[str], aggregator: Aggregator | None = None
) -> dict[str, float]:
    """Return the weight of each peer that has one."""
    if not names:
        raise KnobError(
            "no peers: pass at least one, or use `rule=coterie.Alone()` (`--rule alone`)"
        )
    if aggregator is not None and len(names) < aggregator.least:
        raise KnobError(
            f"`aggregator` {aggregator} needs {aggregator.least} peers, got {len(names)}; lower"
            " `n_byzantine`"
        )
    if tau is None:
        return {name: 1 / len(names) for name in names}
    unknown = [name for name in tau if name not in names]
    if unknown:
        raise KnobError(
            f"`tau` names an unknown peer {unknown[0]!r}; the peers are"
            f" {', '.join(map(repr, names))}{did_you_mean(unknown[0], names)}"
        )
    return {name: float(tau[name]) for name in names if tau.get(name)}
