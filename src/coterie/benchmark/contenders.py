"""Settings: what a method of the benchmark may try, and choose from by validation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from coterie.benchmark.tasks import Population
from coterie.choosing import chooser_for
from coterie.errors import KnobError
from coterie.registry import Computed, Entry, RunSizes
from coterie.training.algorithm import algorithm_of

RATES = (0.01, 0.03, 0.1)
"""The step sizes of Adam that a rule is tried at."""

PLAIN_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The step sizes of plain gradient steps that a method of `coterie.methods` is tried at."""

BUDGET = 12
"""How many settings, step sizes included, a method may try and choose from by validation.

The same for all.
"""


@dataclass(frozen=True)
class Knobs:
    """A registered rule or method with these knobs.

    Example:
        >>> from coterie.rules import RULES
        >>> make = Knobs(RULES.entry("wga"), {"alpha": 0.3})
        >>> make.label(RunSizes(10, {"a": 10}, 60)), make(RunSizes(10, {"a": 10}, 60)).alpha
        ('alpha 0.3', 0.3)
    """

    entry: Entry[Any]
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, run: RunSizes) -> Any:
        """Return the rule or method for a run."""
        return self.entry.build(self.values, run)

    def label(self, run: RunSizes) -> str:
        """Name the knobs and their values."""
        values = {k: v.value(run) if isinstance(v, Computed) else v for k, v in self.values.items()}
        return ", ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()
        )


@dataclass(frozen=True, eq=False)
class Fixed:
    """A rule or method that is the same for every task."""

    thing: Any

    def __call__(self, run: RunSizes) -> Any:
        """Return the rule or method."""
        return self.thing

    def label(self, run: RunSizes) -> str:
        """Name the rule or method with its knobs."""
        return repr(self.thing)


@dataclass(frozen=True)
class MethodSetting:
    """One way to train; the step size is left open."""

    make: Knobs | Fixed  # makes the rule or method
    lr_schedule: Literal["constant", "decreasing"] = "constant"  # decreasing: linearly to zero
    tail_average: bool = False  # take the mean of the parameters over the last half of the steps
    weight_decay: float = 0.0  # Adam's, on all parameters
    plain_steps: bool = False  # of gradient descent, as methods take them, in the place of Adam's
    # another setting, whose model at its best step size is the one to start from
    start: "MethodSetting | None" = None
    lrs: tuple[float, ...] = RATES  # the step sizes that it is tried at
    # nothing is set, and validation rows are own rows like others, as plain tools have them
    as_it_comes: bool = False
    # of `train`; no guard unless named here
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def label(self, run: RunSizes) -> str:
        """Name the setting in the results."""
        if self.as_it_comes:
            return "as it comes"
        schedule = "tail averaged" if self.tail_average else f"{self.lr_schedule} steps"
        plain = "plain" if self.plain_steps else ""
        return ", ".join(
            filter(
                None,
                [self.make.label(run), plain, "weight decay" if self.weight_decay else schedule],
            )
        )


@dataclass(frozen=True)
class Contender:
    """A name in the benchmark and the settings that it may choose from.

    Example:
        >>> import coterie
        >>> mine = Contender.of("mine", coterie.WeightedAveraging(0.2), coterie.WeightedAveraging(0.4))
        >>> [setting.lrs for setting in mine.settings]
        [(0.01, 0.03, 0.1), (0.01, 0.03, 0.1)]
    """

    name: str
    settings: tuple[MethodSetting, ...]

    def fits(self, people: Population) -> bool:
        """Say whether it can learn from these examples: from any."""
        return True

    @property
    def asks_gradients_only(self) -> bool:
        """Whether peers are asked for nothing else, so that attackers can send other gradients."""
        rules = [one.make(RunSizes(1, {"": 1}, 1)) for one in self.settings]
        return not any(chooser_for(each) or algorithm_of(each).counts == "rounds" for each in rules)

    @classmethod
    def of(cls, name: str, *each: Any) -> Self:
        """Return a contender that tries each of these rules or methods at the usual step sizes."""
        if not each:
            raise KnobError(
                f"the contender {name!r} has nothing to try; name a rule or a method, or several"
            )
        return cls(
            name, tuple(MethodSetting(Fixed(thing), lrs=usual_rates(thing)) for thing in each)
        )


def usual_rates(thing: object) -> tuple[float, ...]:
    """Return the step sizes for a rule, which Adam follows, or for a method, which takes plain steps."""
    return PLAIN_RATES if algorithm_of(thing).counts == "rounds" else RATES


def schedules(make: Knobs, start: MethodSetting | None = None) -> tuple[MethodSetting, ...]:
    """Return a rule with constant steps, with decreasing ones, with the tail averaged, and with weight decay."""
    return (
        MethodSetting(make, start=start),
        MethodSetting(make, lr_schedule="decreasing", start=start),
        MethodSetting(make, tail_average=True, start=start),
        MethodSetting(make, weight_decay=0.1, start=start),
    )
