"""What a participant sets: a `coterie.toml` in user 0's folder, and one in each site's."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from coterie.arguments import (
    ANYTHING,
    COUNT,
    POSITIVE,
    SHARE,
    Check,
    check_settings,
    either,
    instance,
    listed,
    mapped,
    optional,
)
from coterie.data.reading import FileForm
from coterie.engines.compression import COMPRESS, Compress
from coterie.engines.peer import Caps
from coterie.errors import KnobError
from coterie.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.recording import files
from coterie.recording.configuration import StepSettings

FILE = "coterie.toml"
_TEXT = instance(str, "a text")
_KEYS = mapped(_TEXT, 'a table of fingerprints: site = "its fingerprint"')
_NAMES = listed(_TEXT, "a list of names")
_OR_AUTO = 'lie in [0, 1], or be "auto"'
_KNOB = Check(_OR_AUTO, lambda value: value if value == "auto" else SHARE.read(value))
_TABLE = instance(dict, "a table of settings")
_GROUPS = either(instance(bool, "true or false"), mapped(_NAMES, "a table of groups of sites"))
MIXTURE = "mixture"
"""The rule that finds linear models in closed form, by E-steps."""
SITE_CAPS = Caps(gradients=10_000, norm=10.0, examples=16)
"""What a site gives at most unless it sets otherwise.

Three runs of 1000 steps with the default rule.
"""
NO_PRIVACY = (
    "where everyone trains, nothing can be promised about a row: the points of a site's own run,"
    " which it sends to the others, tell of its rows without noise; leave [privacy] away, or let"
    " one site lead"
)

NO_SUMS = (
    "where everyone trains, sums are not masked: two sites that ask for sums of the same gradients"
    " by other weights could work out the parts; leave `secure_sums` and [sums] away"
)


@dataclass(frozen=True)
class Data(FileForm):
    """Where a participant's examples are: in a table, or what a loader returns.

    Args:
        table: A CSV or Parquet file, one example a row; beside the settings, or an absolute
            path.
        loader: "module.path:function" of the participant's folder; returns a `coterie.User`.
        target: The column to predict.
        columns: This table's names of columns, where they differ from user 0's.
        own_examples: Who trains only: how many rows to train on, at most.
    """

    table: Annotated[str, _TEXT] = ""
    loader: Annotated[str, _TEXT] = ""
    target: Annotated[str, _TEXT] = ""
    columns: Annotated[Mapping[str, str], mapped(_TEXT, 'a table of names: ours = "yours"')] = (
        field(default_factory=dict)
    )
    own_examples: Annotated[int | None, optional(COUNT)] = None


@dataclass(frozen=True)
class Model:
    """The model, which everybody builds from code of its own.

    Args:
        name: "linear", "mlp", or "module.path:factory(n_inputs, n_outputs)".
        loss: "module.path:function" of (output, target); by the kind of target when empty.
        n_inputs: With a loader only.
        n_outputs: With a loader only.
    """

    name: Annotated[str, _TEXT] = "linear"
    loss: Annotated[str, _TEXT] = ""
    n_inputs: Annotated[int | None, optional(COUNT)] = None
    n_outputs: Annotated[int | None, optional(COUNT)] = None

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class MessageSettings:
    """Messages, and sites that do not answer.

    Args:
        compress: Send in half precision; what rounding loses is added to the next message.
        secure_sums: See only the sum of the sites' gradients, or of each group of sites; for
            wga and bc.
        timeout: Seconds to wait for a site in one step.
        misses: Steps without an answer until a site is not waited for.
        probe_every: Steps between checks whether such a site is back.
        minimum: Answers without which a step is taken alone.
    """

    compress: Annotated[Compress | None, COMPRESS] = None
    secure_sums: Annotated[bool | Mapping[str, Sequence[str]], _GROUPS] = False
    timeout: Annotated[float, POSITIVE] = 10.0
    misses: Annotated[int, COUNT] = 3
    probe_every: Annotated[int, COUNT] = 10
    minimum: Annotated[int, COUNT] = 1


@dataclass(frozen=True, kw_only=True)
class Training(StepSettings, MessageSettings):
    """How user 0 trains: the options of `coterie train`, and how long it waits for a site.

    A rule of user 0's own is imported by `coterie --import` when user 0 starts the server; these
    settings name no code.

    Args:
        rule: A rule, or a method, whose rounds are the steps.
        alpha: The peers' weight.
        beta: How fast the bias estimate follows.
        knobs: Knobs of the rule or method.
        rarest: A network asks sites that answer slowly at one of so many steps at least; 1: at
            every step, or as `exchange_every` says.
    """

    rule: Annotated[str, _TEXT] = "adaptive"
    alpha: Annotated[float | Literal["auto"] | None, optional(_KNOB)] = None
    beta: Annotated[float | Literal["auto"] | None, optional(_KNOB)] = None
    knobs: Annotated[Mapping[str, Any], mapped(ANYTHING, "a table of knobs")] = field(
        default_factory=dict
    )

    rarest: Annotated[int, COUNT] = 8

    def __post_init__(self) -> None:
        check_settings(self)
        if self.secure_sums and (self.compress or self.local_steps > 1):
            raise KnobError(
                "`secure_sums` takes neither `compress` nor `local_steps`: a masked sum is of"
                " gradients, and exact"
            )


@dataclass(frozen=True)
class SiteSettings:
    """A site's settings; see the parts.

    Args:
        name: The site's name.
        threads: CPU threads.
        kit: The fingerprint of the kit that the site has accepted.
        sites: Where everyone trains: whom it asks and answers.
        keys: Where everyone trains: the others' fingerprints.
    """

    name: Annotated[str, _TEXT]
    data: Data = Data()
    model: Model = Model()
    caps: Caps = SITE_CAPS
    privacy: Privacy | None = None  # what is promised about each row
    sums: SumsOnly | None = None  # give masked sums only, and which
    threads: Annotated[int, COUNT] = 1
    kit: Annotated[str, _TEXT] = ""
    sites: Annotated[Sequence[str], _NAMES] = ()
    training: Training | None = None  # where everyone trains: how it trains its own model
    keys: Annotated[Mapping[str, str], _KEYS] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.training is None) != (not self.sites):
            raise KnobError(
                "`sites` and [training] must both be there, as where everyone trains, or neither"
            )
        if self.keys and self.training is None:
            raise KnobError(
                "[keys] is for where everyone trains; the keys of masked sums stand in [sums.keys]"
            )
        if self.training is not None and (self.sums is not None or self.training.secure_sums):
            raise KnobError(NO_SUMS)
        if self.training is not None and self.privacy is not None:
            raise KnobError(NO_PRIVACY)

    def as_lead(self) -> "LeadSettings":
        """Return the settings by which a site trains a model of its own."""
        if self.training is None:
            raise KnobError(
                f"{self.name} trains no model of its own: its settings have no [training]"
            )
        sites = tuple(self.sites)
        return LeadSettings(self.name, sites, self.data, self.model, self.training, self.threads)


@dataclass(frozen=True)
class LeadSettings:
    """User 0's settings; see the parts.

    Args:
        me: The name of user 0.
        sites: Whom it asks.
        threads: CPU threads.
    """

    me: Annotated[str, _TEXT]
    sites: Annotated[tuple[str, ...], _NAMES]
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    threads: Annotated[int, COUNT] = 1

    def __post_init__(self) -> None:
        check_settings(self)


def site_settings(folder: Path) -> SiteSettings:
    """Read a site's settings; a cap that is left out is that of `SITE_CAPS`, and `inf` is no limit.

    With privacy the norm is that of each row, so that no cap on it is taken.
    """
    settings = _read(folder / FILE, SiteSettings)
    usual = vars(SITE_CAPS) | ({"norm": None} if "privacy" in settings else {})
    caps = usual | settings.get("caps", {})
    caps |= {name: None for name in ("gradients", "norm") if caps[name] == math.inf}
    return SiteSettings(**_with_parts(settings | {"caps": caps}))


def lead_settings(folder: Path) -> LeadSettings:
    """Read user 0's settings."""
    return LeadSettings(**_with_parts(_read(folder / FILE, LeadSettings)))


def training_of(proposed: Mapping[str, Any]) -> Training:
    """Return how to train, from plain data that may be of another's making."""
    training: Training = _with_parts({"training": proposed})["training"]
    return training


def members_of(folder: Path) -> tuple[str, ...]:
    """Return who trains, from the folder of a server that passes messages on.

    Nobody where user 0 trains there.
    """
    settings = _read(folder / FILE, LeadSettings, or_else="everyone")
    members: tuple[str, ...] = _NAMES("everyone", settings.get("everyone", ()))
    return members


MOST_SETTINGS = 2**20
"""How many bytes a file of settings may have."""

_PARTS: dict[str, type[Any]] = {"data": Data, "model": Model, "training": Training}
_PARTS |= {"caps": Caps, "privacy": Privacy, "sums": SumsOnly}


def _read(path: Path, kind: type[Any], *, or_else: str = "") -> dict[str, Any]:
    """Return what a file of settings holds, by the names of a kind of settings.

    Or something else alone.
    """
    text = files.read(path, "`coterie federate init` writes it", most=MOST_SETTINGS)
    try:
        settings = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise KnobError(f"{path} cannot be read: {error}; mend it there") from error
    if (missing := set(_needed(kind)) - set(settings)) and or_else not in settings:
        raise KnobError(f"{path} must have {min(missing)!r}")
    known = {each.name for each in fields(kind)} | ({or_else} - {""})
    if stray := sorted(set(settings) - known):
        may = ", ".join(sorted(known))
        raise KnobError(f"{path} has {stray[0]!r}, which is not a setting; it may have {may}")
    for name in _PARTS.keys() & settings.keys():
        _TABLE(name, settings[name])
    return settings


def _needed(kind: type[Any]) -> list[str]:
    """Return the settings of a kind that cannot be left out."""
    return [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]


def _with_parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of which the tables are made into parts."""
    parts = {}
    for name in settings.keys() & _PARTS.keys():
        part, kind = settings[name], _PARTS[name]
        known = [each.name for each in fields(kind)]
        if stray := sorted(set(part) - set(known)):
            may = ", ".join(known)
            raise KnobError(f"[{name}] has {stray[0]!r}, which is not a setting; it may have {may}")
        if missing := [each for each in _needed(kind) if each not in part]:
            raise KnobError(f"[{name}] must have {missing[0]!r}")
        parts[name] = kind(**part)
    return {**settings, **parts}
