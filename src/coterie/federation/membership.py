"""Who is in a consortium, and for how long: sites that come later, certificates that end, sites that leave."""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from coterie.data import Preparation
from coterie.errors import FileError, KnobError
from coterie.federation.kits import KIT_AS_MADE, write_kit
from coterie.federation.manifest import (
    CERTIFICATES,
    MANIFEST,
    Kit,
    check_name,
    kit_files,
    quoted,
    verify,
)
from coterie.federation.provisioning import LEAD, client_line, provision_again
from coterie.federation.settings import FILE, lead_settings, members_of
from coterie.federation.workspace import write_configuration
from coterie.recording import files

DAYS_TO_RENEW = 60
"""How many days before a certificate ends that is told."""


def days_valid(certificate: Path) -> tuple[float, float]:
    """Return for how many days a certificate has been valid, and for how many more it is."""
    from cryptography import x509

    read = x509.load_pem_x509_certificate(files.read(certificate, "ask user 0 for a new kit"))
    now = datetime.now(UTC)
    ends = now - read.not_valid_before_utc, read.not_valid_after_utc - now
    since, left = (each.total_seconds() / 86_400 for each in ends)
    return since, left


def add_site(folder: Path, site: str) -> str:
    """Make a kit for one more site, which the next run asks, and return its fingerprint.

    A name that was revoked is let in again, also by its old certificate until that ends.
    """
    kit, sites = _consortium(folder), lead_settings(folder).sites
    check_name(site)
    if site in sites:
        raise KnobError(f"{site!r} is in {folder / FILE} already; `coterie federate renew` it")
    project = folder / "project.yml"
    text, lead = project.read_text(encoding="utf-8"), f"  - {{name: {json.dumps(LEAD)}"
    if client_line(site) not in text:
        text = text.replace(lead, f"{client_line(site)}\n{lead}")
        files.write(project, text.encode())
    _forget(folder, kit, [site])  # where it was there before, and may have lost its key
    fingerprint = _kit(folder, replace(kit, site=site))
    _write_sites(folder, [*sites, site])
    _write_disabled(folder, without=site)
    return fingerprint


def renew(folder: Path, site: str | None = None) -> str | None:
    """Make new certificates: a new kit for a site, of which the fingerprint is returned, or user 0's own.

    The old ones stay valid until they end.
    """
    kit = _consortium(folder)
    if site and site not in lead_settings(folder).sites:
        raise KnobError(f"{site!r} is not in {folder / FILE}; `coterie federate add-site` it")
    _forget(folder, kit, [site] if site else [LEAD, kit.server])
    if site:
        shutil.rmtree(folder / "sites" / site, ignore_errors=True)
        return _kit(folder, kit if kit.site == site else replace(kit, site=site))
    made = provision_again(folder, kit.consortium)
    for who, ours in ((kit.server, "server"), (LEAD, "lead")):
        for path in (made / who / "startup").iterdir():
            if path.suffix in (".crt", ".key", ".pem"):
                shutil.copyfile(path, folder / ours / "startup" / path.name)
    shutil.rmtree(made)
    return None


def revoke(folder: Path, site: str) -> None:
    """Let a site in no more: no run asks it, and the server refuses it from its next start on."""
    _consortium(folder)
    sites = lead_settings(folder).sites
    if site not in sites:
        raise KnobError(f"{site!r} is not in {folder / FILE}, which has {', '.join(sites)}")
    if len(sites) == 1:
        raise KnobError(f"{site!r} is the only site of {folder}; nothing would be left to ask")
    _write_sites(folder, [name for name in sites if name != site])
    _write_disabled(folder, site)


def take_renewed(old: Path, new: Path, fingerprint: str) -> Kit:
    """Take a renewed kit over into the folder of a site, whose settings and log stay."""
    verify(new, fingerprint, alone=True)
    before, kit = Kit.load(old), Kit.load(new)
    if replace(kit, gradients=before.gradients, batch_size=before.batch_size) != before:
        raise FileError(
            f"{new} is no renewal of {old}: they differ in more than certificates; accept it in a"
            " folder of its own"
        )
    for name in (*kit_files(new), MANIFEST):
        shutil.copyfile(new / name, old / name)
        (old / name).chmod(0o600)
    path = old / FILE
    text = path.read_text(encoding="utf-8")
    files.write(path, re.sub(r"(?m)^kit = .*$", f"kit = {quoted(fingerprint)}", text).encode())
    path.chmod(0o600)
    return kit


def _consortium(folder: Path) -> Kit:
    """Return the kit that the first site was given."""
    if members_of(folder):
        raise KnobError(
            "where everyone trains, every kit names all members; make a new consortium with"
            " `coterie federate init --everyone`"
        )
    return Kit.load(folder / KIT_AS_MADE)


def _forget(folder: Path, kit: Kit, names: Collection[str]) -> None:
    """Let the authority forget certificates that it has signed, so that new keys are made."""
    state = folder / "authority" / kit.consortium / "state" / "cert.json"
    known = json.loads(files.read(state, "nothing can be renewed without it"))
    write_configuration(state, {who: known[who] for who in known if who not in names})
    state.chmod(0o600)


def _kit(folder: Path, kit: Kit) -> str:
    made = provision_again(folder, kit.consortium)
    place = folder / "sites" / kit.site
    place.mkdir(parents=True, mode=0o700)
    for name in CERTIFICATES:
        shutil.move(made / kit.site / "startup" / name, place / name)
        (place / name).chmod(0o600)
    shutil.rmtree(made)
    return write_kit(place, kit, Preparation.load(folder))


def _write_sites(folder: Path, sites: list[str]) -> None:
    path = folder / FILE
    text = path.read_text(encoding="utf-8")
    files.write(path, re.sub(r"(?m)^sites = .*$", f"sites = {quoted(sites)}", text).encode())


def _write_disabled(folder: Path, *names: str, without: str = "") -> None:
    """Write NVFLARE's list of the sites that its server refuses, which it reads when it starts."""
    path = folder / "server" / "disabled_clients.json"
    text = path.read_text(encoding="utf-8") if path.exists() else '{"disabled_clients": []}'
    before = json.loads(text)["disabled_clients"]
    write_configuration(path, {"disabled_clients": sorted({*before, *names} - {without})})
