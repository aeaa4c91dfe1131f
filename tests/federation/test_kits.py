"""A kit is data: what a malicious user 0 puts into a site's folder is refused, and nothing in it is run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import Preparation, from_table
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalSites
from coterie.errors import FileError, KnobError
from coterie.federation import workspace
from coterie.federation.kits import accept, accepted
from coterie.federation.lead import check_plan
from coterie.federation.manifest import (
    CERTIFICATES,
    INSTALL,
    KIT,
    KIT_FILES,
    LOCK,
    MANIFEST,
    Kit,
    fingerprint,
    seal,
)
from coterie.federation.settings import (
    SITE_CAPS,
    Data,
    LeadSettings,
    Model,
    Training,
    site_settings,
)
from coterie.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.recording import files

WHAT: dict[str, Any] = {
    "consortium": "trial",
    "site": "basel",
    "lead": "me",
    "server": "localhost",
    "port": 8002,
}
WHAT |= {
    "target": "ill",
    "columns": ("age",),
    "model": "linear",
    "size": 4,
    "gradients": 100,
    "batch_size": 16,
}

A_WHEEL = "coterie-0.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def preparation() -> Preparation:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(50, 10, 60), "who": "me"}).assign(
        ill=rng.integers(0, 2, 60)
    )
    return from_table(table, user_column="who", target="ill", me="me").preparation


@pytest.fixture
def kit(tmp_path: Path, preparation: Preparation) -> Path:
    """What user 0 hands out, without the cost of real certificates."""
    folder = tmp_path / "basel"
    folder.mkdir()
    Kit(**WHAT).save(folder)
    preparation.save(folder)
    for name in (*CERTIFICATES, "README.md", INSTALL, LOCK, A_WHEEL):
        (folder / name).write_text(name)
    seal(folder)
    return folder


def add(name: str, text: str = "#!/bin/sh\ntouch /tmp/taken-over\n") -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    return change


def listed_too(folder: Path) -> None:
    """Add a script, and list it in the manifest."""
    add("startup/sub_start.sh")(folder)
    digests = {
        name: files.sha256((folder / name).read_bytes())
        for name in (*KIT_FILES, A_WHEEL, "startup/sub_start.sh")
    }
    files.write_json(folder / MANIFEST, {"files": digests})


def linked(folder: Path) -> None:
    (folder / "README.md").rename(folder.parent / "elsewhere")
    (folder / "README.md").symlink_to(folder.parent / "elsewhere")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a start script": add("startup/sub_start.sh"),
    "settings that name code": add(
        "coterie.toml", 'name = "basel"\n[data]\nloader = "os:system"\n'
    ),
    "configuration of NVFLARE": add("nvflare/local/resources.json", "{}"),
    "a module": add("sitecustomize.py"),
    "a hidden file": add(".pth"),
    "a secret": add("requests.jsonl.secret", "0" * 64),
    "a log": add("requests.jsonl", ""),
    "a script that the manifest lists": listed_too,
    "a link": linked,
    "another script to install": add(INSTALL, "do as I say"),
    "another lock": add(LOCK, "evil==1.0"),
    "another wheel": add(A_WHEEL, "evil"),
    "a second wheel": add("coterie-9.9-py3-none-any.whl", "evil"),
    "no wheel": lambda folder: (folder / A_WHEEL).unlink(),
    "another README": add("README.md", "do as I say"),
    "another kit.json": lambda folder: Kit(**WHAT | {"server": "evil.example"}).save(folder),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "an empty manifest": lambda folder: files.write_json(folder / MANIFEST, {"files": {}}),
    "a manifest of nonsense": lambda folder: files.write_json(folder / MANIFEST, {"files": [1]}),
    "a manifest that is no JSON": add(MANIFEST, "{"),
    "a missing key": lambda folder: (folder / "client.key").unlink(),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_kit_with_anything_else_in_it_is_refused(what: str, kit: Path) -> None:
    before = fingerprint(kit)
    HOSTILE[what](kit)
    # user 0 tells what it has made
    told = fingerprint(kit) if (kit / MANIFEST).exists() else before
    with pytest.raises(FileError, match="ask user 0 for a new kit"):
        accept(kit, told)
    assert not (kit / "coterie.toml").exists() or what == "settings that name code"


def test_a_kit_that_was_changed_after_it_was_accepted_is_refused(kit: Path) -> None:
    told = fingerprint(kit)
    accept(kit, told.upper() + "\n")  # as somebody may type it
    add("data.csv", "age,ill\n")(kit)  # the site's own files are its own
    assert accepted(kit, site_settings(kit).kit) == Kit(**WHAT)
    (kit / "rootCA.pem").write_text("another authority")
    with pytest.raises(FileError, match=r"rootCA.pem is not what the kit's manifest says"):
        accepted(kit, site_settings(kit).kit)
    seal(kit)
    with pytest.raises(FileError, match="has the fingerprint"):
        accepted(kit, site_settings(kit).kit)
    with pytest.raises(KnobError, match="not accepted yet"):
        accepted(kit, "")


@pytest.mark.parametrize(
    "what",
    [
        {"site": "../../etc"},
        {"site": "a\nb"},
        {"site": ""},
        {"site": 3},
        {"consortium": "$(reboot)"},
        {"server": "localhost; reboot"},
        {"server": "a\nb"},
        {"port": 10**6},
        {"port": "8002"},
        {"size": -1},
        {"size": True},
        {"target": "ill\x1b[2J"},
        {"target": ["ill"]},
        {"columns": ["age\n[caps]\nexamples = 1"]},
        {"columns": [None]},
        {"columns": "age"},
        {"lead": "\u202eme"},
        {"batch_size": 1.5},
        {"more": 1},
    ],
    ids=str,
)
def test_names_and_numbers_of_a_kit_are_checked(what: dict[str, Any], kit: Path) -> None:
    """Whatever is signed and sealed: what cannot stand in a file, a path or on a terminal is refused."""
    files.write_json(kit / KIT, WHAT | {"columns": ["age"]} | what)
    with pytest.raises((KnobError, FileError)):
        accept(kit, seal(kit))
    assert not (kit / "coterie.toml").exists()


def test_text_of_user_0_stays_text_in_the_settings(kit: Path) -> None:
    odd = 'ill" \\ # [caps] 𝄞 ü'
    Kit(**WHAT | {"target": odd, "columns": (odd, "[/blue]")}).save(kit)
    accept(kit, seal(kit))
    settings = site_settings(kit)
    assert (settings.data.target, settings.caps, settings.data.columns) == (odd, SITE_CAPS, {})


def test_code_that_user_0_proposes_is_not_taken_over(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kit(**WHAT | {"model": "evil_models:factory"}).save(kit)
    (kit.parent / "evil_models.py").write_text("raise SystemExit('taken over')")
    monkeypatch.syspath_prepend(str(kit.parent))
    accept(kit, seal(kit))
    settings = site_settings(kit)
    assert (settings.model, settings.data.loader) == (Model(), "")
    pd.DataFrame({"age": range(40), "ill": [0, 1] * 20}).to_csv(kit / "data.csv")
    answer = CliRunner().invoke(app, ["federate", "check", str(kit)])
    assert "evil_models" not in sys.modules
    assert answer.exit_code in (0, 2)
    assert "taken over" not in answer.output


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Give what would be started."""
    commands: list[list[str]] = []

    def run_process(command: list[str], place: Path, watch: object) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(workspace, "run_process", run_process)
    return commands


def test_a_site_starts_its_own_code_with_configuration_of_its_own(
    kit: Path, started: list[list[str]]
) -> None:
    """The exploit of old: `coterie federate site .` ran startup/sub_start.sh."""
    accept(kit, fingerprint(kit))
    pd.DataFrame({"age": range(40), "ill": [0, 1] * 20}).to_csv(kit / "data.csv")
    for name in (
        "startup/sub_start.sh",
        "nvflare/startup/sub_start.sh",
        "nvflare/local/custom/evil.py",
    ):
        add(name)(kit)  # also where they got there later
    answer = CliRunner().invoke(app, ["federate", "site", str(kit)])
    assert answer.exit_code == 0, answer.output
    place = kit / "nvflare"
    (command,) = started
    assert command[:4] == [
        sys.executable,
        "-u",
        "-m",
        "nvflare.private.fed.app.client.client_train",
    ]
    assert command[4:] == ["-m", str(place), "-s", "fed_client.json", "--set", *command[9:]]
    assert command[9:] == [
        "secure_train=true",
        "org=basel",
        "config_folder=config",
        "uid=basel",
        "heart_beat_interval=2",
    ]
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    local = [
        f"local/{name}.json" for name in ("authorization", "comm_config", "log_config", "resources")
    ]
    assert names == [
        *local,
        *(
            f"startup/{name}"
            for name in ("client.crt", "client.key", "fed_client.json", "rootCA.pem")
        ),
    ]
    written = "".join((place / name).read_text() for name in names if name.endswith(".json"))
    assert "evil" not in written
    assert (
        json.loads((place / "startup" / "fed_client.json").read_text())["servers"][0]["identity"]
        == "localhost"
    )


def test_nothing_is_imported_from_the_folder_that_a_process_runs_in(tmp_path: Path) -> None:
    (tmp_path / "decoy.py").write_text("raise SystemExit(0)")
    command = [sys.executable, "-c", "import decoy"]
    plain = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert plain.returncode == 0, "it is what Python does by itself"
    safe = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, env=workspace.surroundings()
    )
    assert b"No module named 'decoy'" in safe.stderr


def test_a_site_compares_the_fingerprint(kit: Path) -> None:
    told = fingerprint(kit)
    for arguments, typed in ((["--fingerprint", "0000-" + told[5:]], ""), ([], "n\n")):
        refused = CliRunner().invoke(app, ["federate", "accept", str(kit), *arguments], input=typed)
        assert refused.exit_code == 2
        assert told in refused.output
        assert not (kit / "coterie.toml").exists()
    answer = CliRunner().invoke(app, ["federate", "accept", str(kit)], input="y\n")
    assert answer.exit_code == 0, answer.output
    assert told in answer.output
    assert "at most 100 gradients, of 16 rows" in answer.output


def test_what_a_site_keeps_is_its_owners_alone_whatever_the_umask(kit: Path) -> None:
    before = os.umask(0)
    try:
        accept(kit, fingerprint(kit))
        workspace.site_workspace(kit, Kit.load(kit))
    finally:
        os.umask(before)
    owned = [
        kit,
        kit / "coterie.toml",
        kit / "client.key",
        kit / "nvflare/startup",
        kit / "nvflare/startup/client.key",
    ]
    assert [path for path in owned if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_caps_that_are_left_out_are_safe_and_can_be_lifted(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text('name = "a"\n')
    assert (
        site_settings(tmp_path).caps == SITE_CAPS == Caps(gradients=10_000, norm=10.0, examples=16)
    )
    (tmp_path / "coterie.toml").write_text(
        'name = "a"\n[caps]\ngradients = inf\nnorm = inf\nexamples = 1\n'
    )
    assert site_settings(tmp_path).caps == Caps()


@pytest.mark.parametrize(
    "caps", [Caps(gradients=0), Caps(), Caps(gradients=7, norm=1.5, examples=3)]
)
def test_a_kit_is_accepted_with_the_caps_that_are_given(caps: Caps, kit: Path) -> None:
    accept(kit, fingerprint(kit), caps)
    assert site_settings(kit).caps == caps


@pytest.mark.parametrize(
    "line",
    [
        *(f"[caps]\n{name} = true" for name in ("gradients", "norm", "examples")),
        "[sums]\npeers = true",
        "[sums]\nshare = true",
    ],
)
def test_a_yes_is_no_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text(f'name = "a"\n{line}\n')
    with pytest.raises(KnobError, match=r"must .*, got True"):
        site_settings(tmp_path)


def lead_of(**training: Any) -> LeadSettings:
    return LeadSettings("me", ("a", "b"), Data(), Model(), Training(**training))


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (
            {"rule": "wga", "steps": 270},
            "a gives 269 more gradients, and this run may ask for 270",
        ),
        ({"steps": 18}, "a gives 269 more gradients, and this run may ask for 273"),
        (
            {"rule": "wga", "steps": 10, "batch_size": 8},
            "a gives no gradient of fewer than 10 rows.* is 8",
        ),
        ({"rule": "wga", "steps": 50, "batch_size": 10}, None),
        ({"steps": 16}, None),  # at five points in the first half, at one in the second; and 219
    ],
    ids=str,
)
def test_a_run_beyond_a_sites_caps_is_refused_before_it_begins(
    training: dict[str, Any], said: str | None
) -> None:
    """`b` is not there, and is not asked; whoever lies about its terms is named, and can be left out."""
    user = coterie.User("a", torch.ones(20, 2), torch.ones(20, 1))
    passes = Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    sites = LocalSites({"a": Peer(user, passes, Caps(gradients=269, examples=10))})
    if said is None:
        check_plan(lead_of(**training), sites)
    else:
        with pytest.raises(KnobError, match=f"{said}.* Take fewer steps"):
            check_plan(lead_of(**training), sites)


def test_a_site_of_too_few_rows_is_told_before_the_run_begins() -> None:
    user = coterie.User("a", torch.ones(20, 2), torch.ones(20, 1))
    passes = Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    few, enough = (
        LocalSites({"a": Peer(user, passes, Caps(examples=least))}) for least in (21, 20)
    )
    with pytest.raises(
        KnobError, match=r"^a gives no gradient of fewer than 21 rows, and has fewer"
    ):
        check_plan(lead_of(rule="wga", steps=5, batch_size=32), few)
    check_plan(lead_of(rule="wga", steps=5, batch_size=32), enough)


def test_batches_of_another_size_than_a_site_promised_are_refused_before_the_run_begins(
    tmp_path: Path,
) -> None:
    pytest.importorskip("dp_accounting")
    user = coterie.User("a", torch.ones(20, 2), torch.ones(20, 1))
    passes = Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    privacy = Privacy(9.0, 1e-3, 1.0, 20.0, batch_size=10)
    sites = LocalSites({"a": Peer(user, passes, None, tmp_path / "log", privacy=privacy)})
    with pytest.raises(
        KnobError, match=r"^a gives gradients of batches of 10 only, and `batch_size` is 8\. "
    ):
        check_plan(lead_of(rule="wga", steps=5, batch_size=8), sites)
    check_plan(lead_of(rule="wga", steps=5, batch_size=10), sites)


def test_a_masked_sum_in_which_too_few_sites_count_is_refused_before_it_begins() -> None:
    def peer(name: str) -> Peer:
        user = coterie.User(name, torch.ones(20, 2), torch.ones(20, 1))
        return Peer(user, Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss))

    sites, masked = (
        LocalSites({"a": peer("a"), "b": peer("b")}),
        lead_of(rule="wga", alpha=0.5, secure_sums=True),
    )
    sites.responders["a"] = Responder(peer("a"), SumsOnly(peers=2))
    said = "a gives sums of 2 sites or more that give nothing but masked sums, and is in one of 1"
    with pytest.raises(KnobError, match=said):
        check_plan(masked, sites)
    sites.responders["b"] = Responder(peer("b"), SumsOnly(peers=2))
    check_plan(masked, sites)
