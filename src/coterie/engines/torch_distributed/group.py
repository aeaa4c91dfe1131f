"""The processes of a run under torch.distributed.

How they meet, and who is missing when a message fails.
"""

import hmac
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from coterie.engines.torch_distributed.place import Place, stay_on_loopback
from coterie.engines.torch_distributed.seal import note_tag, shared_secret
from coterie.errors import KnobError, PeerLost, printable

CUT_OFF = "cut off"
"""What a process answers to a roll call when it is alive but has lost the others."""


_stores: dict[Place, tuple[Store, int]] = {}
"""For each address, the one connection of this process and how many groups have used it."""


@dataclass(frozen=True)
class Group:
    """All users' processes, user 0's first, and a store where they leave each other notes."""

    store: Store  # the notes, kept by one of the processes or by torchrun
    rank: int  # of this process; 0 is user 0's
    size: int
    timeout: float  # the seconds that any wait may last
    # with which notes and requests are tagged
    secret: bytes | None = field(default=None, repr=False)
    number: int = 0  # how many groups these processes have formed before

    @property
    def others(self) -> range:
        """The ranks of user 0's peers."""
        return range(1, self.size)

    def leave_note(self, key: str, note: Any) -> None:
        """Leave a note, of plain data."""
        text = json.dumps(note)
        tag = "" if self.secret is None else note_tag(self.secret, str(self.number), key, text)
        self.store.set(key, tag + text)

    def read_note(self, key: str, whose: str, kind: type = dict, /, **entries: Any) -> Any:
        """Return a note, once it is there.

        One that does not come in time, or that is no such note, is `PeerLost`.

        Args:
            key: what it is called.
            whose: who leaves it, for the error.
            kind: what a note is.
            entries: of which type each entry is, where it is a dict; a tuple where several are
                right.
        """
        try:
            data = self.store.get(key)
        except dist.DistError as error:
            raise PeerLost(
                f"{whose} did not come within {self.timeout:g} s; start all {self.size} processes,"
                " with the same MASTER_ADDR and MASTER_PORT"
                f" ({printable(str(error).splitlines()[0])})"
            ) from error
        try:
            text = data.decode()
            if self.secret is not None:
                tag, text = text[:64], text[64:]
                if not hmac.compare_digest(tag, note_tag(self.secret, str(self.number), key, text)):
                    raise PeerLost(_forged(key, whose, "it has no tag of this cluster's secret"))
            note: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PeerLost(
                _forged(key, whose, f"it is not readable, {type(error).__name__}")
            ) from error
        fits = isinstance(note, kind)
        if not fits:
            raise PeerLost(_forged(key, whose, "it is of another kind"))
        for name, kinds in entries.items():
            if name not in note or not isinstance(note[name], kinds):
                raise PeerLost(_forged(key, whose, f"its {name!r} is missing or of another kind"))
        return note

    def connect(self, backend: str) -> None:
        """Open the connections among all processes."""
        waiting = timedelta(seconds=self.timeout)
        if backend == "nccl":  # else a lost process ends this one without a word
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        else:
            stay_on_loopback()
        store = PrefixStore("connections", self.store)
        try:
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=waiting
            )
        except (RuntimeError, ValueError) as error:
            raise PeerLost(
                f"not all {self.size} processes could connect: {printable(error)}"
            ) from error

    def disconnect(self) -> None:
        """Close the connections, which everybody who still waits on one notices at once."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def answer_roll_call(self, why: str = CUT_OFF) -> None:
        """Say that this process is alive, or why it ends."""
        # whoever kept the notes is gone, and so is who would have read this one
        with suppress(dist.DistError):
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
        reasons = {
            rank: printable(self.read_note(f"present/{rank}", "it", str))
            for rank in self.others
            if rank not in missing
        }
        failed = {rank: why for rank, why in reasons.items() if why != CUT_OFF}
        return dict(sorted((dict.fromkeys(missing, "") | failed).items()))


def join(timeout: float = 120.0) -> Group:
    """Return the group that torchrun (or whoever set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) started.

    Every process must join as often as every other: a second run of the same processes is a second
    group.

    Args:
        timeout: seconds that any wait may last.
    """
    if dist.is_initialized():
        raise KnobError("torch.distributed is already in use in this process; let coterie start it")
    check_seconds("timeout", timeout)
    place, waiting, secret = Place.told(), timedelta(seconds=timeout), shared_secret()
    try:
        store, used = _stores.get(place) or (_opened(place, waiting), 0)
    except dist.DistError as error:
        raise PeerLost(
            f"nobody answers at {place.address}:{place.port}: {error}; start rank 0 there"
        ) from error
    _stores[place] = store, used + 1
    store.set_timeout(waiting)
    return Group(
        PrefixStore(f"coterie {used}", store), place.rank, place.size, timeout, secret, used
    )


def check_seconds(name: str, seconds: float) -> None:
    """Refuse what is no time to wait."""
    if not seconds > 0:
        raise KnobError(f"`{name}` must be a positive number of seconds, got {seconds}")


def _opened(place: Place, waiting: timedelta) -> Store:
    """Return the store once all processes have come to it."""
    if place.keeps_store:
        return place.keep(waiting, all_come=True)
    store: Store = next(rendezvous("env://", place.rank, place.size, timeout=waiting))[0]
    return store


def _forged(key: str, whose: str, why: str) -> str:
    return (
        f"the note {key!r} of {whose} is not one that a process of this run leaves: {why}. Use a"
        " network that strangers do not reach, and one secret in all processes"
        " (COTERIE_SECRET_FILE)"
    )


def in_short(error: str) -> str:
    """Return what a message of torch.distributed says, without where in its source."""
    return re.sub(r"^\[[^ ]*\] ", "", error.splitlines()[0]).split(". ")[0]


@contextmanager
def noting_sigterm() -> Iterator[threading.Event]:
    """Set an event at a SIGTERM instead of ending at once.

    Torchrun sends it to the others when one is gone.

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
