"""What a participant sets: a `coterie.toml` in user 0's folder, and one in each site's."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coterie.arguments import (
    ANYTHING,
    COUNT,
    POSITIVE,
    SEED,
    SHARE,
    Check,
    check_fields,
    either,
    instance,
    listed,
    mapped,
    one_of,
    optional,
)
from coterie.engines.peer import Caps
from coterie.errors import KnobError
from coterie.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.recording import files

FILE = "coterie.toml"
_TEXT = instance(str, "a text")
_KNOB = Check('lie in [0, 1], or be "auto"', lambda value: value if value == "auto" else SHARE.read(value))
_TABLE = instance(dict, "a table of settings")
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("name", "kit", "me", "table", "loader", "target", "loss", "rule"), _TEXT),
    **dict.fromkeys(("data", "model", "caps", "privacy", "sums", "training"), _TABLE),
    **dict.fromkeys(("threads", "own_examples", "n_inputs", "n_outputs", "steps", "batch_size"), COUNT),
    **dict.fromkeys(("exchange_every", "local_steps"), COUNT),
    **dict.fromkeys(("misses", "probe_every", "minimum"), COUNT),
    **dict.fromkeys(("alpha", "beta"), _KNOB),
    "lr": optional(POSITIVE),
    "timeout": POSITIVE,
    **dict.fromkeys(("sites", "everyone"), listed(_TEXT, "a list of names")),
    "columns": mapped(_TEXT, 'a table of names: ours = "yours"'),
    "knobs": mapped(ANYTHING, "a table of knobs"),
    "keys": mapped(_TEXT, 'a table of fingerprints: site = "its fingerprint"'),
    "secure_sums": either(
        instance(bool, "true or false"), mapped(listed(_TEXT, "a list of names"), "a table of groups of sites")
    ),
    "seed": SEED,
    "compress": one_of("", "bf16", "fp16"),
}
"""What each setting may be; caps and privacy say themselves."""
SITE_CAPS = Caps(gradients=10_000, norm=10.0, examples=16)
"""What a site gives at most unless it sets otherwise: two runs of 1000 steps with the default rule."""
NO_PRIVACY = (
    "where everyone trains, nothing can be promised about a row: the points of a site's own run, which it "
    "sends to the others, tell of its rows without noise; leave [privacy] away, or let one site lead"
)

NO_SUMS = (
    "where everyone trains, sums are not masked: two sites that ask for sums of the same gradients by other "
    "weights could work out the parts; leave `secure_sums` and [sums] away"
)


@dataclass(frozen=True)
class Data:
    """Where a participant's examples are: in a table, or what a loader returns."""

    table: str = ""  # a CSV or Parquet file with one example a row, beside the settings or an absolute path
    loader: str = ""  # "module.path:function" of the participant's folder that returns a `coterie.User`
    target: str = ""  # the column to predict
    columns: Mapping[str, str] = field(default_factory=dict)  # this table's names, where they differ from user 0's
    own_examples: int | None = None  # user 0 only: how many rows to train on, at most


@dataclass(frozen=True)
class Model:
    """The model, which everybody builds from code of its own."""

    name: str = "linear"  # or "mlp", or "module.path:factory(n_inputs, n_outputs)"
    loss: str = ""  # "module.path:function" of (output, target); by the kind of target when empty
    n_inputs: int | None = None  # with a loader only, as the next
    n_outputs: int | None = None


@dataclass(frozen=True)
class Training:
    """How user 0 trains: the options of `coterie train`, and how long it waits for a site.

    A rule of user 0's own is imported by `coterie --import` when user 0 starts the server; these settings name no
    code.
    """

    rule: str = "adaptive"  # or a method, whose rounds are the steps
    alpha: float | Literal["auto"] | None = None
    beta: float | Literal["auto"] | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1000
    lr: float | None = None  # Adam's, 0.01 if left out; of a method 0.1
    batch_size: int = 32
    seed: int = 0
    exchange_every: int = 1
    local_steps: int = 1
    timeout: float = 10.0
    misses: int = 3
    probe_every: int = 10
    minimum: int = 1
    compress: str = ""  # "bf16" or "fp16": round what is sent
    secure_sums: bool | Mapping[str, Sequence[str]] = False  # see the sum of the sites' gradients only, by masks
    """Or the mean of each of some groups of sites, by a name for the group."""

    def __post_init__(self) -> None:
        names = ("steps", "lr", "batch_size", "seed", "timeout", "misses", "probe_every", "minimum")
        checked = (*names, "exchange_every", "local_steps", "compress", "secure_sums")
        check_fields(self, {name: CHECKS[name] for name in checked})
        if self.secure_sums and (self.compress or self.local_steps > 1):
            raise KnobError(
                "`secure_sums` takes neither `compress` nor `local_steps`: a masked sum is of gradients, and exact"
            )


@dataclass(frozen=True)
class SiteSettings:
    """A site's settings; see the parts."""

    name: str
    data: Data
    model: Model
    caps: Caps
    privacy: Privacy | None = None  # what is promised about each row
    sums: SumsOnly | None = None  # give masked sums only, and which
    threads: int = 1
    kit: str = ""  # the fingerprint of the kit that the site has accepted
    sites: tuple[str, ...] = ()  # where everyone trains: whom it asks and answers
    training: Training | None = None  # where everyone trains: how it trains its own model

    def __post_init__(self) -> None:
        if (self.training is None) != (not self.sites):
            raise KnobError("`sites` and [training] must both be there, as where everyone trains, or neither")
        if self.training is not None and (self.sums is not None or self.training.secure_sums):
            raise KnobError(NO_SUMS)
        if self.training is not None and self.privacy is not None:
            raise KnobError(NO_PRIVACY)

    def as_lead(self) -> "LeadSettings":
        """Return the settings by which a site trains a model of its own."""
        if self.training is None:
            raise KnobError(f"{self.name} trains no model of its own: its settings have no [training]")
        return LeadSettings(self.name, self.sites, self.data, self.model, self.training, self.threads)


@dataclass(frozen=True)
class LeadSettings:
    """User 0's settings; see the parts."""

    me: str
    sites: tuple[str, ...]
    data: Data
    model: Model
    training: Training
    threads: int = 1


def site_settings(folder: Path) -> SiteSettings:
    """Read a site's settings; a cap that is left out is that of `SITE_CAPS`, and `inf` is no limit.

    With privacy the norm is that of each row, so that no cap on it is taken.
    """
    parts_of_it = {"data", "model", "caps", "privacy", "sums", "training"}
    settings = _read(folder / FILE, ("name",), {"threads", "kit", "sites", *parts_of_it})
    kinds = {"privacy": Privacy, "sums": SumsOnly, "training": Training}
    chosen = {name: kind for name, kind in kinds.items() if name in settings}
    caps = vars(SITE_CAPS) | ({"norm": None} if "privacy" in chosen else {}) | settings.get("caps", {})
    caps |= {name: None for name in ("gradients", "norm") if caps[name] == math.inf}
    parts = _parts(settings | {"caps": caps}, data=Data, model=Model, caps=Caps, **chosen)
    names = ("name", "threads", "kit", "sites")
    return SiteSettings(**{name: settings[name] for name in names if name in settings}, **parts)


def lead_settings(folder: Path) -> LeadSettings:
    """Read user 0's settings."""
    settings = _read(folder / FILE, ("me", "sites"), {"threads", "data", "model", "training"})
    parts = _parts(settings, data=Data, model=Model, training=Training)
    return LeadSettings(
        **{name: settings[name] for name in ("me", "sites", "threads") if name in settings}, **parts
    )


def training_of(given: Mapping[str, Any]) -> Training:
    """Return how to train, from plain data that may be of another's making."""
    training: Training = _parts({"training": given}, training=Training)["training"]
    return training


def members_of(folder: Path) -> tuple[str, ...]:
    """Return who trains, from the folder of a server that passes messages on; nobody where user 0 trains there."""
    known = {"everyone", "me", "sites", "threads", "data", "model", "training"}
    settings = _read(folder / FILE, (), known)
    members: tuple[str, ...] = settings.get("everyone", ())
    return members


def _read(path: Path, needed: Sequence[str], optional: set[str]) -> dict[str, Any]:
    known = {*needed, *optional}
    text = files.read(path, "`coterie federate init` writes it")
    try:
        settings = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise KnobError(f"{path} cannot be read: {error}; mend it there") from error
    missing, stray = [name for name in needed if name not in settings], set(settings) - known
    if missing:
        raise KnobError(f"{path} must have {missing[0]!r}")
    if stray:
        raise KnobError(
            f"{path} has {sorted(stray)[0]!r}, which is not a setting; it may have {', '.join(sorted(known))}"
        )
    return {name: CHECKS[name](name, value) for name, value in settings.items()}


def _parts(settings: Mapping[str, Any], **kinds: type[Any]) -> dict[str, Any]:
    parts = {}
    for name, kind in kinds.items():
        part, known = settings.get(name, {}), [f.name for f in fields(kind)]
        if stray := sorted(set(part) - set(known)):
            raise KnobError(f"[{name}] has {stray[0]!r}, which is not a setting; it may have {', '.join(known)}")
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        if missing := [each for each in needed if each not in part]:
            raise KnobError(f"[{name}] must have {missing[0]!r}")
        parts[name] = kind(**{k: CHECKS.get(k, ANYTHING)(k, value) for k, value in part.items()})
    return parts
