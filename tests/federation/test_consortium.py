"""A consortium of processes on this machine, over NVFLARE with mutual TLS: the same model, whatever befalls a site.

`test_flare.py` has the same faults without processes, one by one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support.waiting import job_of, steps_done, until

import coterie
from coterie.data import Preparation
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.federation.participants import LOG, lead_participant, peer_of, responder_of
from coterie.federation.provisioning import LEAD
from coterie.federation.settings import lead_settings
from coterie.federation.watching import LOG as NVFLARE_LOG
from coterie.federation.workspace import write_job
from coterie.privacy.accountant import Event, epsilon_of
from coterie.recording import End
from coterie.tables.fit import fit

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None,
        reason="NVFLARE is not installed: the extra `flare`",
    ),
]
TESTS = Path(__file__).parents[1]
SITES = ("cleveland", "hungarian", "switzerland")
SLOW = pytest.mark.skipif(
    not os.environ.get("COTERIE_SLOW"), reason="takes minutes: COTERIE_SLOW=1 runs it"
)


def end_of(folder: Path) -> End:
    return coterie.Record.load(folder / "run" / "record.jsonl").end


def site_in_this_process(kit: Path, copy: Path) -> Peer:
    """Return a peer with a site's rows and caps that draws by the site's secret."""
    shutil.copytree(kit, copy, ignore=lambda *_: [LOG, f"{LOG}.count"])
    return peer_of(copy)


def a_small_one(folder: Path, example: ModuleType) -> Sequence[str]:
    """Set two sites up and train with them, by the example's functions."""
    tables = {
        name: table for name, table in example.hospitals(None).items() if name != "switzerland"
    }
    sites: list[str] = example.set_up(
        folder, tables, "va", ["--own-examples", "40", "--steps", "60"]
    )
    with example.started(*example.commands(folder, sites)):
        subprocess.run([*example.COTERIE, "run", str(folder)], check=True, timeout=400)
    return sites


def the_example(folder: Path, example: ModuleType) -> Sequence[str]:
    """Run the example as it stands."""
    subprocess.run(
        [sys.executable, "-W", "error", str(example.__file__), str(folder)], check=True, timeout=600
    )
    return SITES


@pytest.mark.parametrize("trained", [a_small_one, pytest.param(the_example, marks=SLOW)])
def test_a_consortium_gives_the_model_of_one_process(
    trained: Callable[[Path, ModuleType], Sequence[str]], tmp_path: Path, example: ModuleType
) -> None:
    folder = tmp_path / "trial"
    sites = trained(folder, example)

    settings = lead_settings(folder)
    _, mine = lead_participant(folder, settings)
    assert mine is not None
    here = {
        site: site_in_this_process(folder / "sites" / site, tmp_path / "here" / site)
        for site in sites
    }
    knobs = settings.training
    inside = fit(
        mine,
        coterie.AdaptiveAveraging(),
        settings.model.name,
        tmp_path / "inside",
        seed=knobs.seed,
        steps=knobs.steps,
        lr=knobs.lr,
        batch_size=knobs.batch_size,
        engine=functools.partial(Remote, sites=LocalSites(here), names=sites),
    )
    assert inside is not None
    found = torch.load(folder / "run" / "model.pt", weights_only=True)
    for name, value in inside.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    end = end_of(folder)
    assert end.left_out == {}
    assert end.test == pytest.approx(inside.test, rel=1e-4)
    for site in sites:
        lines = (folder / "sites" / site / "requests.jsonl").read_text().splitlines()
        assert [int(json.loads(line)["step"]) for line in lines] == list(range(knobs.steps + 39)), (
            "one exchange a step, and those of closed forms"
        )
        assert sum(json.loads(line)["gradients"] for line in lines) == end.costs[site].gradients
        numbers = end.costs[site].numbers_sent  # of closed forms they are doubles
        assert 4 * numbers < end.traffic[site].bytes_sent < 8 * numbers


def unfriendly(kit: Path) -> None:
    """Give a site a loader that answers with nonsense."""
    preparation = Preparation.load(kit)
    extra = f'name = "linear"\nloss = "torch.nn.functional:cross_entropy"\nn_inputs = {preparation.n_inputs}'
    text = (kit / "coterie.toml").read_text(encoding="utf-8")
    text = text.replace('name = "linear"', f"{extra}\nn_outputs = {preparation.n_outputs}")
    text = text.replace('table = "data.csv"', 'table = "data.csv"\nloader = "unfriendly:load"')
    (kit / "coterie.toml").write_text(text, encoding="utf-8")


def stranger(folder: Path, example: ModuleType, port: int) -> Path:
    """Return the folder of a site of another consortium, that uses a name and the server's address of this one."""
    tables = example.hospitals(None)
    example.set_up(
        folder, {name: tables[name] for name in ("va", "hungarian")}, "va", ["--port", str(port)]
    )
    return folder / "sites" / "hungarian"


@SLOW
def test_a_run_outlives_whatever_befalls_a_site(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site lies, one hangs and comes back, one is killed, two strangers knock: the run ends with a model."""
    folder, misses = tmp_path / "trial", 2
    options = [
        "--rule",
        "wga",
        "--own-examples",
        "40",
        "--steps",
        "800",
        "--timeout",
        "3",
        "--misses",
        str(misses),
    ]
    sites = example.set_up(folder, example.hospitals(None), "va", options)
    assert tuple(sites) == SITES
    unfriendly(folder / "sites" / "cleveland")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    )
    server = json.loads((folder / "server" / "startup" / "fed_server.json").read_text())["servers"][
        0
    ]
    port = int(server["service"]["target"].rpartition(":")[2])
    intruder = stranger(tmp_path / "elsewhere", example, port)
    news = folder / "run" / "news.log"

    def said(text: str) -> Callable[[], bool]:
        return lambda: news.exists() and text in news.read_text(encoding="utf-8")

    limits = folder / "sites" / "cleveland" / "nvflare" / "local" / "comm_config.json"
    with contextlib.ExitStack() as life:
        commands = (*example.commands(folder, sites), [*example.COTERIE, "site", str(intruder)])
        processes = life.enter_context(example.started(*commands))
        _, _, hangs, dies, _ = processes
        until(limits.exists, "the start of the site that lies")
        limits.unlink()  # it sends messages of any size
        (run,) = life.enter_context(example.started([*example.COTERIE, "run", str(folder)]))
        until(lambda: steps_done(folder) >= 50, "the run's start", 240)
        assert not answers_without_certificate(port)
        worker = job_of(hangs)
        worker.send_signal(signal.SIGSTOP)
        until(said("hungarian gave nothing"), "dropping the site that hangs")
        worker.send_signal(signal.SIGCONT)
        until(said("hungarian is back"), "taking it back")
        example.end([dies])
        assert run.wait(timeout=240) == 0
        assert "Successfully registered" not in (intruder / "nvflare" / NVFLARE_LOG).read_text()
        left = [process for process in processes if process.is_running()]
    assert not [process for process in left if process.is_running()]

    end = end_of(folder)
    assert (end.step, end.stopped) == (800, None)
    torch.load(folder / "run" / "model.pt", weights_only=True)
    lies = end.left_out["cleveland"]
    size = sum(
        v.numel() for v in torch.load(folder / "run" / "model.pt", weights_only=True).values()
    )
    assert lies["not finite"] == 2
    assert lies[f"shape (1, 1) instead of (1, {size})"] == 1
    assert {
        "not of floating-point numbers",
        "of another step",
        "from another sender",
        "no answer",
    } <= set(lies)
    assert end.left_out["switzerland"]["no answer"] <= misses + 1
    assert end.left_out["switzerland"]["not waited for"] > 0


@SLOW
def test_masked_sums_with_keys_that_were_compared(tmp_path: Path, example: ModuleType) -> None:
    """To the model of sites in this process that give plain gradients, but for rounding."""
    folder = tmp_path / "trial"
    options = [
        "--rule",
        "wga",
        "--alpha",
        "0.5",
        "--own-examples",
        "40",
        "--steps",
        "60",
        "--secure-sums",
    ]
    sites = example.set_up(folder, example.hospitals(None), "va", options)
    kits = {site: folder / "sites" / site for site in sites}
    keys = {site: responder_of(kit).peer.identity.fingerprint for site, kit in kits.items()}
    for site, kit in kits.items():
        known = "".join(f'{other} = "{key}"\n' for other, key in keys.items() if other != site)
        with (kit / "coterie.toml").open("a", encoding="utf-8") as file:
            file.write(f"[sums]\npeers = 3\nshare = 0.5\n[sums.keys]\n{known}")
    with example.started(*example.commands(folder, sites)):
        subprocess.run([*example.COTERIE, "run", str(folder)], check=True, timeout=400)
        shown = (kits[sites[0]] / "said.txt").read_text()
    end = end_of(folder)
    assert (end.step, end.left_out) == (60, {})
    assert all(
        f"masked sums with {site}, whose key is {key}" in shown for site, key in keys.items()
    )
    settings = lead_settings(folder)
    _, mine = lead_participant(folder, settings)
    assert mine is not None
    here = {site: site_in_this_process(kit, tmp_path / "here" / site) for site, kit in kits.items()}
    plain = functools.partial(Remote, sites=LocalSites(here), names=sites)
    knobs = {
        name: getattr(settings.training, name) for name in ("seed", "steps", "lr", "batch_size")
    }
    inside = fit(
        mine, coterie.WeightedAveraging(0.5), "linear", tmp_path / "inside", engine=plain, **knobs
    )
    assert inside is not None
    found = torch.load(folder / "run" / "model.pt", weights_only=True)
    for name, value in inside.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@SLOW
@pytest.mark.parametrize("moment", ["before the job", "while it starts", 10, 150, 290])
def test_a_site_killed_at_any_moment(
    moment: str | int, tmp_path: Path, example: ModuleType
) -> None:
    folder, misses = tmp_path / "trial", 3
    options = [
        "--rule",
        "wga",
        "--own-examples",
        "40",
        "--steps",
        "300",
        "--timeout",
        "5",
        "--misses",
        str(misses),
    ]
    sites = example.set_up(folder, example.hospitals(None), "va", options)
    with example.started(*example.commands(folder, sites)) as processes:
        said = [folder / "sites" / site / "said.txt" for site in sites]
        until(
            lambda: all("connected to the server" in path.read_text() for path in said),
            "connecting",
        )
        if moment == "before the job":
            example.end([processes[1]])
        with example.started([*example.COTERIE, "run", str(folder)]) as (run,):
            if moment == "while it starts":
                until(lambda: len(processes[1].children(recursive=True)) > 1, "the job's start")
                example.end([processes[1]])
            elif isinstance(moment, int):
                until(lambda: steps_done(folder) >= moment, f"step {moment}")
                example.end([processes[1]])
            assert run.wait(timeout=400) == 0
    end = end_of(folder)
    assert (end.step, end.stopped) == (300, None)
    assert (folder / "run" / "model.pt").exists()
    assert end.left_out.get(sites[0], {}).get("no answer", 0) <= misses
    assert end.traffic["va"].seconds_waiting < 300 + misses * 5


@SLOW
@pytest.mark.parametrize("whose", ["a site's worker", "user 0's worker", "the server"])
def test_a_process_that_the_job_needs_is_killed(
    whose: str, tmp_path: Path, example: ModuleType
) -> None:
    """It is started again at its place, or the run goes on in another job, from its last state."""
    folder = tmp_path / "trial"
    sites = example.set_up(
        folder,
        example.hospitals(None),
        "va",
        ["--rule", "wga", "--own-examples", "40", "--steps", "300"],
    )
    with (
        example.started(*example.commands(folder, sites)) as (server, site, *_),
        example.started([*example.COTERIE, "run", str(folder)]) as (run,),
    ):
        until(lambda: steps_done(folder) >= 100, "step 100", 240)
        if whose == "the server":
            for process in (server, *server.children()):  # the worker is left to find out
                process.send_signal(signal.SIGKILL)
            server.wait()
            with example.started([*example.COTERIE, "server", str(folder)]):
                assert run.wait(timeout=400) == 0
        else:
            job_of(site if whose == "a site's worker" else server).kill()
            assert run.wait(timeout=400) == 0
    end = end_of(folder)
    assert (end.step, end.stopped) == (300, None)
    lines = (folder / "sites" / sites[1] / "requests.jsonl").read_text().splitlines()
    assert len(lines) <= 300 + 30 + 2, (
        "no more is done again than the steps since the last checkpoint"
    )


@SLOW
def test_private_sites_spend_no_more_than_epsilon_though_every_role_stops_or_dies(
    tmp_path: Path, example: ModuleType
) -> None:
    """Six processes of the roles are stopped for a while, one after the other, and a site's worker is killed."""
    folder, epsilon = tmp_path / "trial", 30.0
    options = ["--rule", "wga", "--own-examples", "40", "--steps", "600", "--timeout", "5"]
    sites = example.set_up(folder, example.hospitals(None), "va", options)
    promise = f"[privacy]\nepsilon = {epsilon}\ndelta = 1e-3\nclip = 1.0\nnoise = 4.0\n"
    for site in sites:
        path = folder / "sites" / site / "coterie.toml"
        text = re.sub(r"(?m)^norm = .*$", "", path.read_text(encoding="utf-8"))
        path.write_text(text + promise, encoding="utf-8")
    with (
        example.started(*example.commands(folder, sites)) as (server, site, *_),
        example.started([*example.COTERIE, "run", str(folder)]) as (run,),
    ):
        until(lambda: steps_done(folder) >= 20, "step 20", 400)
        roles = [job_of(server), job_of(site), server]
        # what connects a site, who started it, and who follows the run
        roles += [site.children()[0], site, run]
        for k, role in enumerate(roles, 1):
            role.send_signal(signal.SIGSTOP)
            time.sleep(3)
            role.send_signal(signal.SIGCONT)
            until(lambda k=k: steps_done(folder) >= 20 + 80 * k, "going on", 240)  # type: ignore[misc]
        job_of(site).kill()
        assert run.wait(timeout=400) == 0
    end = end_of(folder)
    assert end.step == 600
    for name in sites:
        lines = (folder / "sites" / name / "requests.jsonl").read_text().splitlines()
        spent = Counter[Event]()
        for line in map(json.loads, lines):
            if "noise" in line and "rate" in line:
                spent[Event(line["rate"], line["noise"])] += line["gradients"]
        assert spent.total() >= end.costs[name].gradients > 20
        assert 0 < epsilon_of(spent, 1e-3) <= epsilon
        assert end.promises[name]["spent"] == pytest.approx(epsilon_of(spent, 1e-3), rel=1e-6)


@SLOW
def test_a_job_of_another_class_or_with_code_is_not_run_by_a_site(
    tmp_path: Path, example: ModuleType
) -> None:
    """User 0 lifts all limits of its own server, and submits jobs that would run a program at the site."""
    folder, marker = tmp_path / "trial", tmp_path / "taken over"
    tables = example.hospitals(None)
    example.set_up(
        folder, {name: tables[name] for name in ("va", "hungarian")}, "va", ["--own-examples", "40"]
    )
    lift(folder / "server" / "local")
    program = {"path": "subprocess.Popen", "args": {"args": ["touch", str(marker)]}}
    with example.started(*example.commands(folder, ["hungarian"])):
        said = folder / "sites" / "hungarian" / "said.txt"
        until(lambda: "connected to the server" in said.read_text(), "connecting")
        for name, component, code in (
            ("class", program, ""),
            ("code", {"path": "evil.Evil", "args": {}}, str(marker)),
        ):
            job = write_job(tmp_path / "jobs", ["hungarian"], name)
            path = job / "app" / "config" / "config_fed_client.json"
            config = json.loads(path.read_text())
            config["components"] = [{"id": "_client", **component}]
            path.write_text(json.dumps(config))
            if code:
                (job / "app" / "custom").mkdir()
                text = f"import pathlib\npathlib.Path({code!r}).touch()\nclass Evil: pass\n"
                (job / "app" / "custom" / "evil.py").write_text(text)
            assert "COMPLETED" not in status_of(job, folder / "lead")
            assert not marker.exists()
        # the site's own list is what has stopped it
        lift(folder / "sites" / "hungarian" / "nvflare" / "local")
        status_of(tmp_path / "jobs" / "class", folder / "lead")
        assert marker.exists()


@SLOW
def test_connections_without_a_certificate_lock_nobody_out(
    tmp_path: Path, example: ModuleType
) -> None:
    """Twenty that say nothing, and one that says nonsense, are open when a site comes; then it is connected."""
    folder, tables = tmp_path / "trial", example.hospitals(None)
    example.set_up(
        folder, {name: tables[name] for name in ("va", "hungarian")}, "va", ["--own-examples", "40"]
    )
    port = json.loads((folder / "sites/hungarian/kit.json").read_text())["port"]
    server, site = example.commands(folder, ["hungarian"])
    with example.started(server):
        until(lambda: _listens(port), "the server")
        idle = [socket.create_connection(("localhost", port)) for _ in range(20)]
        idle[0].sendall(b"\x16\x03\x01\x02")
        with example.started(site):
            said = folder / "sites" / "hungarian" / "said.txt"
            until(lambda: "connected to the server" in said.read_text(), "connecting", 60)
        for each in idle:
            each.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def status_of(job: Path, lead: Path) -> str:
    """Submit a job, and return how it ends."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    session = new_secure_session(LEAD, str(lead), timeout=60)
    try:
        submitted = session.submit_job(str(job))
        until(
            lambda: str(session.get_job_meta(submitted)["status"]).startswith("FINISHED"),
            "its end",
            180,
        )
        return str(session.get_job_meta(submitted)["status"])
    finally:
        session.close()


def lift(local: Path) -> None:
    """Take away what coterie limits at a participant that NVFLARE has."""
    resources = json.loads((local / "resources.json").read_text())
    resources["class_list_enforcement_mode"] = "warn"
    resources["class_allow_list"] += ["subprocess.Popen", "evil.Evil"]
    (local / "resources.json").write_text(json.dumps(resources))
    rights = json.loads((local / "authorization.json").read_text())
    rights["permissions"]["lead"] = "any"
    (local / "authorization.json").write_text(json.dumps(rights))


def answers_without_certificate(port: int) -> bool:
    """Say whether the server goes on with somebody who shows no certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("localhost", port), timeout=10) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return bool(secure.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False
