"""Kits: the folder that user 0 makes for each site, and what a site makes of it."""

import base64
import hashlib
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import coterie
from coterie.arguments import settings_of
from coterie.data import Preparation, read_table
from coterie.data.reading import FileForm
from coterie.engines.peer import Caps
from coterie.errors import CoterieError, KnobError
from coterie.federation import manifest
from coterie.federation.lead import planned_gradients
from coterie.federation.manifest import INSTALL, LOCK, Kit, filled, kit_files, quoted, seal, verify
from coterie.federation.participants import lead_task
from coterie.federation.provisioning import Consortium, provision
from coterie.federation.settings import (
    FILE,
    MIXTURE,
    SITE_CAPS,
    Data,
    LeadSettings,
    Model,
    Training,
)
from coterie.recording import files
from coterie.tables import models

KIT_AS_MADE = "kit"
"""Where user 0 keeps what its kits have in common."""


_TAG = "py3-none-any"
"""No package index has coterie: a kit brings the one that runs here."""


def set_up(
    folder: Path, consortium: Consortium, settings: LeadSettings, **columns: Any
) -> dict[str, str]:
    """Write user 0's folder, with a kit for each site and coterie's wheel, and return the kits' fingerprints.

    The folder must hold no consortium yet. User 0's table is read to learn how rows become inputs.
    Where everyone trains user 0 has a kit too, which is accepted, and the folder beside it is the
    server's alone. `columns` are `kind`, `categorical`, `drop` and `ids` of `from_table`.
    """
    rows = read_table(settings.data.table, **settings.data.form)
    task = lead_task(rows, settings, **columns)
    preparation = task.preparation
    model = models.build(settings.model.name, task.n_inputs, task.n_outputs)
    size = sum(tensor.numel() for tensor in model.state_dict().values())
    kit = _kit(consortium.sites[0], consortium, settings, preparation, size)
    # what a run asks is found out once
    kits = [replace(kit, site=site) for site in consortium.sites]
    with _whole_or_nothing(folder):
        return _write(folder, consortium, settings, preparation, kits)


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Take away what was written to a folder where that has failed, so that a second try finds it as before."""
    there = set(folder.iterdir()) if folder.exists() else None
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - (there or set()) if folder.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if there is None and folder.exists():
            folder.rmdir()
        raise


def _write(
    folder: Path, who: Consortium, settings: LeadSettings, prepared: Preparation, kits: list[Kit]
) -> dict[str, str]:
    """Write user 0's folder and the kits; see `set_up`."""
    provision(who, folder, kits[0].size)
    if not who.everyone:
        prepared.save(folder)
    text = _server_file(who.sites) if who.everyone else _lead_file(settings)
    (folder / FILE).write_text(text, encoding="utf-8")
    (folder / KIT_AS_MADE).mkdir(mode=0o700)
    kits[0].save(folder / KIT_AS_MADE)  # by which kits of later sites are made
    fingerprints = {kit.site: write_kit(folder / "sites" / kit.site, kit, prepared) for kit in kits}
    if who.everyone:
        accept(folder / "sites" / settings.me, fingerprints[settings.me], mine=settings.data)
    return fingerprints


def write_kit(place: Path, kit: Kit, preparation: Preparation) -> str:
    """Write a kit where its certificates are, and return its fingerprint."""
    write_installation(place)
    kit.save(place)
    preparation.save(place)
    page = filled("kit.md", kit=kit, file=FILE, caps=first_caps(kit))
    (place / "README.md").write_text(page, encoding="utf-8")
    return seal(place)


def _kit(
    site: str, consortium: Consortium, settings: LeadSettings, preparation: Preparation, size: int
) -> Kit:
    return Kit(
        consortium=consortium.name,
        site=site,
        lead=settings.me,
        server=consortium.server,
        port=consortium.port,
        target=settings.data.target,
        columns=(*preparation.numeric, *preparation.categorical),
        model=settings.model.name,
        size=size,
        gradients=planned_gradients(settings)
        * (len(consortium.sites) - 1 if consortium.everyone else 1),
        batch_size=0 if settings.training.rule == MIXTURE else settings.training.batch_size,
        members=consortium.sites if consortium.everyone else (),
        training=_proposed(settings.training) if consortium.everyone else {},
    )


def _proposed(training: Training) -> dict[str, Any]:
    """Return how user 0 proposes that everyone trains, as plain data; masked sums cannot be had."""
    return {name: value for name, value in _given(training).items() if name != "secure_sums"}


def first_caps(kit: Kit) -> Caps:
    """Return what a site gives at most until it sets otherwise.

    As many gradients again for each who asks.
    """
    return replace(SITE_CAPS, gradients=(SITE_CAPS.gradients or 0) * max(1, len(kit.others)))


def accept(
    folder: Path, fingerprint: str, caps: Caps | None = None, mine: Data | None = None
) -> Kit:
    """Check a kit that has come against the fingerprint that user 0 has told, and write the site's own settings.

    A file that belongs to no kit is refused. Code that user 0 proposes is not taken over: the site
    names its own. How user 0 proposes to train, where everyone does, is written down for the site
    to change.

    Args:
        folder: where the kit is.
        fingerprint: what user 0 has told.
        caps: what the site gives at most; `first_caps` when None.
        mine: user 0's own table, where the kit is its own.
    """
    verify(folder, fingerprint, alone=True)
    kit = Kit.load(folder)
    folder.chmod(0o700)
    for name in kit_files(folder):
        (folder / name).chmod(0o600)
    path = folder / FILE
    path.touch(mode=0o600)
    own: dict[str, Any] = {"mine": mine, "own_examples": mine and mine.own_examples}
    own |= {"caps": caps or first_caps(kit), "fingerprint": manifest.fingerprint(folder)}
    size = kit.batch_size or Training.batch_size
    path.write_text(filled("site.toml", kit=kit, batch_size=size, **own), encoding="utf-8")
    return kit


def accepted(folder: Path, fingerprint: str) -> Kit:
    """Return the kit that a site has accepted, once it is still the same."""
    if not fingerprint:
        raise KnobError(f"the kit {folder} is not accepted yet; `coterie federate accept {folder}`")
    verify(folder, fingerprint)
    return Kit.load(folder)


def _lead_file(settings: LeadSettings) -> str:
    text = f"me = {quoted(settings.me)}\nsites = {quoted(list(settings.sites))}\n"
    text += f"threads = {settings.threads}\n"
    for name in ("data", "model", "training"):
        text += f"\n[{name}]\n{_lines(getattr(settings, name))}\n"
    return text


def _server_file(members: Sequence[str]) -> str:
    note = "# The server passes messages on between these sites. It holds no data."
    return f"{note}\neveryone = {quoted(list(members))}\n"


def _lines(part: Data | Model | Training) -> str:
    """Return the settings of a part; those that are left out stand as comments, with what they mean."""
    kind: Any = type(part)
    written = [f"{name} = {quoted(value)}" for name, value in _given(part).items()]
    notes = settings_of(kind).items()
    left_out = [f"# {n} =   # {note.help}" for n, note in notes if getattr(part, n) is None]
    return "\n".join([*written, *left_out])


def _given(part: Data | Model | Training) -> dict[str, Any]:
    usual = vars(FileForm())
    given = {name: value for name, value in vars(part).items() if value not in (None, "", {})}
    return {n: value for n, value in given.items() if n not in usual or value != usual[n]}


def write_installation(folder: Path) -> None:
    """Write coterie's wheel, the lock of what it needs, and the script that installs both, to a kit."""
    wheel, digest = write_wheel(folder)
    lock = lock_file().read_bytes()
    (folder / LOCK).write_bytes(lock)
    script = filled(
        "install.sh",
        wheel=wheel,
        wheel_digest=digest,
        lock=LOCK,
        lock_digest=files.sha256(lock),
        torch=f"torch=={metadata.version('torch').partition('+')[0]}",
    )
    (folder / INSTALL).write_text(script, encoding="utf-8")
    (folder / INSTALL).chmod(0o700)


def lock_file() -> Path:
    """Return where the lock is: in the package, or where the package is developed beside its source."""
    package = Path(coterie.__file__).parent
    beside = package / "federation" / LOCK
    found = beside if beside.exists() else package.parents[1] / LOCK
    if not found.exists():
        raise CoterieError(f"a kit needs {beside}; install coterie from its wheel or its source")
    return found


def write_wheel(folder: Path) -> tuple[str, str]:
    """Write the installed coterie as a wheel, and return its name and its SHA-256.

    It holds the files that run here, so that sites get the same code. The same files give the same
    bytes.
    """
    distribution = metadata.distribution("coterie")
    package = Path(coterie.__file__).parent
    content = {
        f"coterie/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    content[f"coterie/federation/{LOCK}"] = lock_file().read_bytes()
    about = f"coterie-{distribution.version}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        content[f"{about}/{name}"] = (distribution.read_text(name) or "").encode()
    tags = f"Wheel-Version: 1.0\nGenerator: coterie\nRoot-Is-Purelib: true\nTag: {_TAG}\n"
    content[f"{about}/WHEEL"] = tags.encode()
    record = [
        f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in sorted(content.items())
    ]
    content[f"{about}/RECORD"] = "".join([*record, f"{about}/RECORD,,\n"]).encode()
    wheel = folder / f"coterie-{distribution.version}-{_TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel.name, files.sha256(wheel.read_bytes())


def _digest(data: bytes) -> str:
    """Return a SHA-256 as a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
