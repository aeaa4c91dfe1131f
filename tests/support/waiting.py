"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coterie

ENOUGH = 600.0
"""Seconds within which a machine with much else to do has done anything a test asks of it."""


def until(condition: Callable[[], bool], what: str, seconds: float = ENOUGH) -> None:
    """Wait until something holds; that it does not in time is an error."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen in {seconds} s"
        time.sleep(0.1)


def steps_done(folder: Path) -> int:
    """Return how many steps the run in a participant's folder has recorded."""
    path = folder / "run" / "record.jsonl"
    points = coterie.Record.load(path).points if path.exists() else []
    return points[-1].step if points else 0


def job_of(party: Any) -> Any:
    """Return the process of the job at a server or site: the oldest of those that have loaded for one."""
    mine = party.children(recursive=True)
    there = [each for each in mine if "coterie.federation.launching" in each.cmdline()]
    return min(there, key=lambda each: each.create_time())
