"""What a run was asked to do, as its record and its checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from coterie.errors import DataError


@dataclass(frozen=True, kw_only=True)
class UserSummary:
    """How many examples user 0 has.

    Args:
        name: of the user.
        examples: to train on; "a stream" where they are fresh at every step.
        validation: held out to choose the best model.
        test: held out for the end.
    """

    name: str
    examples: int | str
    validation: int = 0
    test: int = 0


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a run was asked to do, and what was chosen and measured before its first step, as plain data.

    Args:
        rule: the rule, chooser or method, as `describe` writes it.
        alone: whether it is `Alone`, which asks nobody.
        me: user 0.
        peers: how many examples each has, by name, or in words why that is not known.
        steps: how many steps the run was to take.
        optimizer: its class and step sizes.
        parameter_groups: the options of each of the optimizer's groups.
        scheduler: of the step size.
        loss: the loss.
        model: the model, with its layers.
        batch_size: examples each user draws for a gradient.
        seed: what batches are drawn from, with the user's name and the step.
        evaluate_every: steps between evaluations.
        guard: whether there is a guard, and why or why not.
        capture: how steps were taken as one program, or why not.
        data: fingerprints of everybody's examples, where there is a folder to resume from.
        engine: what the engine says of itself.
        choice: the account of what was chosen before the first step; empty where nothing was.
        estimates: the constants measured before the first step; see `coterie.theory.estimates.Estimates`.
        not_measured: why there are no estimates, where they were wanted.
        runs: whether the run was taken with others as one program, or why not.

    Example:
        >>> me = UserSummary(name="me", examples=12)
        >>> asked = Configuration(rule="Alone()", alone=True, me=me, peers={"a": 40}, steps=100)
        >>> Configuration.from_plain(asked.to_plain()) == asked
        True
    """

    rule: str
    alone: bool = False
    me: UserSummary
    peers: Mapping[str, int | str]
    steps: int
    optimizer: str = ""
    parameter_groups: Sequence[Mapping[str, str]] = field(default_factory=list)
    scheduler: str = "None"
    loss: str = ""
    model: str = ""
    batch_size: int = 32
    seed: int = 0
    evaluate_every: int = 1
    guard: str = "off"
    capture: str = "off"
    data: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    estimates: Mapping[str, Any] = field(default_factory=dict)
    not_measured: str = ""
    runs: str = ""

    def with_engine(self, described: Mapping[str, Any]) -> Configuration:
        """Return the same with what an engine says of itself; it may know better about peers and their data."""
        known = {name: value for name, value in described.items() if name in _NAMES - {"engine"}}
        rest = {name: value for name, value in described.items() if name not in known}
        return replace(self, **known, engine=rest)

    def to_plain(self) -> dict[str, Any]:
        """Return what a line of JSON holds; the engine's entries stand beside the others."""
        plain: dict[str, Any] = asdict(self)
        engine, why = plain.pop("engine"), plain.pop("not_measured")
        if why:
            plain["estimates"] = {"not measured": why}
        return {name: value for name, value in plain.items() if value or name not in _LATER} | dict(engine)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Configuration:
        """Return the configuration that `to_plain` gave, now or in an earlier version."""
        missing = {"rule", "me", "peers", "steps"} - set(plain)
        if missing:
            raise DataError(f"a configuration without `{'`, `'.join(sorted(missing))}`")
        values = {name: value for name, value in plain.items() if name in _NAMES - {"engine"}}
        values["engine"] = {name: value for name, value in plain.items() if name not in values}
        values["me"] = UserSummary(**plain["me"])
        values["alone"] = plain.get("alone", plain["rule"] == "Alone()")  # not written in earlier versions
        why = values.get("estimates", {}).get("not measured", "")
        return cls(**(values | {"estimates": {}, "not_measured": why} if why else values))

    def differences(self, before: Configuration, may_differ: frozenset[str]) -> dict[str, tuple[Any, Any]]:
        """Return what another run was told otherwise, as (before, now), apart from what may differ."""
        now, then = self.to_plain(), before.to_plain()
        pairs = {name: (then.get(name), value) for name, value in now.items() if name not in may_differ}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


_LATER = frozenset({"data", "choice", "estimates", "runs"})  # left out where there is nothing to say
_NAMES = frozenset(each.name for each in fields(Configuration))
