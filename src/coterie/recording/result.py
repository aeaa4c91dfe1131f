"""What happened in a run: a point for every evaluation, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from coterie.recording.costs import Cost
from coterie.recording.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class GuardCheck:
    """What the guard saw at an evaluation.

    Args:
        alone_loss: the validation loss of the model trained alone.
        difference: that of the collaborative model, less it.
        error: the standard error of the difference, paired by example.
        restarts: how often the run was restarted from the model trained alone so far.
    """

    alone_loss: float
    difference: float
    error: float
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the curves.

    Args:
        step: how many steps were taken.
        weight: the weight of the peers in the last one.
        own_loss: user 0's loss, the mean since the last point.
        left_out: how many gradients of peers were left out so far.
        validation: loss and metrics on the validation set.
        guard: what the guard saw, where there is one.

    Example:
        >>> point = Point(step=10, own_loss=0.5, validation={"loss": 0.7})
        >>> point.to_plain()
        {'step': 10, 'own_loss': 0.5, 'validation_loss': 0.7}
        >>> Point.from_plain(point.to_plain()) == point
        True
    """

    step: int
    weight: float | None = None
    own_loss: float | None = None
    left_out: int = 0
    validation: Mapping[str, float] = field(default_factory=dict)
    guard: GuardCheck | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the point as flat numbers by the names of the curves."""
        numbers = {"weight": self.weight, "own_loss": self.own_loss, "left_out": self.left_out or None}
        plain = {"step": self.step} | {name: value for name, value in numbers.items() if value is not None}
        plain |= {f"validation_{name}": value for name, value in self.validation.items()}
        if self.guard is not None:
            plain |= {
                "alone_validation_loss": self.guard.alone_loss,
                "guard_difference": self.guard.difference,
                "guard_error": self.guard.error,
                "guard_restarts": self.guard.restarts,
            }
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Point:
        """Return the point that `to_plain` gave."""
        guard = None
        if "guard_difference" in plain:
            guard = GuardCheck(
                alone_loss=plain["alone_validation_loss"],
                difference=plain["guard_difference"],
                error=plain["guard_error"],
                restarts=plain["guard_restarts"],
            )
        prefix = "validation_"
        return cls(
            step=plain["step"],
            weight=plain.get("weight"),
            own_loss=plain.get("own_loss"),
            left_out=plain.get("left_out", 0),
            validation={name.removeprefix(prefix): v for name, v in plain.items() if name.startswith(prefix)},
            guard=guard,
        )


@dataclass(frozen=True, kw_only=True)
class GuardDecision:
    """Which of the two models the guard serves at the end.

    Args:
        served: "collaborative", or "alone" where that one has the lower validation loss.
        difference: the validation loss of the collaborative model, less that of the one trained alone.
        error: the standard error of the difference, paired by example.
    """

    served: Literal["collaborative", "alone"]
    difference: float
    error: float


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended.

    Args:
        step: how many steps were taken.
        best_step: the step that the model is of.
        seconds: how long it took, in this session.
        stopped: what ended it early, or None.
        test: loss and metrics on user 0's test set.
        guard: which model is served, where there was a guard.
        tau: each peer's share of the peers' weight in the last step.
        left_out: by peer, how often it was left out, by reason.
        costs: by user, what it computed and how many numbers it exchanged.
        traffic: by user, the bytes and seconds that this took, where something travelled.
    """

    step: int
    best_step: int
    seconds: float = 0.0
    stopped: str | None = None
    test: Mapping[str, float] = field(default_factory=dict)
    guard: GuardDecision | None = None
    tau: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return what a line of JSON holds."""
        plain = asdict(self)
        return plain | (plain.pop("guard") or {})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> End:
        """Return the end that `to_plain` gave, now or in an earlier version."""
        guard = None
        if "served" in plain:
            guard = GuardDecision(served=plain["served"], difference=plain["difference"], error=plain["error"])
        return cls(
            step=plain["step"],
            best_step=plain["best_step"],
            seconds=plain["seconds"],
            stopped=plain["stopped"],
            test=plain["test"],
            guard=guard,
            tau=plain.get("tau", {}),
            left_out=plain.get("left_out", {}),
            costs={name: Cost.from_plain(each) for name, each in plain.get("costs", {}).items()},
            traffic={name: Traffic.from_plain(each) for name, each in plain.get("traffic", {}).items()},
        )
