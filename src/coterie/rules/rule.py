"""What a rule is, its knobs, and a base for rules of one's own.

A rule is a frozen dataclass of knobs. Its state is passed and returned, so that a checkpoint can
hold all of it.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, cast, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.arguments import real
from coterie.errors import KnobError, did_you_mean
from coterie.gradients.gradients import Gradients

Knob: TypeAlias = float | Tensor | Callable[[int], float]
"""A number, or a function of the step.

In a captured step a number that the device reads from a tensor.
"""

Auto: TypeAlias = Literal["auto"]
"""A knob that `coterie.train` sets before the first step, by the theory and constants it measures."""

State: TypeAlias = dict[str, Any]
"""A rule's memory: tensors and numbers by name, so that a checkpoint can hold it.

`step` counts the steps
taken; `weight` is the weight that the peers had in the last one."""

Knobs: TypeAlias = Mapping[str, Any]
"""The value of each knob at one step."""


@runtime_checkable
class Rule(Protocol):
    """How user 0 turns gradients into a direction.

    The knobs are fields; the state is passed and returned.

    A class may inherit from it what it does not define; fields `tau` and `aggregator` are used
    where it has them.
    """

    @property
    def needs_rows(self) -> bool:
        """Whether every peer's gradient is needed, as by an aggregator, not only their weighted sum."""
        return getattr(self, "aggregator", None) is not None

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Return τ, the weight of each peer to ask; an empty mapping asks nobody."""
        return weights_over(getattr(self, "tau", None), names, getattr(self, "aggregator", None))

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""
        return {"step": 0, "weight": 0.0}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the direction and the next state."""


@runtime_checkable
class Capturable(Rule, Protocol):
    """A rule whose step is the same work on tensors every time, except for knobs that are known beforehand.

    Such steps can be captured as a CUDA graph; see `coterie.learners.captured`.
    A non-finite gradient must make the direction non-finite.
    """

    def repeats(self, state: State) -> bool:
        """Say whether the next step is the same work as those after it; the first may not be."""
        return True

    def next_knobs(self, state: State) -> tuple[dict[str, float], State]:
        """Return the next step's knobs, and the plain part of the state after it if all peers answer."""
        return {}, {"step": state["step"] + 1}

    def with_knobs(self, knobs: Knobs) -> Rule:
        """Return the rule with these knobs.

        Numbers, tensors on the device, or a column with a row for each run.
        """
        return self


class FormulaRule(Capturable, ABC):
    """Base of rules that are a formula of g_0, the peers' weighted sum and knobs.

    A subclass is a frozen dataclass. Fields annotated `Knob` are numbers or functions of the step.
    One function, `direction`, is the formula. It must work on vectors of shape (d,) and on matrices
    of shape (R, d), a row for each run, with knobs that are numbers, tensors without dimensions or
    columns of shape (R, 1). In return the rule can be captured on a GPU and takes part in
    `coterie.train_many`.

    A field `alpha` is recorded as the peers' weight. A field `tau` (the weight of each peer by
    name) and a field `aggregator` are used where a subclass has them; all peers weigh the same
    otherwise.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Clipped(FormulaRule):
        ...     alpha: Knob = 0.5
        ...     limit: Knob = 1.0
        ...
        ...     def direction(self, own, peers, state, knobs):
        ...         limit = knobs["limit"]
        ...         return own + knobs["alpha"] * (peers - own).clamp(-limit, limit), {}
        >>> rule = Clipped()
        >>> g = Gradients(own=torch.tensor([1.0, 1.0]), peers=torch.tensor([9.0, 0.5]))
        >>> rule(g, rule.init(torch.zeros(2)))
        (tensor([1.5000, 0.7500]), {'step': 1, 'weight': 0.5})
    """

    in_rows = True  # many runs follow it as rows of one matrix
    memory: tuple[str, ...] = ()
    """Names of the tensors in the state that have the shape of the parameters.

    They start at zero.
    """

    @abstractmethod
    def direction(
        self, own: Tensor, peers: Tensor, state: State, knobs: Knobs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the direction, and the tensors of the state that have changed.

        Args:
            own: g_0.
            peers: the peers' weighted sum, with g_0 in the place of what did not answer; it must
                not be changed.
            state: the state before the step; it must not be changed.
            knobs: the value of each field annotated `Knob` at this step, and `answered`, the share
                of the peers' weight that answered, above 0.
        """

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""
        return super().init(x) | {
            name: torch.zeros_like(x, requires_grad=False) for name in self.memory
        }

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the direction and the next state; g_0 to the bit where no peer answered."""
        peers, answered = g.average(getattr(self, "tau", None), getattr(self, "aggregator", None))
        knobs = self.knobs_at(state)
        plain = self.after(state, knobs, answered)
        if not answered:
            return g.own, {**state, **plain}
        direction, changed = self.direction(g.own, peers, state, {**knobs, "answered": answered})
        return direction, {**state, **plain, **changed}

    def next_knobs(self, state: State) -> tuple[dict[str, float], State]:
        """Return the next step's knobs and the plain part of the state after it.

        See `Capturable`.
        """
        knobs = self.knobs_at(state)
        return knobs, self.after(state, knobs, 1.0)

    def with_knobs(self, knobs: Knobs) -> Self:
        """Return the rule with these knobs; see `Capturable`."""
        return replace(self, **knobs)  # type: ignore[type-var]  # a subclass is a dataclass

    def knobs_at(self, state: State) -> dict[str, float]:
        """Return the knobs at the state's step."""
        return {
            name: value_at(name, getattr(self, name), state["step"]) for name in knob_names(self)
        }

    def after(self, state: State, knobs: Knobs, answered: float) -> State:
        """Return the plain part of the state after a step.

        How many steps, and the weight that the peers had.
        """
        alpha = knobs.get("alpha", 1.0)
        return {"step": state["step"] + 1, "weight": alpha if answered == 1 else alpha * answered}


def knob_names(rule: FormulaRule) -> list[str]:
    """Return the fields of a rule that are annotated `Knob`."""
    return _knob_names(type(rule))


@functools.cache
def _knob_names(kind: Any) -> list[str]:
    if not is_dataclass(kind):
        raise KnobError(
            f"the rule {kind.__name__} is no dataclass; write `@dataclass(frozen=True)` above the"
            " class"
        )
    return [field.name for field in fields(kind) if _is_knob(field.type)]


def _is_knob(annotation: object) -> bool:
    """Say whether an annotation has `Knob` in it.

    It is a string where annotations are not evaluated.
    """
    if isinstance(annotation, str):
        return "Knob" in annotation
    return set(get_args(Knob)) <= set(get_args(annotation))


def weights_in(state: State) -> dict[str, float]:
    """Return the weights in a rule's state by name; none where it has none.

    A rule that finds its weights as it goes keeps them in `tau`, by name or as a tensor with
    `names` beside it.

    Example:
        >>> weights_in({"step": 1, "tau": torch.tensor([0.25, 0.75]), "names": ["a", "b"]})
        {'a': 0.25, 'b': 0.75}
    """
    tau = state.get("tau", {})
    if isinstance(tau, Tensor):
        return dict(zip(state["names"], tau.tolist(), strict=True))
    return dict(tau)


def rows_of(g: Gradients) -> Tensor:
    """Return every peer's gradient, each of which must have a name."""
    if g.rows is None or len(g.names) != len(g.rows):
        raise KnobError(
            "this rule needs every peer's gradient and name: `Gradients(rows=…, names=…)`"
        )
    return g.rows


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
