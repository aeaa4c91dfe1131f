"""What is killed and started again: how soon sites are asked, and whether the run is what it says.

    python benchmarks/healing.py [--times 20] [--seed 0] [--pause 0] [--minutes 30]
        [--who site worker lead server hang] [--everyone]

Three sites and user 0 on this machine, over NVFLARE with mutual TLS (examples/consortium.py). At a
random step one site is killed (SIGKILL, with all its processes) and, after the pause, started
again. A row is one time: the step, the seconds from its start to its connection and to its first
answer, the processor time of its processes until then, the longest time that the others were not
asked for meanwhile, and the load of the machine. With `--who` what is killed is one of these: a
site; the process of the job at a site (worker) or at user 0 (lead), which is started again by
itself; the server, which is started again; or a site whose process of the job hangs for 20 s
(SIGSTOP). After so many minutes nothing more is killed.

With `--everyone` all three sites train, and answer each other through the server; the lead's
process only passes on. In the end each must have its own run, further than at the last kill.

Else in the end the same run is made in this process, with each site absent in just the steps that the
record says. Points of the record (weights, losses, who was left out) and the model after the last
step must be equal. (What is served is the best of the evaluated steps, and the run made again is
evaluated at more of them.)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import coterie
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.federation.lead import RUN, rule_of
from coterie.federation.participants import lead_participant, peer_of
from coterie.federation.settings import lead_settings
from coterie.recording.checkpoint import load_last, saved
from coterie.tables.fit import fit

_PATH = Path(__file__).parents[1] / "examples" / "consortium.py"
_SPEC = importlib.util.spec_from_file_location("example_of_a_consortium", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
consortium: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(consortium)

OPTIONS = ["--rule", "wga", "--own-examples", "40", "--timeout", "5"]
OPTIONS += ["--steps", "100000"]
COLUMNS = (
    "killed",
    "at step",
    "connected, s",
    "asked, s",
    "at step",
    "processor, s",
    "others waited, s",
    "load",
)
WITHIN = 10.0
"""How soon a site should be asked again."""
HANGS = 20.0
"""How long a process that hangs does."""
LIFTED = "gradients = inf"
"""In place of a site's cap."""


def until(said: Callable[[], bool], what: str, seconds: float = 600.0) -> float:
    """Wait until something is so, and return how long that took."""
    begun = time.monotonic()
    while not said():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what} took more than {seconds:g} s")
        time.sleep(0.05)
    return time.monotonic() - begun


def answers(kit: Path) -> int:
    """Return how many lines a site's log has."""
    path = kit / "requests.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_answered(kit: Path, more_than: int) -> bool:
    """Say whether a site has answered more often."""
    return answers(kit) > more_than


def step_of(kit: Path) -> int:
    """Return the step of a site's last answer."""
    lines = (kit / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(lines[-1])["step"])


class Absent:
    """Sites in this process that are silent in those steps that a record says."""

    def __init__(self, sites: LocalSites, absent: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self.sites = sites
        self.steps = {
            n: {t for a, b in each for t in range(a, b + 1)} for n, each in absent.items()
        }

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Any:
        """Ask those who were there; see `Sites.ask`."""
        step = arguments.get("request", {}).get("step")
        here = [name for name in names if step not in self.steps.get(name, ())]
        return self.sites.ask(here, method, timeout, **arguments)


def again(folder: Path, sites: Sequence[str], end: Any) -> Any:
    """Make the run in this process, with the recorded absences."""
    settings = lead_settings(folder)
    _, mine = lead_participant(folder, settings)
    assert mine is not None
    peers = {}
    for site in sites:
        copy = folder / "again" / site
        ignored = shutil.ignore_patterns("requests.jsonl", "*.count", "nvflare")
        shutil.copytree(folder / "sites" / site, copy, ignore=ignored)
        peers[site] = peer_of(copy)
    knobs = {
        name: getattr(settings.training, name) for name in ("seed", "steps", "lr", "batch_size")
    }
    here = Absent(LocalSites(peers), end.absent)
    engine = partial(Remote, sites=here, names=sites, misses=10**9)
    return fit(
        mine, rule_of(settings), settings.model.name, folder / "inside", engine=engine, **knobs
    )


def last_state(folder: Path) -> dict[str, Any]:
    """Return the model after a run's last step; what is served may be of another step."""
    state, _ = load_last(saved(folder / "checkpoints"))
    found: dict[str, Any] = state["learner"]["model"]
    return found


def compare(folder: Path, sites: Sequence[str]) -> None:
    """Print how a run differs from the one that is made again."""
    record = coterie.Record.load(folder / RUN)
    run = again(folder, sites, record.end)
    ours, inside = (last_state(folder / each) for each in (RUN, "inside"))
    apart = max(float((ours[n] - v).abs().max()) for n, v in inside.items())
    theirs = {point.step: point for point in run.record.points}
    pairs = [(point, theirs[point.step]) for point in record.points if point.step in theirs]
    wrong = sum(
        any(getattr(a, what) != getattr(b, what) for what in ("left_out", "weight", "validation"))
        for a, b in pairs
    )
    stretches = {name: len(each) for name, each in record.end.absent.items()}
    print(f"{record.end.step} steps; absent in stretches: {stretches}; {record.end.left_out}")
    print(f"the models after the last step differ by at most {apart:.1e}; ", end="")
    print(f"{wrong} of {len(pairs)} points that both recorded differ")


def longest_pause(kits: Sequence[Path], since: float) -> float:
    """Return the longest time between answers of any two sites in a row, since a time."""
    times = sorted(
        {
            datetime.fromisoformat(json.loads(line)["time"]).timestamp()
            for kit in kits
            for line in (kit / "requests.jsonl").read_text(encoding="utf-8").splitlines()[-20_000:]
        }
    )
    late = [time for time in times if time > since - 1]
    return max((b - a for a, b in pairwise(late)), default=0.0)


def job_of(party: psutil.Process) -> psutil.Process:
    """Return the process of a job that is under way at a party: the oldest of those that loaded for one."""
    there = [
        p for p in party.children(recursive=True) if "coterie.federation.launching" in p.cmdline()
    ]
    return min(there, key=psutil.Process.create_time)


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and all its children."""
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system
    return seconds


def told(took: Sequence[float]) -> None:
    """Print how soon sites were asked again."""
    within = sum(seconds <= WITHIN for seconds in took)
    print(f"\nasked again within {WITHIN:g} s: {within} of {len(took)}; ", end="")
    print(f"median {np.median(took):.1f} s, longest {max(took):.1f} s")


def end_soon(folder: Path, run: Sequence[str]) -> None:
    """Stop the run, and let it end ten steps later."""
    subprocess.run([*consortium.COTERIE, "stop", str(folder)], check=True)  # noqa: S603
    until(lambda: "--resume" in (folder / "said.txt").read_text(), "the stop")
    steps = coterie.Record.load(folder / RUN).end.step + 10
    text = (folder / "coterie.toml").read_text(encoding="utf-8")
    (folder / "coterie.toml").write_text(text.replace("steps = 100000", f"steps = {steps}"))
    subprocess.run([*run, "--resume"], check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def strike(kind: str, server: psutil.Process, site: psutil.Process) -> None:
    """Kill what is to be killed, or let it hang for a while."""
    if kind in {"site", "server"}:
        consortium.end([site if kind == "site" else server])
        return
    job = job_of(server if kind == "lead" else site)
    if kind != "hang":
        job.kill()
        return
    job.send_signal(signal.SIGSTOP)
    time.sleep(HANGS)
    job.send_signal(signal.SIGCONT)


def steps_of(folder: Path, sites: Sequence[str]) -> dict[str, int]:
    """Return the last recorded step of each site's own run, where all train."""
    runs = {site: folder / "sites" / site / RUN / "record.jsonl" for site in sites}
    return {site: coterie.Record.load(path).points[-1].step for site, path in runs.items()}


def main(
    times: int, seed: int, pause: float, minutes: float, who: Sequence[str], *, everyone: bool
) -> None:
    """Kill, start and print."""
    rng, folder = np.random.default_rng(seed), Path(tempfile.mkdtemp()) / "trial"
    tables = consortium.hospitals(None)
    if everyone:
        tables.pop("va")
        sites = list(tables)
        consortium.set_up(folder, tables, sites[0], [*OPTIONS, "--everyone"])
    else:
        sites = consortium.set_up(folder, tables, "va", OPTIONS)
    kits = [folder / "sites" / site for site in sites]
    for kit in kits:
        text = (kit / "coterie.toml").read_text(encoding="utf-8")
        (kit / "coterie.toml").write_text(re.sub(r"(?m)^gradients = \d+", LIFTED, text))
    commands = consortium.commands(folder, sites)
    with contextlib.ExitStack() as life:
        server, *processes = life.enter_context(consortium.started(*commands))
        run = [*consortium.COTERIE, "run", str(folder)]
        life.enter_context(consortium.started(run))
        waited = until(lambda: all(answers(kit) > 20 for kit in kits), "the run's start")
        print(f"first answers after {waited:.1f} s\n", flush=True)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
        began, took = time.monotonic(), list[float]()
        while len(took) < times and time.monotonic() - began < 60 * minutes:
            which = int(rng.integers(len(sites)))
            kit, said = kits[which], kits[which] / "said.txt"
            until(partial(has_answered, kit, answers(kit) + int(rng.integers(10, 200))), "steps")
            kind, since = str(rng.choice(list(who))), time.time()
            strike(kind, server, processes[which])
            step, before = step_of(kit), {each: answers(each) for each in kits}
            time.sleep(pause)
            up, started = 0.0, time.monotonic()
            if kind == "site":
                (processes[which],) = life.enter_context(consortium.started(commands[1 + which]))
                up = until(lambda said=said: "connected to the server" in said.read_text(), "it")  # type: ignore[misc]
            elif kind == "server":
                (server,) = life.enter_context(consortium.started(commands[0]))
            # those who were not killed may have been about to answer
            back = {kit: 0} if kind == "site" else dict.fromkeys(kits, 3)
            until(
                lambda more=before, back=back: all(  # type: ignore[misc]
                    has_answered(each, more[each] + least) for each, least in back.items()
                ),
                "asking it",
            )
            took.append(time.monotonic() - started)
            spent = processor_seconds(processes[which]) if kind == "site" else math.nan
            others = [other for other in kits if other != kit]
            what = sites[which] if kind in {"site", "hang"} else f"the {kind}"
            what += " (hung)" if kind == "hang" else ""
            row = [what, step, f"{up:.1f}", f"{took[-1]:.1f}", step_of(kit), f"{spent:.1f}"]
            row += [f"{longest_pause(others, since):.1f}", f"{os.getloadavg()[0]:.0f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
        told(took)
        if everyone:
            print(f"steps of each: {steps_of(folder, sites)}")
            return
        end_soon(folder, run)
    compare(folder, sites)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    kinds = ("site", "worker", "lead", "server", "hang")
    parser.add_argument("--everyone", action="store_true")
    parser.add_argument("--who", nargs="+", choices=kinds, default=["site"])
    main(**vars(parser.parse_args()))
