"""Every site trains, in processes that NVFLARE connects over mutual TLS; `test_everyone.py` has the rest."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support.members import change, everyone_in_process
from tests.support.waiting import job_of, steps_done, until

import coterie

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None,
        reason="NVFLARE is not installed: the extra `flare`",
    ),
    pytest.mark.skipif(
        not os.environ.get("COTERIE_SLOW"), reason="takes minutes: COTERIE_SLOW=1 runs it"
    ),
]
SITES = ("cleveland", "hungarian", "switzerland")


def set_up(example: ModuleType, folder: Path, *options: str) -> dict[str, Path]:
    """Set up three sites that all train, one of which has made the folders, and return their folders."""
    tables = example.hospitals(None)
    example.set_up(
        folder, {name: tables[name] for name in SITES}, SITES[0], ["--everyone", *options]
    )
    return {name: folder / "sites" / name for name in SITES}


def end_of(folder: Path) -> coterie.recording.End:
    return coterie.Record.load(folder / "run" / "record.jsonl").end


def assert_nothing_was_read(path: Path) -> None:
    """Check that the server could read what sites told itself, and nothing that they told each other."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    between = [line for line in lines if line[0] in SITES and line[1] in SITES]
    assert sum(int(line[3]) > 300 for line in between) > 6 * 100, "requests and answers"
    assert not any(line[4] == "1" for line in between)
    assert any(line[4] == "1" for line in lines), "it would have been noticed"


def test_the_models_of_train_everyone_though_the_server_is_killed(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are all of a site's training rows, so that it does not matter who draws them."""
    folder, heard = tmp_path / "trial", tmp_path / "heard"
    monkeypatch.setenv("COTERIE_LISTEN", str(heard))
    listening = Path(__file__).parents[1] / "support" / "listening"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(listening), os.environ.get("PYTHONPATH", "")])
    )
    kits = set_up(example, folder, "--steps", "150", "--batch-size", "400", "--timeout", "30")
    change(folder, SITES, norm="inf", examples="1")
    with (
        example.started(*example.commands(folder, SITES)) as (server, *_),
        example.started([*example.COTERIE, "run", str(folder)]) as (run,),
    ):
        until(lambda: min(map(steps_done, kits.values())) >= 40, "step 40", 240)
        for process in (server, *server.children(recursive=True)):
            process.send_signal(signal.SIGKILL)
        server.wait()
        with example.started([*example.COTERIE, "server", str(folder)]):
            assert run.wait(timeout=500) == 0, (folder / "said.txt").read_text()
    expected = everyone_in_process(folder, SITES)
    for name, kit in kits.items():
        end, there = end_of(kit), expected.runs[name].record.end
        assert (end.step, end.stopped, end.left_out) == (150, None, {})
        assert end.verdict == there.verdict
        assert end.test == pytest.approx(dict(there.test), rel=1e-3)
        found = torch.load(kit / "run" / "model.pt", weights_only=True)
        for key, value in expected.models[name].state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
        assert (kit / "run" / "index.html").exists()
    assert {path.name for path in (folder / "run").iterdir()} == {
        "members.json",
        "news.log",
        "summary.txt",
    }
    assert_nothing_was_read(heard)


def test_sites_that_hang_and_that_are_killed_come_back(tmp_path: Path, example: ModuleType) -> None:
    """One hangs and is taken back in the job; one is killed, and ends in the next, once it is started again."""
    folder = tmp_path / "trial"
    kits = set_up(
        example,
        folder,
        "--rule",
        "wga",
        "--steps",
        "600",
        "--timeout",
        "3",
        "--misses",
        "2",
        "--batch-size",
        "40",
    )
    asks, hangs, dies = SITES

    def said(name: str, text: str) -> Callable[[], bool]:
        news = kits[name] / "run" / "news.log"
        return lambda: news.exists() and text in news.read_text(encoding="utf-8")

    server, *sites = example.commands(folder, SITES)
    with (
        example.started(server, *sites) as (_, _, hanging, dying),
        example.started([*example.COTERIE, "run", str(folder)]) as (run,),
    ):
        until(lambda: min(map(steps_done, kits.values())) >= 60, "step 60", 240)
        worker = job_of(hanging)
        worker.send_signal(signal.SIGSTOP)
        until(said(asks, f"{hangs} gave nothing"), "dropping the site that hangs")
        worker.send_signal(signal.SIGCONT)
        until(said(asks, f"{hangs} is back"), "taking it back")
        example.end([dying])
        until(said(asks, f"{dies} gave nothing"), "dropping the site that was killed")
        assert steps_done(kits[dies]) < 600
        with example.started(sites[-1]):
            assert run.wait(timeout=500) == 0, (folder / "said.txt").read_text()
    for kit in kits.values():
        assert (end_of(kit).step, end_of(kit).stopped) == (600, None)
        assert (kit / "run" / "model.pt").exists()
    lost = end_of(kits[asks]).left_out
    assert lost[hangs]["no answer"] >= 2
    assert lost[dies]["not waited for"] > 0
    assert "ended: cleveland (600 steps), hungarian (600 steps), switzerland (600 steps)" in (
        folder / "run" / "summary.txt"
    ).read_text(encoding="utf-8")


def test_a_worker_of_a_site_is_killed(tmp_path: Path, example: ModuleType) -> None:
    """NVFLARE ends the job; all go on in another from where they were."""
    folder = tmp_path / "trial"
    kits = set_up(example, folder, "--rule", "wga", "--steps", "200", "--batch-size", "40")
    with (
        example.started(*example.commands(folder, SITES)) as (_, _, site, _),
        example.started([*example.COTERIE, "run", str(folder)]) as (run,),
    ):
        until(lambda: min(map(steps_done, kits.values())) >= 40, "step 40", 240)
        job_of(site).kill()
        assert run.wait(timeout=400) == 0, (folder / "said.txt").read_text()
    assert all((end_of(kit).step, end_of(kit).stopped) == (200, None) for kit in kits.values())
