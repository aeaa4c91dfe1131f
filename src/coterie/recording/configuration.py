"""What a run was asked to do, as its record and its checkpoints keep it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Self

import torch

from coterie.arguments import COUNT, MEMORY, POSITIVE, SEED, optional


def describe(thing: Any) -> str:
    """Return what a rule, loss or optimizer is in one line that is the same in every process."""
    if is_dataclass(thing) and not isinstance(thing, type):
        values = [(f.name, getattr(thing, f.name), f.default) for f in fields(thing)]
        shown = [f"{name}={describe(value)}" for name, value, default in values if value != default]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    if isinstance(thing, functools.partial):
        keywords = "".join(f", {name}={describe(value)}" for name, value in thing.keywords.items())
        return f"partial({describe(thing.func)}{''.join(f', {describe(a)}' for a in thing.args)}{keywords})"
    if callable(thing):
        return str(getattr(thing, "__qualname__", getattr(thing, "__name__", type(thing).__name__)))
    return repr(thing)


def counted(n: int, thing: str) -> str:
    """Return how many there are of a thing.

    Example:
        >>> counted(1, "step"), counted(0, "step"), counted(1200, "step")
        ('1 step', '0 steps', '1200 steps')
    """
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How steps are taken, as plain data.

    What stands here can be given to `coterie.train` and `coterie.train_everyone`, to `coterie
    train` and in a federation's settings, and the record has it.

    Args:
        steps: Steps to take; for a method, rounds.
        lr: Step size. If left out: chosen (adaptive averaging), Adam's 0.01, for a method 0.1.
        batch_size: Examples each user draws for a gradient; all of them where it has fewer.
        seed: Seed of batches and dropout; on tables also of splits and initial weights.
        exchange_every: Steps of user 0 for each exchange with the peers; in between it uses
            their last answers. See docs/exchanges.md.
        local_steps: Plain steps that every user takes, on a batch each, for one step of the
            run; the sum of what they follow takes the place of the user's gradient.
        memory: How much memory the run may take beside the model and the data, as "8GB".
            Adaptive averaging tells what it gave up for it; what cannot be kept is refused. See
            docs/scale.md.
        sample: Of more peers than this so many are asked, by their weights and anew at each
            exchange, so that a rule's direction is the same in the mean; a closed form and
            adaptive averaging ask the same ones all along. All when None. See docs/scale.md.
    """

    steps: Annotated[int, COUNT] = 1000
    lr: Annotated[float | None, optional(POSITIVE)] = None
    batch_size: Annotated[int, COUNT] = 32
    seed: Annotated[int, SEED] = 0
    exchange_every: Annotated[int, COUNT] = 1
    local_steps: Annotated[int, COUNT] = 1
    memory: Annotated[str | None, optional(MEMORY)] = None
    sample: Annotated[int | None, optional(COUNT)] = None


@dataclass(frozen=True, kw_only=True)
class UserSummary:
    """How many examples user 0 has."""

    name: str
    examples: int | str  # to train on; "a stream" where they are fresh at every step
    validation: int = 0  # held out to choose the best model
    test: int = 0  # held out for the end


@dataclass(frozen=True, kw_only=True)
class Configuration(StepSettings):
    """What a run was asked to do, and what was chosen and measured before its first step, as plain data.

    Example:
        >>> me = UserSummary(name="me", examples=12)
        >>> asked = Configuration(rule="Alone()", alone=True, me=me, peers={"a": 40}, steps=100)
        >>> Configuration.from_plain(asked.to_plain()) == asked
        True
    """

    rule: str  # the rule, chooser or method, as `describe` writes it
    alone: bool = False  # whether it asks nobody, as `Alone`
    me: UserSummary  # user 0
    # how many examples each has, by name, or in words why that is not known
    peers: Mapping[str, int | str]
    counts: str = "steps"  # what the steps are: "rounds" of a method
    optimizer: str = ""  # its class and step sizes
    parameter_groups: Sequence[Mapping[str, str]] = field(default_factory=list)  # of the optimizer
    scheduler: str = "None"  # of the step size
    loss: str = ""
    model: str = ""  # with its layers
    evaluate_every: int = 1  # steps between evaluations
    norm_bound: float | None = None  # how many times as long as the median a gradient must not be
    guard: str = "off"  # whether there is a guard, and why or why not
    capture: str = "off"  # how steps were taken as one program, or why not
    data: str = ""  # fingerprints of everybody's examples, where there is a folder to resume from
    # a digest of the frozen parameters, which no checkpoint holds, where there are any
    frozen: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)  # what the engine says of itself
    # the account of what was chosen; empty where nothing was
    choice: Mapping[str, Any] = field(default_factory=dict)
    # the constants measured: see `Estimates` in theory
    estimates: Mapping[str, Any] = field(default_factory=dict)
    not_measured: str = ""  # why there are no estimates, where they were wanted
    runs: str = ""  # whether the run was taken with others as one program, or why not

    def to_plain(self) -> dict[str, Any]:
        """Return what a line of JSON holds."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_plain` gave."""
        return cls(**{**plain, "steps": plain["steps"], "me": UserSummary(**plain["me"])})

    def differences(self, before: Self, may_differ: frozenset[str]) -> dict[str, tuple[Any, Any]]:
        """Return what another run was told otherwise, as (before, now), apart from what may differ.

        What is only known once a run has begun is compared where both have it.
        """
        now, then = ({**asdict(each), **each.engine} for each in (self, before))
        pairs = {
            name: (then.get(name), value) for name, value in now.items() if name not in may_differ
        }
        return {
            name: (a, b)
            for name, (a, b) in pairs.items()
            if a != b and (b or name not in _KNOWN_LATER)
        }


_KNOWN_LATER = frozenset({"data", "choice", "estimates", "runs"})
