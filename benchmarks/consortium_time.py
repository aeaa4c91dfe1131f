"""How long a consortium needs from submission to verdict, with latency added to every exchange.

    python benchmarks/consortium_time.py [--data DIR] [--latencies 0,0.02,0.1] [--options "--steps 1000"]

Four hospitals on this machine (`examples/consortium.py`): a provisioned server and three sites over
mutual TLS, all connected before the clock starts. Nothing is set, so that the model is found in
closed form; with `--options` of `coterie federate init` anything else. The latency is a delay in
what carries user 0's messages, there and back. NVFLARE starts a process at each party for a job,
which takes most of the time: so the processor seconds of all four parties are printed too, and how
busy the machine was beside.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import coterie
from coterie.engines.remote.sites import Replies
from coterie.errors import CoterieError
from coterie.federation.jobs import CollabSites
from coterie.federation.lead import RUN
from coterie.federation.supervision import follow, session_of

DELAY = "COTERIE_BENCHMARK_DELAY"
"""Names a file with the seconds of the delay, where user 0's job imports this module."""


class Delayed:
    """Replies that come later."""

    def __init__(self, replies: Replies, seconds: float) -> None:
        self.replies, self.seconds = replies, seconds

    def done(self) -> bool:
        """Say whether they are all there."""
        return self.replies.done()

    def wait(self) -> Mapping[str, Any]:
        """Return them, later."""
        answers = self.replies.wait()
        time.sleep(self.seconds)
        return answers


def delay() -> None:
    """Let all that user 0 asks take so much longer."""
    plain = CollabSites.ask

    def ask(self: Any, names: Sequence[str], method: str, timeout: float, **more: Any) -> Any:
        seconds = float(Path(os.environ[DELAY]).read_text(encoding="utf-8"))
        return Delayed(plain(self, names, method, timeout, **more), seconds)

    setattr(CollabSites, "ask", ask)  # noqa: B010  # a method, of a class that NVFLARE's job makes


def main(given: argparse.Namespace) -> None:
    """Set a consortium up, and train in it once with each latency."""
    path = Path(__file__).parents[1] / "examples" / "consortium.py"
    found = importlib.util.spec_from_file_location("consortium", path)
    if found is None or found.loader is None:
        raise FileNotFoundError(path)
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    folder = Path(tempfile.mkdtemp())
    os.environ |= {DELAY: str(folder / "delay"), "COTERIE_IMPORT": str(Path(__file__).absolute())}
    try:
        tables = example.hospitals(given.data)
        with contextlib.redirect_stdout(sys.stderr):
            sites = example.set_up(folder, tables, "cleveland", shlex.split(given.options))
        with example.started(*example.commands(folder, sites)) as parties:
            connect(folder, len(sites))
            print("| latency | seconds | processor seconds | waited | exchanges | kB | load |")
            print("|---" * 7 + "|")
            for latency in given.latencies.split(","):
                (folder / "delay").write_text(latency, encoding="utf-8")
                print(measured(folder, float(latency), parties), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def connect(folder: Path, sites: int) -> None:
    """Wait until everybody is there."""
    for _ in range(120):
        with contextlib.suppress(CoterieError), session_of(folder / "lead", 60) as session:
            if len(session.get_system_info().client_info) >= sites:
                return
        time.sleep(1)
    raise TimeoutError("the sites do not connect")


@contextlib.contextmanager
def computing(parties: Sequence[psutil.Process]) -> Iterator[dict[int, float]]:
    """Give the processor seconds of parties and their children by process, as they grow."""
    found, over = dict[int, float](), threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for party in parties:
                for process in (party, *party.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        found[process.pid] = times.user + times.system

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


def measured(folder: Path, latency: float, parties: Sequence[psutil.Process]) -> str:
    """Train once, and return a line of the table."""
    with computing(parties) as before:
        time.sleep(1)
    began, before = time.monotonic(), dict(before)
    with computing(parties) as after:
        follow(folder, show_line=lambda line: print(line, file=sys.stderr), progress=False)
    seconds = time.monotonic() - began
    computed = sum(after.values()) - sum(before.get(pid, 0.0) for pid in after)
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    mine = record.end.traffic[record.configuration.me.name]
    exchanges = record.end.account.get("exchanges", record.end.step)
    size = (mine.bytes_sent + mine.bytes_received) / 1e3
    shutil.rmtree(folder / RUN)
    cells = f"{1e3 * latency:.0f} ms | {seconds:.1f} | {computed:.1f} | {mine.seconds_waiting:.1f} | {exchanges}"
    return f"| {cells} | {size:.0f} | {os.getloadavg()[0]:.0f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--latencies", default="0,0.02,0.1")
    parser.add_argument("--options", default="")
    main(parser.parse_args())
elif DELAY in os.environ:
    delay()
