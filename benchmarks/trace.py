"""What a step walks through: functions, files, packages and classes of coterie, counted by `sys.setprofile`.

    python benchmarks/trace.py [--walk]

Digits by writer, 13 peers, softmax regression, 200 steps, one CPU thread. A row is one step of its
kind, all that is done before the loop begins, or what the loop does before its first step. A
package is a folder directly below `coterie`; a switch is a call from one package into another.
`--walk` prints the functions of a plain adaptive step in the order of their first calls:
docs/architecture.md shows them, and `tests/test_walk.py` checks that.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

import coterie
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.training.loop import Loop

SOURCE = Path(coterie.__file__).parent
FIRST, JUDGING, FITTED, PLAIN = 0, 8, 9, 12
"""Steps of a run of 200: one that evaluates, one that asks each peer by itself, the first by the weights
fitted there, and one like most others."""


class Walk:
    """The calls of coterie's functions while it is on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # file and function
        self.classes: set[str] = set()
        self.switches = 0

    def __enter__(self) -> Walk:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        place = _place(frame)
        if event != "call" or place is None or not frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            return  # not the body of a class, which runs once, when its module is imported
        self.calls.append((place, frame.f_code.co_qualname))
        if "self" in frame.f_locals:
            self.classes.add(type(frame.f_locals["self"]).__name__)
        above = frame.f_back
        while above is not None and _place(above) is None:
            above = above.f_back
        if above is not None and _package(str(_place(above))) != _package(place):
            self.switches += 1

    @property
    def walk(self) -> list[tuple[str, str]]:
        """The functions in the order of their first calls; no lambdas, comprehensions or generators."""
        return [
            (file, name)
            for file, name in dict.fromkeys(self.calls)
            if "<" not in name.rpartition(".")[2]
        ]

    def row(self) -> tuple[int, int, int, int, int, int]:
        """Return calls, functions, files, packages, classes and switches."""
        walk = self.walk
        files = {file for file, _ in walk}
        packages = {_package(file) for file in files}
        return (
            len(self.calls),
            len(walk),
            len(files),
            len(packages),
            len(self.classes),
            self.switches,
        )


def _place(frame: FrameType) -> str | None:
    """Return a file of coterie, below its folder."""
    name = frame.f_code.co_filename
    return name[len(str(SOURCE)) + 1 :] if name.startswith(str(SOURCE)) else None


def _package(file: str) -> str:
    return file.partition("/")[0]


def traced(
    rule: Any, steps: tuple[int, ...], engine: Callable[..., Any] = InProcess
) -> dict[int | str, Walk]:
    """Train, and return the walks of some steps, of the `set-up` before the loop, and of what it does `first`."""
    task = coterie.data.digits_by_writer(me=0, own_examples=30)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    walks: dict[int | str, Walk] = {"set-up": Walk(), "first": Walk()}
    advance, go, train = Loop.advance, Loop.run, coterie.train  # modules are imported before

    def begun(loop: Loop, interrupted: Callable[[], bool]) -> None:
        with walks["first"]:
            go(loop, interrupted)

    def watched(loop: Loop, most: int) -> Any:
        sys.setprofile(None)
        step = loop.going[0].learner.step
        if step not in steps:
            return advance(loop, most)
        with walks.setdefault(step, Walk()):
            return advance(loop, most)

    with (
        mock.patch.object(Loop, "advance", watched),
        mock.patch.object(Loop, "run", begun),
        warnings.catch_warnings(),
        walks["set-up"],
    ):
        warnings.simplefilter("ignore")
        loss, last = nn.functional.cross_entropy, max(steps)
        train(
            *(model, loss, task.me, task.peers, rule),
            lr=0.01,
            steps=200,
            engine=engine,
            hooks=[lambda step: step.step > last],
            progress=False,
        )
    return walks


def sites(model: nn.Module, loss: Any, me: coterie.User, peers: Any, **options: Any) -> Remote:
    """Return an engine over sites in this process."""
    task = coterie.data.digits_by_writer(me=0, own_examples=30)
    held = {peer.name: Peer(peer, Passes(model, loss)) for peer in task.peers}
    return Remote(model, loss, me, sites=LocalSites(held), names=list(held), **options)


def main() -> None:
    """Print the table, or the walk of a plain adaptive step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--walk", action="store_true", help="print the walk of a plain adaptive step"
    )
    settings = parser.parse_args()
    torch.set_num_threads(1)
    here = traced(None, (FIRST, JUDGING, FITTED, PLAIN))
    if settings.walk:
        for file, name in here[PLAIN].walk:
            print(f"{file}  {name}")
        return
    plain = traced(coterie.WeightedAveraging(0.5), (PLAIN,))
    there = traced(None, (PLAIN, JUDGING), sites)
    rows = {
        "in process, plain step": here[PLAIN],
        "in process, the first by new weights": here[FITTED],
        "in process, each peer by itself": here[JUDGING],
        "in process, the same and an evaluation": here[FIRST],
        "in process, weighted averaging": plain[PLAIN],
        "over sites here, plain step": there[PLAIN],
        "over sites here, each peer by itself": there[JUDGING],
        "set-up before the loop": here["set-up"],
        "the loop before its first step": here["first"],
    }
    print(
        "| step | calls | functions | files | packages | classes | switches |\n|---|---|---|---|---|---|---|"
    )
    for name, walk in rows.items():
        print(f"| {name} | " + " | ".join(f"{count:,}" for count in walk.row()) + " |")


if __name__ == "__main__":
    main()
