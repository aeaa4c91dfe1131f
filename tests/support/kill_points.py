"""Processes that are killed at a named point: before, while or after they write a file that is read again.

`killed_at_every_point(folder)` trains a model from a table in processes that are killed at one
point after the other, goes on from what each leaves, and says what came of it;
`ledger_killed_at(point, path)` does so with the ledger of a peer. Kills at random moments are in
`killed_runs.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2  # noqa: F401  # what every child would import: this and the next
import matplotlib.figure  # noqa: F401
import sklearn.compose
import sklearn.model_selection  # noqa: F401
import skops.io  # noqa: F401
import torch
import torch._dynamo
from tests.support.damage import ROWS
from tests.support.processes import ended, forked

import coterie
from coterie.data import from_table
from coterie.engines.peer.ledger import Ledger
from coterie.recording import files
from coterie.recording.files import ChainedLines, _chained
from coterie.tables.fit import fit

WHEN = ("before", "during", "after")
NAMES = {
    "choice": ("record.jsonl",),  # written whole at first, with what was chosen
    "record": ("record.jsonl",),  # a line
    "checkpoint": (".ckpt",),
    "model": ("model.pt", "preparation.json", "model.json"),
    "report": ("index.html",),
    "ledger": ("requests.jsonl",),
}
"""By what is written, how the names of the files end."""

POINTS = [f"{when} {what}" for what in NAMES if what != "ledger" for when in WHEN]
LEDGER_POINTS = [f"{when} ledger" for when in WHEN]


@contextmanager
def armed(point: str, nth: int = 1) -> Iterator[None]:
    """Let this process be killed when it comes to a point for the nth time."""
    when, what = point.split()
    visits = itertools.count(1)
    write, append = files.write, ChainedLines.append

    def is_it(path: Path) -> bool:
        return path.name.endswith(NAMES[what]) and next(visits) == nth

    def at(moment: str, path: Path, tear: Callable[[], object]) -> None:
        if when == moment:
            if moment == "during":
                tear()
            os.kill(os.getpid(), signal.SIGKILL)

    def killing_write(path: Path, *parts: bytes | memoryview) -> None:
        hit = what not in ("record", "ledger") and is_it(path)
        data = b"".join(parts)

        def tear() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"{path.name}.new").write_bytes(data[: len(data) // 2])

        for moment in WHEN[:2] if hit else ():
            at(moment, path, tear)
        write(path, data)
        if hit:
            at("after", path, lambda: None)

    def killing_append(lines: ChainedLines, line: Any, *, sync: bool = False) -> None:
        hit = what in ("record", "ledger") and is_it(lines.path)
        text = _chained(line, lines._last)[0]

        def tear() -> None:
            with lines.path.open("ab") as file:
                file.write(text[: len(text) // 2])

        for moment in WHEN[:2] if hit else ():
            at(moment, lines.path, tear)
        append(lines, line, sync=sync)
        if hit:
            at("after", lines.path, lambda: None)

    with (
        mock.patch.object(files, "write", killing_write),
        mock.patch.object(ChainedLines, "append", killing_append),
    ):
        yield


def train(folder: Path) -> None:
    """Train from a table by a rule that is chosen, or go on, and write down a digest of what came of it."""
    task, rule = (
        from_table(ROWS, user_column="who", target="y", me="a"),
        coterie.WeightedAveraging("auto"),
    )
    how: dict[str, Any] = {"steps": 8, "evaluate_every": 2, "checkpoint_every": 2, "trackers": ()}
    run = fit(task, rule, "mlp", folder, resume=True, progress=False, **how)
    if run is None:
        raise AssertionError("nobody pressed Ctrl-C")
    digest = hashlib.sha256()
    for name, value in torch.load(folder / "model.pt", weights_only=True).items():
        digest.update(name.encode() + value.numpy().tobytes())
    record = coterie.Record.load(folder / "record.jsonl")
    points = [point.to_plain() for point in record.points]
    digest.update(
        json.dumps([points, dict(record.end.test), dict(record.configuration.choice)]).encode()
    )
    (folder / "digest").write_text(digest.hexdigest(), encoding="utf-8")


def killed(work: Callable[[], object], point: str, nth: int = 1) -> bool:
    """Do some work in a process that is to be killed at a point; say whether it was."""

    def doomed() -> None:
        with armed(point, nth):
            work()

    status = ended(forked(doomed), patience=120)
    if status not in (0, -signal.SIGKILL):
        raise AssertionError(f"the process that was to be killed {point} ended with {status}")
    return status == -signal.SIGKILL


def finished(folder: Path) -> str:
    """Go on to the end in a process that is not killed, and return the digest of what came of it."""
    if ended(forked(lambda: train(folder)), patience=120):
        raise AssertionError(f"the run in {folder} could not be taken up again")
    return (folder / "digest").read_text(encoding="utf-8")


def killed_at_every_point(
    folder: Path, nths: Callable[[str], int] = lambda point: 1
) -> dict[str, bool]:
    """Kill a run at every point, one after the other, each time going on from what is left.

    Returns by point whether the process was killed there, and under "same bits" whether the run
    came to the bits of one that was never killed. `nths` says at which visit of a point.
    """
    hit = {point: killed(lambda: train(folder / "cut"), point, nths(point)) for point in POINTS}
    return hit | {"same bits": finished(folder / "cut") == finished(folder / "whole")}


def ledger_killed_at(point: str, path: Path, gradients: int = 5) -> tuple[int, int, int]:
    """Kill a peer at a point of its ledger; return how many gradients left, how many it counts, and gives more."""
    read, write = os.pipe()

    def give() -> None:
        ledger = Ledger(path)
        while ledger.give(at_most=gradients):
            os.write(write, b"!")  # the gradient leaves

    if not killed(give, point, nth=3):
        raise AssertionError(f"the process was not killed {point}")
    os.close(write)
    left = len(os.read(read, 100))
    os.close(read)
    ledger = Ledger(path)
    counted = ledger.given
    return left, counted, sum(ledger.give(at_most=gradients) for _ in range(gradients))
