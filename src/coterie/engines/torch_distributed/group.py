"""The processes of a run under torch.distributed: how they meet, and who is missing when a message fails."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from coterie.errors import KnobError, PeerLost

CUT_OFF = "cut off"
"""What a process answers to a roll call when it is alive but has lost the others."""

_stores: dict[tuple[str, ...], tuple[Store, int]] = {}
"""For each address, the one connection of this process and how many groups have used it."""


@dataclass(frozen=True)
class Group:
    """All users' processes, user 0's first, and a store where they leave each other notes."""

    store: Store  # the notes, kept by one of the processes or by torchrun
    rank: int  # of this process; 0 is user 0's
    size: int
    timeout: float  # the seconds that any wait may last

    @property
    def others(self) -> range:
        """The ranks of user 0's peers."""
        return range(1, self.size)

    def leave_note(self, key: str, note: Any) -> None:
        """Leave a note, of plain data."""
        self.store.set(key, json.dumps(note))

    def read_note(self, key: str, whose: str) -> Any:
        """Return a note, once it is there; one that does not come in time is `PeerLost`."""
        try:
            return json.loads(self.store.get(key))
        except dist.DistError as error:
            raise PeerLost(
                f"{whose} did not come within {self.timeout:g} s; start all {self.size} processes, with the same "
                f"MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0]})"
            ) from error

    def connect(self, backend: str) -> None:
        """Open the connections among all processes."""
        waiting = timedelta(seconds=self.timeout)
        if backend == "nccl":  # else a lost process ends this one without a word
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        store = PrefixStore("connections", self.store)
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=waiting)
        except RuntimeError as error:
            raise PeerLost(f"not all {self.size} processes could connect: {error}") from error

    def disconnect(self) -> None:
        """Close the connections, which everybody who still waits on one notices at once."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def answer_roll_call(self, why: str = CUT_OFF) -> None:
        """Say that this process is alive, or why it ends."""
        with suppress(dist.DistError):  # whoever kept the notes is gone, and so is who would have read this one
            self.leave_note(f"present/{self.rank}", why)

    def roll_call(self) -> dict[int, str]:
        """Return the ranks that are missing, each with the reason it gave or an empty string.

        Waits until all are there or only one is missing, for ten seconds at most.
        """
        end, missing = time.monotonic() + min(10.0, self.timeout), set(self.others)
        while missing and time.monotonic() < end:
            missing -= {rank for rank in missing if self.store.check([f"present/{rank}"])}
            if len(missing) == 1:
                end = min(end, time.monotonic() + 1.0)
            time.sleep(0.02)
        reasons = {rank: self.read_note(f"present/{rank}", "it") for rank in self.others if rank not in missing}
        failed = {rank: why for rank, why in reasons.items() if why != CUT_OFF}
        return dict(sorted((dict.fromkeys(missing, "") | failed).items()))


def join(timeout: float = 120.0) -> Group:
    """Return the group that torchrun (or whoever set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) started.

    Every process must join as often as every other: a second run of the same processes is a second group.

    Args:
        timeout: seconds that any wait may last.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    if missing := [name for name in names if name not in os.environ]:
        raise KnobError(
            f"torch.distributed needs the environment variable {missing[0]}; start the processes with torchrun, or "
            f"set {', '.join(names)} for each"
        )
    if dist.is_initialized():
        raise KnobError("torch.distributed is already in use in this process; let coterie start it")
    if not timeout > 0:
        raise KnobError(f"`timeout` must be a positive number of seconds, got {timeout}")
    place = tuple(os.environ[name] for name in names)
    rank, size = int(place[2]), int(place[3])
    if size < 2:
        raise KnobError("WORLD_SIZE is 1: user 0 would have no peers; start a process for each user")
    waiting = timedelta(seconds=timeout)
    try:
        store, used = _stores.get(place) or (next(rendezvous("env://", rank, size, timeout=waiting))[0], 0)
    except dist.DistError as error:
        raise PeerLost(f"nobody answers at {place[0]}:{place[1]}: {error}; start rank 0 there") from error
    _stores[place] = store, used + 1
    store.set_timeout(waiting)
    return Group(PrefixStore(f"coterie {used}", store), rank, size, timeout)


def in_short(error: str) -> str:
    """Return what a message of torch.distributed says, without where in its source."""
    return re.sub(r"^\[[^ ]*\] ", "", error.splitlines()[0]).split(". ")[0]


@contextmanager
def noting_sigterm() -> Iterator[threading.Event]:
    """Set an event at a SIGTERM instead of ending at once; torchrun sends it to the others when one is gone.

    Outside the main thread signals cannot be caught, and nothing changes.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGTERM, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)
