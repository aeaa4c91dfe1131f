"""Sites that come later, certificates that end, sites that leave; what a doctor finds; what a kit installs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError, FileError, KnobError
from coterie.federation import doctor, membership
from coterie.federation.doctor import examine, service_of
from coterie.federation.kits import accept, accepted, set_up
from coterie.federation.manifest import Kit, fingerprint
from coterie.federation.provisioning import Consortium
from coterie.federation.settings import (
    FILE,
    Data,
    LeadSettings,
    Model,
    Training,
    lead_settings,
    site_settings,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="NVFLARE is not installed: the extra `flare`",
)


def table(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 10, n)
    return pd.DataFrame({"age": age, "ill": age + rng.normal(0, 10, n) > 50})


def certificate(path: Path, days: float) -> None:
    """Write a certificate of an authority that nobody knows."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=300))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("membership")
    table(40, 0).to_csv(place / "mine.csv", index=False)
    data = Data(table=str(place / "mine.csv"), target="ill")
    training = Training(rule="wga", alpha=0.5, steps=20, batch_size=16)
    settings = LeadSettings("me", ("basel", "bern"), data, Model("linear"), training)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    consortium = Consortium("trial", "localhost", ("basel", "bern"), port)
    for site, shown in set_up(place / "trial", consortium, settings).items():
        kit = place / "trial" / "sites" / site
        accept(kit, shown)
        table(30, 1).to_csv(kit / "data.csv", index=False)
    return place / "trial"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A consortium of this test's own."""
    return shutil.copytree(made, tmp_path / "trial")


def issuer_and_serial(certificate: Path) -> tuple[str, int]:
    from cryptography import x509

    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    return read.issuer.rfc4514_string(), read.serial_number


def test_a_site_that_comes_later_has_a_kit_of_the_same_authority(folder: Path) -> None:
    others = {s: (folder / "sites" / s / "client.crt").read_bytes() for s in ("basel", "bern")}
    result = CliRunner().invoke(app, ["federate", "add-site", str(folder), "chur"])
    assert result.exit_code == 0, result.output
    kit = folder / "sites" / "chur"
    assert fingerprint(kit) in result.output
    accept(kit, fingerprint(kit))
    assert Kit.load(kit).site == "chur"
    assert lead_settings(folder).sites == ("basel", "bern", "chur")
    (ours, mine), (theirs, other) = (
        issuer_and_serial(folder / "sites" / s / "client.crt") for s in ("chur", "bern")
    )
    assert ours == theirs
    assert mine != other
    for site, certificate in others.items():
        assert (folder / "sites" / site / "client.crt").read_bytes() == certificate
    for path in (kit / "client.key", folder / "authority/trial/state/cert.json"):
        assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(KnobError, match=r"'chur' is in .* already"):
        membership.add_site(folder, "chur")
    with pytest.raises(KnobError, match="letters, digits"):
        membership.add_site(folder, "../chur")


def test_a_renewed_kit_keeps_the_settings_and_the_log_of_its_site(
    folder: Path, tmp_path: Path
) -> None:
    site = (folder / "sites" / "bern").rename(tmp_path / "at the site")
    (site / "requests.jsonl").write_text("what was given\n")
    settings = (site / FILE).read_text().replace("norm = 10.0", "norm = 2.5")
    (site / FILE).write_text(settings)
    before = issuer_and_serial(site / "client.crt")
    shown = str(membership.renew(folder, "bern"))
    new = folder / "sites" / "bern"
    assert shown == fingerprint(new)
    with pytest.raises(FileError, match="has the fingerprint"):
        membership.take_renewed(site, new, "0000")
    result = CliRunner().invoke(
        app,
        ["federate", "accept", str(new), "--fingerprint", shown, "--renews", str(site)],
    )
    assert "has the new certificates" in result.output
    after = issuer_and_serial(site / "client.crt")
    assert (after[0], after[1] == before[1]) == (before[0], False)
    assert accepted(site, site_settings(site).kit).site == "bern"
    assert site_settings(site).caps.norm == 2.5
    assert (site / "requests.jsonl").read_text() == "what was given\n"
    other = folder / "sites" / "basel"
    for name in (FILE, "data.csv"):  # as it came
        (other / name).unlink()
    with pytest.raises(FileError, match="no renewal"):
        membership.take_renewed(site, other, fingerprint(other))


def test_user_0_renews_its_own(folder: Path) -> None:
    paths = [folder / "server/startup/server.crt", folder / "lead/startup/client.crt"]
    before = [issuer_and_serial(path) for path in paths]
    assert membership.renew(folder) is None
    after = [issuer_and_serial(path) for path in paths]
    assert [each[0] for each in before] == [each[0] for each in after]
    assert all(a[1] != b[1] for a, b in zip(before, after, strict=True))
    for path in paths:  # the key fits its certificate
        ssl.create_default_context().load_cert_chain(path, path.with_suffix(".key"))


def test_a_site_that_leaves_is_asked_and_let_in_no_more(folder: Path) -> None:
    membership.revoke(folder, "bern")
    assert lead_settings(folder).sites == ("basel",)
    refused = json.loads((folder / "server/disabled_clients.json").read_text())
    assert refused == {"disabled_clients": ["bern"]}
    from nvflare.private.fed.server.client_manager import ClientManager

    manager = ClientManager("trial")
    manager.set_disabled_clients_file(str(folder / "server/disabled_clients.json"))
    assert manager.disabled_clients == {"bern"}, "NVFLARE reads it so"
    with pytest.raises(KnobError, match="the only site"):
        membership.revoke(folder, "basel")
    with pytest.raises(KnobError, match="is not in"):
        membership.revoke(folder, "bern")
    stolen = (folder / "sites/bern/client.key").read_bytes()
    shutil.rmtree(folder / "sites/bern")
    membership.add_site(folder, "bern")  # it comes back, with another key
    assert (folder / "sites/bern/client.key").read_bytes() != stolen
    assert json.loads((folder / "server/disabled_clients.json").read_text()) == {
        "disabled_clients": []
    }


@pytest.fixture
def listening(folder: Path) -> Iterator[None]:
    """A server with the consortium's certificate, that asks for one of the same authority."""
    startup = folder / "server/startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    port = Kit.load(folder / "sites/basel").port
    with socket.create_server(("localhost", port)) as server:
        server.settimeout(20)

        def serve() -> None:
            try:
                raw, _ = server.accept()
                with context.wrap_socket(raw, server_side=True) as secured:
                    secured.settimeout(5)
                    secured.recv(1)
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.close()
        thread.join(25)


@pytest.mark.usefixtures("listening")
def test_a_doctor_finds_nothing_where_all_is_well(folder: Path) -> None:
    found = {finding.what: finding for finding in examine(folder / "sites/basel")}
    assert list(found) == [
        "versions", "disk", "kit", "DNS", "port", "TLS", "clock", "certificate", "table",
    ]  # fmt: skip
    assert [str(each) for each in found.values() if each.remedy] == []
    assert "30 rows" in found["table"].said


@pytest.mark.usefixtures("listening")
def test_a_doctor_knows_a_certificate_of_another_authority(folder: Path) -> None:
    kit = folder / "sites/basel"
    certificate(kit / "rootCA.pem", 30)
    with socket.create_connection(("localhost", Kit.load(kit).port)) as raw:
        finding = doctor._tls(kit, Kit.load(kit), raw)
    assert "the server's certificate is refused" in finding.said
    assert "clock" in finding.remedy


@pytest.mark.usefixtures("listening")
def test_a_doctor_knows_the_key_of_another_site(folder: Path) -> None:
    """Neither is it taken for a port that is closed."""
    kit = folder / "sites/basel"
    (kit / "client.key").write_bytes((folder / "sites/bern/client.key").read_bytes())
    with socket.create_connection(("localhost", Kit.load(kit).port)) as raw:
        finding = doctor._tls(kit, Kit.load(kit), raw)
    assert "no connection" in finding.said
    assert finding.remedy == "Ask me for a new kit (`renew`)"


def test_a_doctor_names_what_is_wrong_with_its_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = folder / "sites/basel"
    result = CliRunner().invoke(app, ["federate", "doctor", str(kit)])
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if line.startswith("--"))
    assert "does not answer" in line
    assert "federate server" in line
    (kit / "data.csv").write_text("years,ill\n50,1\n")
    found = {finding.what: finding for finding in examine(kit)}
    assert found["table"].remedy
    monkeypatch.setattr(doctor, "LEAST_ROOM", 2**80)
    assert "Make room" in {f.what: f for f in examine(kit)}["disk"].remedy
    (kit / "preparation.json").write_text("{}")
    assert "is not what the kit's manifest says" in {f.what: f for f in examine(kit)}["kit"].said
    assert [str(f) for f in examine(folder) if f.remedy and f.what != "disk"] == []


def test_the_end_of_a_certificate_is_told_from_sixty_days_before(folder: Path) -> None:
    kit = folder / "sites/basel"
    path = kit / "client.crt"
    assert 300 < membership.days_valid(path)[1] < 400
    assert [found.remedy for found in doctor.certificates(kit)] == ["", ""]
    for left, said in ((59.5, "ends in 60 days|ends in 59 days"), (-3, "ended 3 days ago")):
        certificate(path, left)
        _, finding = doctor.certificates(kit)
        assert any(each in finding.said for each in said.split("|")), finding.said
        assert "renew" in finding.remedy
    path.write_text("nonsense")
    (finding,) = doctor.certificates(kit)
    assert "cannot be read" in finding.said


def test_a_clock_that_is_an_hour_slow_is_told_with_its_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since, _ = membership.days_valid(folder / "sites/basel/client.crt")

    class Slow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(days=since, hours=1)

    monkeypatch.setattr(membership, "datetime", Slow)
    (finding,) = doctor.certificates(folder / "sites/basel")
    assert finding.what == "clock"
    assert "begins to be valid 1.0 hours later" in finding.said
    assert "Set this machine's clock" in finding.remedy
    result = CliRunner().invoke(app, ["federate", "site", str(folder / "sites/basel"), "--service"])
    assert finding.remedy in result.stderr


def test_status_says_how_things_stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(app, ["federate", "status", str(folder / "sites/basel")]).output
    assert "not asked yet" in said
    assert "given: 0 gradients, 10000 at most" in said
    monkeypatch.setattr(doctor, "connected_sites", lambda *_: {"bern"})
    said = CliRunner().invoke(app, ["federate", "status", str(folder)]).output
    assert "connected: bern\nnot connected: basel\nno job runs" in said

    def silent(*_: object) -> set[str]:
        raise CoterieError("nobody there")

    monkeypatch.setattr(doctor, "connected_sites", silent)
    said = CliRunner().invoke(app, ["federate", "status", str(folder)]).output
    assert "the server does not answer: nobody there" in said


def test_a_unit_of_systemd_starts_the_site(folder: Path) -> None:
    kit = folder / "sites/basel"
    result = CliRunner().invoke(app, ["federate", "site", str(kit), "--service"])
    text = (kit / "coterie-basel.service").read_text()
    assert f"ExecStart={sys.executable} -P -m coterie federate site {kit}\n" in text
    assert "systemctl --user enable" in result.output
    spaced = shutil.copytree(kit, folder / "a b")
    with pytest.raises(CoterieError, match="must have letters, digits"):
        service_of(spaced)


def test_the_script_of_a_kit_installs_nothing_that_was_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Python that says what it is asked for; no index is reached."""
    kit, said = folder / "sites/basel", folder / "asked.txt"
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {said}\nif [ "$3" = venv ]; then mkdir -p venv/bin;'
        f" cp {python} venv/bin/python; fi\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    done = subprocess.run(
        ["/bin/sh", kit / "install.sh"], capture_output=True, text=True, check=True
    )
    assert f"the fingerprint of this folder: {fingerprint(kit)}\n" in done.stdout
    (wheel,) = kit.glob("*.whl")
    asked = said.read_text().splitlines()
    assert asked[0] == "-I -m venv venv"
    assert asked[2].endswith("--require-hashes -r requirements.lock")
    assert asked[3].endswith(f"--no-deps ./{wheel.name}")
    lock = (kit / "requirements.lock").read_text()
    assert lock.count("--hash=sha256:") > 100
    assert "\ncoterie" not in lock
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert digest in (kit / "install.sh").read_text()
    said.unlink()

    def refused(why: str) -> None:
        done = subprocess.run(
            ["/bin/sh", kit / "install.sh"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert why in done.stderr
        assert not said.exists()

    refused("remove it first")  # an environment that came with the kit, say
    shutil.rmtree(kit / "venv")
    (kit / "venv").symlink_to("elsewhere")
    refused("remove it first")
    (kit / "venv").unlink()
    wheel.write_bytes(b"evil")
    refused("is not what user 0 has sent")


def test_the_script_of_a_kit_runs_no_module_that_lies_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m venv` would import `venv.py` of the folder: of somebody who adds files to it on its way."""
    kit, marker = folder / "sites/basel", folder / "taken over"
    for name in ("venv.py", "pip.py", "ensurepip.py", "sitecustomize.py", "shutil.py"):
        (kit / name).write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    python, real = folder / "python", sys.executable
    # the real Python, without what takes long: `venv` is not made, and nothing is installed
    python.write_text(f'#!/bin/sh\n{real} "$@" --help >/dev/null || exit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    subprocess.run(["/bin/sh", kit / "install.sh"], capture_output=True, check=False)
    assert not marker.exists()
    commands = (kit / "install.sh").read_text()
    assert commands.count(" -I -m ") == commands.count(" -m ") == 2
    (kit / FILE).unlink()
    (kit / "data.csv").unlink()
    with pytest.raises(FileError, match="belongs to no kit"):
        accept(kit, fingerprint(kit))
