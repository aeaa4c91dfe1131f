"""What happened in a run: a point for every evaluation, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self, get_type_hints

from coterie.recording.costs import Cost, Traffic


@dataclass(frozen=True, kw_only=True)
class GuardCheck:
    """What the guard saw at an evaluation."""

    alone_loss: float  # the validation loss of the model trained alone
    difference: float  # that of the collaborative model, less it
    error: float  # the standard error of the difference, paired by example
    restarts: int  # how often the run was restarted from the model trained alone so far


_GUARD_CURVES = {"alone_loss": "alone_validation_loss"} | {
    name: f"guard_{name}" for name in ("difference", "error", "restarts")
}
CURVES = ("weight", "own_loss", "left_out", "validation_loss", *_GUARD_CURVES.values())
"""The curves that a run may have; further ones are of metrics, `validation_…`."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the curves.

    Example:
        >>> point = Point(step=10, own_loss=0.5, validation={"loss": 0.7})
        >>> point.to_plain()
        {'step': 10, 'own_loss': 0.5, 'validation_loss': 0.7}
        >>> Point.from_plain(point.to_plain()) == point
        True
    """

    step: int  # how many steps were taken
    weight: float | None = None  # of the peers in the last one
    own_loss: float | None = None  # user 0's loss, the mean since the last point
    left_out: int = 0  # how many gradients of peers were left out so far
    # loss and metrics on the validation set
    validation: Mapping[str, float] = field(default_factory=dict)
    guard: GuardCheck | None = None  # what the guard saw, where there is one

    def to_plain(self) -> dict[str, Any]:
        """Return the point as flat numbers by the names of the curves."""
        numbers = {
            "weight": self.weight,
            "own_loss": self.own_loss,
            "left_out": self.left_out or None,
        }
        plain = {"step": self.step} | {
            name: value for name, value in numbers.items() if value is not None
        }
        plain |= {f"validation_{name}": value for name, value in self.validation.items()}
        return plain | (
            {curve: getattr(self.guard, name) for name, curve in _GUARD_CURVES.items()}
            if self.guard
            else {}
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the point that `to_plain` gave."""
        guard = {name: plain[curve] for name, curve in _GUARD_CURVES.items() if curve in plain}
        prefix = "validation_"
        return cls(
            **{
                name: plain[name]
                for name in ("step", "weight", "own_loss", "left_out")
                if name in plain
            },
            validation={
                name.removeprefix(prefix): v for name, v in plain.items() if name.startswith(prefix)
            },
            guard=GuardCheck(**guard) if guard else None,
        )


@dataclass(frozen=True, kw_only=True)
class GuardDecision:
    """Which of the two models the guard serves at the end: the one of lower validation loss."""

    served: Literal["collaborative", "alone"]
    # the validation loss of the collaborative model, less that of the one trained alone
    difference: float
    error: float  # the standard error of the difference, paired by example
    alone_step: int | None = None  # the step at which the one trained alone was at its best


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number of the model served beside that of the model trained alone, on the same examples."""

    ours: float
    alone: float
    error: float  # the standard error of ours less alone, paired by example
    less_is_better: bool
    # the interval of 95 % of ours less alone, where it is not that of the error by Student's t
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float:
        """Ours less alone."""
        return self.ours - self.alone


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The model served beside the model trained alone.

    Example:
        >>> loss = Difference(ours=0.5, alone=0.75, error=0.1, less_is_better=True)
        >>> Comparison(on="40 test examples", examples=40, measures={"loss": loss}).measures["loss"].difference
        -0.25
    """

    on: str  # the examples, and what they had to do with the choice of the two models, in words
    examples: int  # how many; of splits, how many these are
    measures: Mapping[str, Difference]  # the metrics, the chosen one first, then the loss
    # of how many splits of the examples these are means, with errors that allow for their overlap
    splits: int = 0

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the comparison that `asdict` gave."""
        measures = {name: Difference(**each) for name, each in plain["measures"].items()}
        return cls(**{**plain, "measures": measures})


@dataclass(frozen=True)
class Shown:
    """Says of a field of the end how a run's summary and page show it, in a line, where there is something."""

    line: str  # with {} for the value


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended. A field that is annotated with `Shown` has a line in the run's summary and on its page."""

    step: int  # how many steps were taken
    best_step: int  # the step that the model is of
    seconds: float = 0.0  # how long it took, in this session
    stopped: str | None = None  # what ended it early
    # loss and metrics on user 0's validation set
    validation: Mapping[str, float] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)  # and on its test set
    guard: GuardDecision | None = None  # which model is served, where there was a guard
    # each peer's share of the peers' weight in the last step
    tau: Mapping[str, float] = field(default_factory=dict)
    # by peer, how often, by reason
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # by peer, the steps that were taken without it: the first and the last one of every stretch
    absent: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    # by user, what it computed and exchanged, in numbers
    costs: Mapping[str, Cost] = field(default_factory=dict)
    # by user, in bytes and seconds, if it travelled
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    # of private peers, as they tell them
    promises: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # what adaptive averaging found out on the way
    account: Mapping[str, Any] = field(default_factory=dict)
    not_captured: Annotated[str, Shown("steps were taken one by one in the end: {}")] = (
        ""  # where they were not at first
    )
    comparison: Comparison | None = None  # with the model trained alone, where there is one
    # the loss of a constant on the examples that the model served was judged by, where it is known
    constant: float | None = None
    verdict: str = ""  # whether the model served is better than one trained alone, in a sentence

    @property
    def judged_on(self) -> tuple[str, Mapping[str, float]]:
        """On which set the model served was judged, and its numbers.

        Validation where there is no test set.
        """
        return ("test", self.test) if self.test else ("validation", self.validation)

    @property
    def exchange_cost(self) -> float | None:
        """How many own gradients take as long as an exchange with the peers; None where nothing travelled.

        Example:
            >>> traffic = {"me": Traffic(seconds_waiting=6.0, seconds_computing=2.0, messages=30)}
            >>> cost = {"me": Cost(gradients=100)}
            >>> traffic |= {"a": Traffic(), "b": Traffic(), "c": Traffic()}
            >>> round(End(step=9, best_step=9, traffic=traffic, costs=cost).exchange_cost)
            30
        """
        me, *peers = self.traffic or [""]
        mine, own = self.traffic.get(me, Traffic()), self.costs.get(me, Cost()).gradients
        if not (peers and own and mine.messages and mine.seconds_computing):
            return None
        waiting, computing = mine.seconds_waiting / mine.messages, mine.seconds_computing / own
        return len(peers) * waiting / computing

    def shown(self) -> list[str]:
        """Return the lines of the fields that say how they are shown.

        Example:
            >>> End(step=9, best_step=9, not_captured="the model waits for the GPU").shown()
            ['steps were taken one by one in the end: the model waits for the GPU']
        """
        hints = get_type_hints(type(self), include_extras=True).items()
        notes = [(name, note) for name, hint in hints for note in getattr(hint, "__metadata__", ())]
        return [note.line.format(value) for name, note in notes if (value := getattr(self, name))]

    def gradients_of_others(self, me: str) -> int:
        """Return how many gradients all users but one have computed."""
        return sum(cost.gradients for name, cost in self.costs.items() if name != me)

    def to_plain(self) -> dict[str, Any]:
        """Return what a line of JSON holds."""
        plain = asdict(self)
        return {
            name: value
            for name, value in plain.items()
            if name not in _LEFT_OUT_IF_EMPTY or value not in (None, "", {})
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the end that `to_plain` gave."""
        guard = plain["guard"] and GuardDecision(**plain["guard"])
        costs = {name: Cost(**each) for name, each in plain["costs"].items()}
        traffic = {name: Traffic(**each) for name, each in plain["traffic"].items()}
        comparison = Comparison.from_plain(plain["comparison"]) if "comparison" in plain else None
        parts = {"guard": guard, "costs": costs, "traffic": traffic, "comparison": comparison}
        return cls(**{**plain, **parts})


_LEFT_OUT_IF_EMPTY = frozenset(
    {
        "validation",
        "absent",
        "promises",
        "account",
        "not_captured",
        "comparison",
        "constant",
        "verdict",
    }
)
