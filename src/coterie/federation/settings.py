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
    Setting,
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
_KNOB = Check(
    'lie in [0, 1], or be "auto"', lambda value: value if value == "auto" else SHARE.read(value)
)
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
    """Where a participant's examples are: in a table, or what a loader returns."""

    table: Annotated[
        str,
        Setting(
            "A CSV or Parquet file, one example a row; beside the settings, or an absolute path.",
            _TEXT,
        ),
    ] = ""
    loader: Annotated[
        str,
        Setting(
            '"module.path:function" of the participant\'s folder; returns a `coterie.User`.', _TEXT
        ),
    ] = ""
    target: Annotated[str, Setting("The column to predict.", _TEXT)] = ""
    columns: Annotated[
        Mapping[str, str],
        Setting(
            "This table's names of columns, where they differ from user 0's.",
            mapped(_TEXT, 'a table of names: ours = "yours"'),
        ),
    ] = field(default_factory=dict)
    own_examples: Annotated[
        int | None, Setting("Who trains only: how many rows to train on, at most.", optional(COUNT))
    ] = None


@dataclass(frozen=True)
class Model:
    """The model, which everybody builds from code of its own."""

    name: Annotated[
        str, Setting('"linear", "mlp", or "module.path:factory(n_inputs, n_outputs)".', _TEXT)
    ] = "linear"
    loss: Annotated[
        str,
        Setting(
            '"module.path:function" of (output, target); by the kind of target when empty.', _TEXT
        ),
    ] = ""
    n_inputs: Annotated[int | None, Setting("With a loader only.", optional(COUNT))] = None
    n_outputs: Annotated[int | None, Setting("With a loader only.", optional(COUNT))] = None

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class MessageSettings:
    """Messages, and sites that do not answer."""

    compress: Annotated[
        Compress | None,
        Setting(
            "Send in half precision; what rounding loses is added to the next message.", COMPRESS
        ),
    ] = None
    secure_sums: Annotated[
        bool | Mapping[str, Sequence[str]],
        Setting(
            "See only the sum of the sites' gradients, or of each group of sites; for wga and bc.",
            _GROUPS,
        ),
    ] = False
    timeout: Annotated[float, Setting("Seconds to wait for a site in one step.", POSITIVE)] = 10.0
    misses: Annotated[
        int, Setting("Steps without an answer until a site is not waited for.", COUNT)
    ] = 3
    probe_every: Annotated[
        int, Setting("Steps between checks whether such a site is back.", COUNT)
    ] = 10
    minimum: Annotated[int, Setting("Answers without which a step is taken alone.", COUNT)] = 1


@dataclass(frozen=True, kw_only=True)
class Training(StepSettings, MessageSettings):
    """How user 0 trains: the options of `coterie train`, and how long it waits for a site.

    A rule of user 0's own is imported by `coterie --import` when user 0 starts the server; these
    settings name no code.
    """

    rule: Annotated[str, Setting("A rule, or a method, whose rounds are the steps.", _TEXT)] = (
        "adaptive"
    )
    alpha: Annotated[
        float | Literal["auto"] | None, Setting("The peers' weight.", optional(_KNOB))
    ] = None
    beta: Annotated[
        float | Literal["auto"] | None,
        Setting("How fast the bias estimate follows.", optional(_KNOB)),
    ] = None
    knobs: Annotated[
        Mapping[str, Any],
        Setting("Knobs of the rule or method.", mapped(ANYTHING, "a table of knobs")),
    ] = field(default_factory=dict)

    rarest: Annotated[
        int,
        Setting(
            "A network asks sites that answer slowly at one of so many steps at least; 1: at every"
            " step, or as `exchange_every` says.",
            COUNT,
        ),
    ] = 8

    def __post_init__(self) -> None:
        check_settings(self)
        if self.secure_sums and (self.compress or self.local_steps > 1):
            raise KnobError(
                "`secure_sums` takes neither `compress` nor `local_steps`: a masked sum is of"
                " gradients, and exact"
            )


@dataclass(frozen=True)
class SiteSettings:
    """A site's settings; see the parts."""

    name: Annotated[str, Setting("The site's name.", _TEXT)]
    data: Data = Data()
    model: Model = Model()
    caps: Caps = SITE_CAPS
    privacy: Privacy | None = None  # what is promised about each row
    sums: SumsOnly | None = None  # give masked sums only, and which
    threads: Annotated[int, Setting("CPU threads.", COUNT)] = 1
    kit: Annotated[
        str, Setting("The fingerprint of the kit that the site has accepted.", _TEXT)
    ] = ""
    sites: Annotated[
        Sequence[str], Setting("Where everyone trains: whom it asks and answers.", _NAMES)
    ] = ()
    training: Training | None = None  # where everyone trains: how it trains its own model
    keys: Annotated[
        Mapping[str, str], Setting("Where everyone trains: the others' fingerprints.", _KEYS)
    ] = field(default_factory=dict)

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
        return LeadSettings(
            self.name, tuple(self.sites), self.data, self.model, self.training, self.threads
        )


@dataclass(frozen=True)
class LeadSettings:
    """User 0's settings; see the parts."""

    me: Annotated[str, Setting("The name of user 0.", _TEXT)]
    sites: Annotated[tuple[str, ...], Setting("Whom it asks.", _NAMES)]
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    threads: Annotated[int, Setting("CPU threads.", COUNT)] = 1

    def __post_init__(self) -> None:
        check_settings(self)


def site_settings(folder: Path) -> SiteSettings:
    """Read a site's settings; a cap that is left out is that of `SITE_CAPS`, and `inf` is no limit.

    With privacy the norm is that of each row, so that no cap on it is taken.
    """
    settings = _read(folder / FILE, SiteSettings)
    caps = (
        vars(SITE_CAPS)
        | ({"norm": None} if "privacy" in settings else {})
        | settings.get("caps", {})
    )
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

_PARTS: Mapping[str, type[Any]] = {
    "data": Data,
    "model": Model,
    "caps": Caps,
    "privacy": Privacy,
    "sums": SumsOnly,
    "training": Training,
}


def _read(path: Path, kind: type[Any], *, or_else: str = "") -> dict[str, Any]:
    """Return what a file of settings holds, by the names of a kind of settings.

    Or something else alone.
    """
    text = files.read(path, "`coterie federate init` writes it", most=MOST_SETTINGS)
    try:
        settings = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise KnobError(f"{path} cannot be read: {error}; mend it there") from error
    if missing := [
        name for name in _needed(kind) if name not in settings and or_else not in settings
    ]:
        raise KnobError(f"{path} must have {missing[0]!r}")
    known = {each.name for each in fields(kind)} | ({or_else} - {""})
    if stray := sorted(set(settings) - known):
        raise KnobError(
            f"{path} has {stray[0]!r}, which is not a setting; it may have"
            f" {', '.join(sorted(known))}"
        )
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
            raise KnobError(
                f"[{name}] has {stray[0]!r}, which is not a setting; it may have {', '.join(known)}"
            )
        if missing := [each for each in _needed(kind) if each not in part]:
            raise KnobError(f"[{name}] must have {missing[0]!r}")
        parts[name] = kind(**part)
    return {**settings, **parts}
