"""Faults of engines and folders: each happens in the middle of a run, which must go on, or say what is wrong.

`FAULTS` has them by name; each takes an empty folder and returns what came of it: "went on",
"refused" (a typed error that keeps the run) or what else.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.support.folders import Disk, claimed_elsewhere
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import CoterieError

STEPS, FIRST, LAST = 12, 4, 7
"""How many steps a run takes, and in which of them the fault is."""


def user(name: str, seed: int) -> coterie.User:
    """Return a user of 20 examples, some more held out."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, 3, generator=random)
    targets = (inputs[:, 0] > 0).long()
    return coterie.User(name, inputs[:20], targets[:20], validation=(inputs[20:], targets[20:]))


@dataclass
class Faulty:
    """Sites one of which, "b", does something else while the fault lasts."""

    sites: LocalSites
    fault: str
    before: dict[str, Any] = field(default_factory=dict)

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        """Ask the sites that are here, and change what "b" replies."""
        replies = dict(self.sites.ask(names, method, timeout, **arguments).replies)
        step = arguments["request"]["step"] if method == "gradients" else FIRST
        last = {"late": FIRST, "gone": STEPS}.get(self.fault, LAST)
        if "b" in replies and method == "gradients" and FIRST <= step <= last:
            replies["b"] = self._changed(replies["b"])
        self.before |= replies
        return LocalReplies({name: reply for name, reply in replies.items() if reply is not None})

    def _changed(self, reply: dict[str, Any]) -> dict[str, Any] | None:
        gradients = reply["gradients"]
        changed: dict[str, Callable[[], dict[str, Any] | None]] = {
            "late": lambda: None,
            "gone": lambda: None,
            "back": lambda: None,
            "wrong shape": lambda: reply | {"gradients": gradients[:, :-1]},
            "wrong step": lambda: reply | {"step": 0},
            "not a number": lambda: reply | {"gradients": np.full_like(gradients, np.nan)},
            "huge": lambda: reply | {"gradients": 1e6 * np.ones_like(gradients)},
            "replayed": lambda: self.before.get("b", reply),
        }
        return changed[self.fault]()


def trained(folder: Path, fault: str | None = None, **options: Any) -> coterie.Run:
    """Train with three sites, one of which is faulty."""
    torch.manual_seed(0)
    me, others = user("me", 0), [user(name, k) for k, name in enumerate("abc", 1)]
    rule = coterie.WeightedAveraging(0.5)
    settings: dict[str, Any] = {"lr": 0.1, "steps": STEPS, "batch_size": 8}
    settings |= {
        "checkpoint_every": 3,
        "evaluate_every": 3,
        "measure": False,
        "trackers": (),
        "out": folder / "run",
    }
    if fault is None:
        return coterie.train(nn.Linear(3, 2), cross_entropy, me, others, rule, **settings | options)

    def engine(model: Any, loss: Any, me: Any, peers: Any, *, batch_size: int, seed: int) -> Remote:
        there = coterie.InProcess(model, loss, me, others, batch_size=batch_size, seed=seed)
        sites = Faulty(LocalSites({peer.name: there.peer(peer.name) for peer in others}), fault)
        return Remote(
            model,
            loss,
            me,
            [],
            names="abc",
            sites=sites,
            batch_size=batch_size,
            seed=seed,
            probe_every=2,
        )

    return coterie.train(
        nn.Linear(3, 2), cross_entropy, me, [], rule, engine=engine, **settings | options
    )


def of_a_site(fault: str, folder: Path) -> str:
    """Say what comes of a site's fault: the run goes on, and the record counts what was left out."""
    run = trained(folder, fault)
    finite = all(bool(p.isfinite().all()) for p in run.model.parameters())
    counted = set(run.record.end.left_out) == {"b"}
    return (
        "went on"
        if run.step == STEPS and finite and counted
        else f"{run.step} steps, {run.record.end.left_out}"
    )


def of_a_disk(number: int, folder: Path) -> str:
    """Say what comes of a disk that fails for some steps."""
    disk = Disk(number, FIRST, LAST)
    with disk.used():
        run = trained(folder, hooks=[disk.follow])
    return (
        "went on"
        if run.step == STEPS and disk.failures
        else f"{run.step} steps, {disk.failures} failures"
    )


def of_the_clock(folder: Path) -> str:
    """Say what comes of a clock that goes back an hour at every look."""
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    with mock.patch.object(time, "time", back):
        run = trained(folder)
    whole = trained(folder / "whole")
    same = all(
        torch.equal(a, b)
        for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True)
    )
    return "went on" if same else "other numbers"


def of_two_processes(folder: Path) -> str:
    """Say what comes of a folder that another process writes to."""
    (folder / "run").mkdir(parents=True)
    with claimed_elsewhere(folder / "run"):
        try:
            trained(folder)
        except CoterieError:
            return "refused"
    return "both wrote"


SITES = ("late", "gone", "back", "wrong shape", "wrong step", "not a number", "huge", "replayed")
FAULTS: dict[str, Callable[[Path], str]] = {
    **{name: partial(of_a_site, name) for name in SITES},
    "disk full": partial(of_a_disk, errno.ENOSPC),
    "read-only": partial(of_a_disk, errno.EROFS),
    "clock": of_the_clock,
    "two processes in one folder": of_two_processes,
}
