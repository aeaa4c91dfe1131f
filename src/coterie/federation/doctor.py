"""What would go wrong at a site or at user 0, a line each with its remedy; and how things stand."""

import json
import re
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from coterie.errors import CoterieError
from coterie.federation.kits import accepted
from coterie.federation.lead import RECORD, RUN, SUMMARY
from coterie.federation.manifest import CERTIFICATES, WHEEL, Kit, filled, kit_files
from coterie.federation.membership import DAYS_TO_RENEW, days_valid
from coterie.federation.participants import LOG as REQUESTS
from coterie.federation.participants import lead_participant, responder_of
from coterie.federation.settings import lead_settings, members_of, site_settings
from coterie.federation.supervision import SUBMITTED, connected_sites
from coterie.federation.watching import LEAST_ROOM
from coterie.recording.configuration import counted
from coterie.recording.record import Record

SECONDS_TO_CONNECT = 5.0
"""How long the server has to answer a connection."""


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    what: str
    said: str
    remedy: str = ""  # empty where all is well

    def __str__(self) -> str:
        """Return it as a line."""
        mark = "--" if self.remedy else "ok"
        return f"{mark}  {self.what}: {self.said}" + (f". {self.remedy}" if self.remedy else "")


def examine(folder: Path) -> Iterator[Finding]:
    """Look for what would go wrong at a site, or at user 0 where the folder is its own."""
    yield _versions()
    yield _disk(folder)
    if (folder / "server").is_dir():
        yield from certificates(folder)
        if not members_of(folder):
            yield _said("table", lambda: _own_rows(folder), "mend [data] of coterie.toml")
        return
    kit = None
    with suppress(CoterieError):
        kit = accepted(folder, site_settings(folder).kit)
    yield _said("kit", lambda: _kit(folder), f"`coterie federate accept {folder}`")
    if kit is None:
        return
    yield from _server(folder, kit)
    yield from certificates(folder)
    yield _said("table", lambda: _rows(folder), "mend [data] of coterie.toml")


def _said(what: str, look: Callable[[], str], remedy: str) -> Finding:
    """Return what a look says; an error of coterie's own has its remedy."""
    try:
        return Finding(what, look())
    except CoterieError as error:
        return Finding(what, str(error), remedy)


def _versions() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    said = f"Python {here}"
    for name in ("coterie", "torch", "nvflare"):
        try:
            said += f", {name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            remedy = "run the kit's `sh install.sh` again, without `venv`"
            return Finding("versions", f"{said}, no {name}", remedy)
    return Finding("versions", said)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    remedy = f"Make room: nothing is given below {LEAST_ROOM // 2**20} MiB"
    return Finding("disk", f"{free / 2**30:.1f} GiB free", remedy if free < LEAST_ROOM else "")


def _kit(folder: Path) -> str:
    kit = accepted(folder, site_settings(folder).kit)
    (wheel,) = (name for name in kit_files(folder) if WHEEL.fullmatch(name))
    if wheel.split("-")[1] != metadata.version("coterie"):
        here = metadata.version("coterie")
        raise CoterieError(f"it brings {wheel}, not {here}; remove `venv`, and `sh install.sh`")
    return f"the one that was accepted, of the consortium {kit.consortium}"


def _server(folder: Path, kit: Kit) -> Iterator[Finding]:
    """Look for the server: its name, its port, and whether it knows this site's certificate."""
    where = f"{kit.server}:{kit.port}"
    try:
        found = socket.getaddrinfo(kit.server, kit.port, proto=socket.IPPROTO_TCP)
    except OSError as error:
        remedy = f"Ask your network's people, or write {kit.server} to the file of hosts"
        yield Finding("DNS", f"{kit.server} has no address ({error})", remedy)
        return
    yield Finding("DNS", f"{kit.server} is {found[0][4][0]}")
    try:
        with socket.create_connection((kit.server, kit.port), SECONDS_TO_CONNECT) as raw:
            yield Finding("port", f"{where} is open")
            yield _tls(folder, kit, raw)
    except OSError as error:
        remedy = (
            f"Let this machine connect to {where}, through your firewall; or {kit.lead} has to"
            " start `coterie federate server`"
        )
        yield Finding("port", f"{where} does not answer ({error})", remedy)


def _tls(folder: Path, kit: Kit, raw: socket.socket) -> Finding:
    certificate, key, root = (str(folder / name) for name in CERTIFICATES)
    context = ssl.create_default_context(cafile=root)
    context.set_alpn_protocols(["h2"])  # as gRPC speaks
    try:
        context.load_cert_chain(certificate, key)
        with context.wrap_socket(raw, server_hostname=kit.server) as secured:
            secured.settimeout(1.0)
            with suppress(TimeoutError):  # it says nothing more: it has taken the certificate
                if not secured.recv(1):
                    raise ConnectionError("the server has closed the connection")
            return Finding("TLS", f"{secured.version()}, with the certificates of the kit")
    except ssl.SSLCertVerificationError as error:
        now = time.strftime("%Y-%m-%d %H:%M %Z")
        remedy = f"Set this machine's clock if it is not {now}; else ask {kit.lead} for a new kit"
        said = f"the server's certificate is refused: {error.verify_message}"
        return Finding("TLS", said, remedy)
    except OSError as error:
        return Finding("TLS", f"no connection: {error}", f"Ask {kit.lead} for a new kit (`renew`)")


def certificates(folder: Path) -> Iterator[Finding]:
    """Look how long the certificates of a site or of user 0 are valid, and whether the clock can be right."""
    lead = ("server/startup/server.crt", "lead/startup/client.crt")
    for path in lead if (folder / "server").is_dir() else CERTIFICATES[:1]:
        try:
            since, left = days_valid(folder / path)
        except (CoterieError, ValueError) as error:
            yield Finding("certificate", f"{path} cannot be read: {error}", "Ask for a new kit")
            continue
        now = time.strftime("%Y-%m-%d %H:%M %Z")
        if since < 0:
            said = f"{now} here, and {path} begins to be valid {-24 * since:.1f} hours later"
            remedy = "Set this machine's clock, or that of user 0, where the certificate was made"
            yield Finding("clock", said, remedy)
            continue
        if path != lead[1]:
            yield Finding("clock", now)
        renew = "`coterie federate renew` makes new ones, at user 0"
        days = counted(round(abs(left)), "day")
        said = f"{path} ends in {days}"
        if left <= 0:
            said = f"{path} has ended {days} ago, by this machine's clock"
        yield Finding("certificate", said, renew if left < DAYS_TO_RENEW else "")


def _rows(folder: Path) -> str:
    peer = responder_of(folder).peer
    rows = "a stream" if peer.user.is_stream else f"{len(peer.user)} rows"
    return f"{rows}, with the columns that the kit names"


def _own_rows(folder: Path) -> str:
    held, _ = lead_participant(folder, lead_settings(folder))
    return f"{len(held.user)} rows to train on"


def standing(folder: Path, wait: float = SECONDS_TO_CONNECT) -> Iterator[str]:
    """Say how things stand at user 0, or at a site: who is connected, what was asked, what is left."""
    yield from map(str, certificates(folder))
    yield from _of_lead(folder, wait) if (folder / "server").is_dir() else _of_site(folder)


def _of_lead(folder: Path, wait: float) -> Iterator[str]:
    names, run = members_of(folder) or lead_settings(folder).sites, folder / RUN
    try:
        here = connected_sites(folder, names, wait)
        yield f"connected: {', '.join(sorted(here)) or 'nobody'}"
        yield f"not connected: {', '.join(name for name in names if name not in here) or 'nobody'}"
    except CoterieError as error:
        yield f"the server does not answer: {error}"
    yield "a job runs" if (folder / SUBMITTED).exists() else "no job runs"
    if (run / RECORD).exists() and (points := Record.load(run / RECORD).points):
        ended = ", ended" if (run / SUMMARY).exists() else ""
        yield f"the run is at step {points[-1].step}{ended}"


def _of_site(folder: Path) -> Iterator[str]:
    peer, path = responder_of(folder).peer, folder / REQUESTS
    # the last line may be in the making
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    asked = next((json.loads(line) for line in reversed(lines) if b'"step"' in line), None)
    when = asked and f"step {asked.get('step')}, {asked.get('time', 'at an unknown time')}"
    yield f"last asked: {when}" if when else "not asked yet"
    most = "no limit" if peer.caps.gradients is None else f"{peer.caps.gradients} at most"
    yield f"given: {peer.ledger.given} gradients, {most}"
    if (privacy := site_settings(folder).privacy) is not None:
        yield f"spent: ε = {getattr(peer, 'epsilon', 0.0):.3g} of {privacy.epsilon:g}"


def service_of(folder: Path) -> Path:
    """Write a systemd unit that keeps a site running, and return its path."""
    place = folder.absolute()
    if not re.fullmatch(r"[\w./+-]+", f"{place}{sys.executable}"):
        raise CoterieError(
            f"{place} must have letters, digits and ./+-_ in its path for a systemd unit"
        )
    kit = Kit.load(folder)
    path = place / f"coterie-{kit.site}.service"
    text = filled("site.service", kit=kit, python=sys.executable, folder=place)
    path.write_text(text, encoding="utf-8")
    return path
