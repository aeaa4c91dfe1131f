"""A kit is data: what may be in the folder that a site is handed, and the fingerprint by which it knows it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from coterie.errors import FileError, KnobError
from coterie.federation.settings import training_of
from coterie.recording import files

KIT, MANIFEST = "kit.json", "manifest.json"
CERTIFICATES = ("client.crt", "client.key", "rootCA.pem")
PREPARATION = "preparation.json"
INSTALL, LOCK = "install.sh", "requirements.lock"
KIT_FILES = (KIT, "README.md", *CERTIFICATES, PREPARATION, INSTALL, LOCK)
"""What a kit consists of, beside the wheel of coterie and the manifest."""
WHEEL = re.compile(r"coterie-[0-9A-Za-z.+!]{1,40}-py3-none-any\.whl")
ENVIRONMENT = "venv"
"""Where `install.sh` installs; it belongs to no kit."""
MAX_BYTES = 2**26
"""How large a file of a kit may be."""

_REMEDY = "ask user 0 for a new kit, over a safe way"


def check_name(name: object, what: str = "names") -> str:
    """Return a name of letters, digits, - and _, such as can stand in a path, a certificate or a log.

    Example:
        >>> check_name("basel-2")
        'basel-2'
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        got = str(name)[:80]
        raise KnobError(f"{what} must be letters, digits, - and _, at most 64, got {got!r}")
    return name


def check_host(host: object) -> str:
    """Return the name or address of a host, such as can stand in a configuration."""
    if not isinstance(host, str) or not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", host):
        raise KnobError(f"`server` must be the name of a host, got {str(host)[:80]!r}")
    return host


@dataclass(frozen=True)
class Kit:
    """What user 0 tells a site, beside certificates and how rows become inputs."""

    consortium: str
    site: str
    lead: str  # user 0's name
    server: str  # the host that the site dials
    port: int
    target: str  # the column to predict
    columns: tuple[str, ...]
    model: str  # a proposal: code is only run where the site names it itself
    size: int  # how many numbers the model has
    # how many the planned run asks for, at most; all runs together where everyone trains
    gradients: int
    batch_size: int  # 0 for E-steps, which are of all rows
    # everybody who trains, this site too; nobody where user 0 alone does
    members: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)  # a proposal for how they train

    @property
    def everyone(self) -> bool:
        """Whether every site trains a model of its own."""
        return bool(self.members)

    @property
    def asked(self) -> str:
        """What the planned run asks for, in words."""
        if self.batch_size:
            return f"{self.gradients} gradients, of {self.batch_size} rows each"
        return f"{self.gradients} gradients, in E-steps, each of which is of all your rows"

    @property
    def others(self) -> tuple[str, ...]:
        """Everybody else who trains."""
        return tuple(name for name in self.members if name != self.site)

    def __post_init__(self) -> None:
        check_name(self.consortium)
        check_name(self.site)
        check_host(self.server)
        for name in (self.lead, self.target, self.model, *self.columns):
            if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 1000:
                raise KnobError(
                    f"names must be printable text, at most 1000 characters, got {str(name)[:80]!r}"
                )
        for name, least in {"port": 1, "size": 1, "gradients": 1, "batch_size": 0}.items():
            number = getattr(self, name)
            if type(number) is not int or not least <= number < 2**40:
                got = str(number)[:80]
                raise KnobError(f"`{name}` must be a positive whole number, got {got!r}")
        for name in self.members:
            check_name(name)
        if self.members and (
            self.site not in self.members or len(set(self.members)) < len(self.members)
        ):
            raise KnobError(
                f"`members` must be different names, {self.site!r} too, got {list(self.members)}"
            )
        training_of(self.training)  # what is no setting, or out of range, is told now
        if self.port >= 2**16:
            raise KnobError(f"`port` must be below 65536, got {self.port}")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it from a kit."""
        # which kits that were made before do not have
        later: dict[str, Any] = {"members": [], "training": {}}
        names = [each.name for each in fields(cls)]
        content = later | files.read_json(
            folder / KIT, _REMEDY, [name for name in names if name not in later]
        )
        if stray := sorted(set(content) - set(names)):
            raise FileError(f"{folder / KIT} has {stray[0]!r}, which is not known here; {_REMEDY}")
        for name in ("columns", "members"):
            if not isinstance(content[name], list):
                raise FileError(f"{folder / KIT} must have a list of `{name}`; {_REMEDY}")
            content[name] = tuple(content[name])
        if not isinstance(content["training"], dict):
            raise FileError(f"{folder / KIT} must have a table of `training`; {_REMEDY}")
        return cls(**content)

    def save(self, folder: Path) -> None:
        """Write it to a kit."""
        plain = {"columns": list(self.columns), "members": list(self.members)}
        files.write_json(folder / KIT, vars(self) | plain | {"training": dict(self.training)})


def seal(folder: Path) -> str:
    """Write the manifest of a kit that is complete, with a digest of every file, and return its fingerprint."""
    wheel = next(path.name for path in folder.iterdir() if WHEEL.fullmatch(path.name))
    digests = {name: files.sha256((folder / name).read_bytes()) for name in (*KIT_FILES, wheel)}
    files.write_json(folder / MANIFEST, {"files": digests})
    return fingerprint(folder)


def fingerprint(folder: Path) -> str:
    """Return the fingerprint of a kit, for two people to compare: a digest of its manifest."""
    digest = files.sha256(_content(folder, MANIFEST))[:32]
    return "-".join(digest[start : start + 4] for start in range(0, 32, 4))


def verify(folder: Path, expected: str, *, alone: bool = False) -> None:
    """Refuse a kit of another fingerprint, and one of which a file is not as the manifest says.

    Args:
        folder: where the kit is.
        expected: the fingerprint that user 0 has told.
        alone: refuse any other file or folder too, as for a kit that has just come.
    """
    if (actual := fingerprint(folder)) != expected.strip().lower():
        raise FileError(
            f"the kit {folder} has the fingerprint {actual}, not {expected[:80]!r}; {_REMEDY}"
        )
    listed = kit_files(folder)
    for name, digest in listed.items():
        if files.sha256(_content(folder, name)) != digest:
            raise FileError(f"{folder / name} is not what the kit's manifest says; {_REMEDY}")
    known = {*listed, MANIFEST, ENVIRONMENT}
    stray = sorted({path.name for path in folder.iterdir()} - known)
    if alone and stray:
        raise FileError(
            f"{folder} holds {stray[0]!r}, which belongs to no kit; move it away if it is yours,"
            f" else {_REMEDY}"
        )


def kit_files(folder: Path) -> dict[str, str]:
    """Return the files of a kit with their digests, as its manifest lists them."""
    listed = files.read_json(folder / MANIFEST, _REMEDY, ["files"])["files"]
    wheels = [name for name in listed if WHEEL.fullmatch(name)] if isinstance(listed, dict) else []
    if len(wheels) != 1 or set(listed) - set(wheels) != set(KIT_FILES):
        raise FileError(
            f"the manifest of {folder} must list {', '.join(KIT_FILES)}, a wheel of coterie and"
            f" nothing else; {_REMEDY}"
        )
    return dict(listed)


def _content(folder: Path, name: str) -> bytes:
    """Return what a file of a kit holds; a link may lead anywhere, and is refused."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise FileError(f"there is no file {path}; {_REMEDY}")
    if path.stat().st_size > MAX_BYTES:
        raise FileError(f"{path} is larger than {MAX_BYTES} bytes; {_REMEDY}")
    return files.read(path, _REMEDY)


def quoted(value: Any) -> str:
    """Return a value as TOML: its strings, numbers, truth values and lists are JSON's.

    Example:
        >>> print(quoted({"a b": [1, "x"]}))
        {"a b" = [1, "x"]}
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quoted(str(k))} = {quoted(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def filled(template: str, **values: Any) -> str:
    """Return a file of `templates` with these values; the filter `quoted` writes one as TOML, or JSON."""
    import jinja2

    made = jinja2.Environment(  # noqa: S701  # no HTML
        loader=jinja2.PackageLoader("coterie.federation"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["quoted"] = quoted
    return made.get_template(template).render(values)
