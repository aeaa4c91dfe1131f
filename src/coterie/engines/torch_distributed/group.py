"""The processes of a run under torch.distributed: how they meet, and who is missing when a message fails."""

import contextlib
import hmac
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from coterie.engines.torch_distributed.seal import note_tag, shared_secret
from coterie.errors import KnobError, PeerLost, printable

logger = logging.getLogger(__name__)

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
    secret: bytes | None = field(default=None, repr=False)  # with which notes and requests are tagged
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
        """Return a note, once it is there; one that does not come in time, or that is no such note, is `PeerLost`.

        Args:
            key: what it is called.
            whose: who leaves it, for the error.
            kind: what a note is.
            entries: of which type each entry is, where it is a dict; a tuple where several are right.
        """
        try:
            data = self.store.get(key)
        except dist.DistError as error:
            raise PeerLost(
                f"{whose} did not come within {self.timeout:g} s; start all {self.size} processes, with the same "
                f"MASTER_ADDR and MASTER_PORT ({printable(str(error).splitlines()[0])})"
            ) from error
        try:
            text = data.decode()
            if self.secret is not None:
                tag, text = text[:64], text[64:]
                if not hmac.compare_digest(tag, note_tag(self.secret, str(self.number), key, text)):
                    raise PeerLost(_forged(key, whose, "it has no tag of this cluster's secret"))
            note: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PeerLost(_forged(key, whose, f"it is not readable, {type(error).__name__}")) from error
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
            _stay_on_loopback()
        store = PrefixStore("connections", self.store)
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=waiting)
        except (RuntimeError, ValueError) as error:
            raise PeerLost(f"not all {self.size} processes could connect: {printable(error)}") from error

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
        reasons = {
            rank: printable(self.read_note(f"present/{rank}", "it", str))
            for rank in self.others
            if rank not in missing
        }
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
    try:
        port, rank, size = (int(text) for text in place[1:])
    except ValueError as error:
        raise KnobError(f"MASTER_PORT, RANK and WORLD_SIZE must be whole numbers, got {place[1:]}") from error
    if size < 2:
        raise KnobError("WORLD_SIZE is 1: user 0 would have no peers; start a process for each user")
    waiting, secret = timedelta(seconds=timeout), shared_secret()
    try:
        store, used = _stores.get(place) or (_opened(place[0], port, rank, size, waiting), 0)
    except dist.DistError as error:
        raise PeerLost(f"nobody answers at {place[0]}:{place[1]}: {error}; start rank 0 there") from error
    _stores[place] = store, used + 1
    store.set_timeout(waiting)
    return Group(PrefixStore(f"coterie {used}", store), rank, size, timeout, secret, used)


def _opened(address: str, port: int, rank: int, size: int, waiting: timedelta) -> Store:
    """Return the store; user 0 keeps it, at the address given and at no other, unless torchrun does."""
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(rendezvous("env://", rank, size, timeout=waiting))[0]
        return store
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(128)
            opened.pop_all()  # it is the store's from now on
    except OSError as error:
        raise KnobError(
            f"MASTER_ADDR and MASTER_PORT must be an address of user 0's machine and a free port there, got "
            f"{address}:{port} ({error.strerror or error})"
        ) from error
    if str(place[0]).startswith("127.") and address not in (place[0], "localhost"):
        logger.warning("%s is %s here: processes on other machines cannot reach it", address, place[0])
    return TCPStore(address, port, size, is_master=True, timeout=waiting, master_listen_fd=listener.detach())


def _stay_on_loopback() -> None:
    """Let gloo, too, listen on this machine alone where everybody is on it; else it takes the host's address."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if os.environ.get("MASTER_ADDR", "").startswith(("127.", "localhost")) and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _forged(key: str, whose: str, why: str) -> str:
    return (
        f"the note {key!r} of {whose} is not one that a process of this run leaves: {why}. Use a network that "
        "strangers do not reach, and one secret in all processes (COTERIE_SECRET_FILE)"
    )


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
