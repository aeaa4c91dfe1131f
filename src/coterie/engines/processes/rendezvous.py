"""Where processes meet: each leaves a note of where it listens, and finds out where the others do."""

import contextlib
import json
import logging
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.distributed_c10d import PrefixStore, Store

from coterie.engines.peer.ledger import read_secret
from coterie.errors import KnobError

logger = logging.getLogger(__name__)

SECRET_FILE = "COTERIE_SECRET_FILE"  # noqa: S105  # the name of a variable
"""The environment variable that names the file with the secret, the same in every process."""
REACHING = timedelta(seconds=10)
"""How long the keeper of the notes has to answer."""


@dataclass(frozen=True)
class Address:
    """Where processes meet, and which of them this is."""

    address: str
    port: int
    rank: int
    size: int

    @classmethod
    def told(cls) -> Self:
        """Return what torchrun, or whoever started this process, says by its environment."""
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        if missing := [name for name in names if name not in os.environ]:
            raise KnobError(
                f"torch.distributed needs the environment variable {missing[0]}; start the"
                f" processes with torchrun, or set {', '.join(names)} for each"
            )
        address, *numbers = (os.environ[name] for name in names)
        try:
            told = cls(address, *map(int, numbers))
        except ValueError as error:
            raise KnobError(
                f"MASTER_PORT, RANK and WORLD_SIZE must be whole numbers, got {tuple(numbers)}"
            ) from error
        if told.size < 2:
            raise KnobError(
                "WORLD_SIZE is 1: user 0 would have no peers; start a process for each user"
            )
        return told

    @property
    def others(self) -> list[int]:
        """The ranks of all other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def keeps_notes(self) -> bool:
        """Whether this process keeps the notes: user 0 does, unless torchrun does."""
        return not self.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes are on this machine: by their address, or as torchrun says."""
        ours = os.environ.get("LOCAL_WORLD_SIZE") == str(self.size)
        return ours or is_loopback(_looked_up(self.address, self.port))


_kept: dict[Address, Store] = {}
"""The notes that this process keeps, as long as it lives."""
_met: dict[Address, int] = {}
"""For each address, how often this process has met others there."""


class Rendezvous:
    """Where the processes of a run listen. What a note says is believed once a link has proved it.

    Without a secret all must be on one machine, and listen on its loopback alone: whoever reaches
    a process could take part.

    Args:
        patience: seconds to wait for the others.
        address: where they meet; what the environment says when None.
    """

    def __init__(self, patience: float = 120.0, address: Address | None = None) -> None:
        if not patience > 0:
            raise KnobError(f"`timeout` must be a positive number of seconds, got {patience}")
        self.address, self.patience = address or Address.told(), patience
        path = os.environ.get(SECRET_FILE)
        self.secret = read_secret(Path(path)) if path else None
        if self.secret is None and not self.address.on_one_machine:
            raise KnobError(
                f"processes that meet at {self.address.address} need a secret, since whoever"
                f" reaches them could take part: put the same in a file for each process, and name"
                f" it in {SECRET_FILE}; or keep all on one machine, with MASTER_ADDR=127.0.0.1"
            )
        self.number = _met[self.address] = _met.get(self.address, -1) + 1
        if self.address.keeps_notes and self.address not in _kept:
            _kept[self.address] = _keep(self.address)
        self.listener: socket.socket | None = None  # once the notes were reached
        self._store: Store | None = None
        self._lock = threading.Lock()

    def leave_note(self) -> None:
        """Say where this process listens, again where the notes were lost or altered."""
        if self.where(self.address.rank) != self.listening:
            with self._lock, contextlib.suppress(OSError, dist.DistError):
                self._store = self._store or self._reached()
                self._store.set(str(self.address.rank), json.dumps(self.listening))

    @property
    def listening(self) -> tuple[str, int] | None:
        """Where this process listens; None before the notes were reached."""
        return None if self.listener is None else self.listener.getsockname()[:2]

    def where(self, rank: int) -> tuple[str, int] | None:
        """Return where a process says it listens; None where it has not said so, or not so far."""
        with self._lock:
            try:
                store = self._store = self._store or self._reached()
                if not store.check([str(rank)]):
                    return None
                note: Any = json.loads(store.get(str(rank)))
                host, port = note
            except (OSError, dist.DistError):  # they are looked for anew next time
                self._store = None
                return None
            except (ValueError, TypeError, RecursionError):  # a note that is nobody's
                return None
        fits = isinstance(host, str) and type(port) is int and 0 < port < 2**16
        return (host, port) if fits and (self.secret is not None or is_loopback(host)) else None

    def _reached(self) -> Store:
        """Return the notes, in which this process says where it listens."""
        at = self.address
        # torch would try for long to reach who does not answer, and write much about it
        with socket.create_connection((at.address, at.port), REACHING.total_seconds()) as reached:
            ours = "127.0.0.1" if at.on_one_machine else reached.getsockname()[0]
        store = TCPStore(
            at.address, at.port, is_master=False, timeout=REACHING, wait_for_workers=False
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        notes = PrefixStore(f"coterie {self.number} {restart}", store)
        if self.listener is None:
            family = socket.AF_INET6 if ":" in ours else socket.AF_INET
            self.listener = socket.create_server((ours, 0), family=family, backlog=128)
            self.listener.settimeout(0.1)
        notes.set(str(at.rank), json.dumps(self.listening))
        return notes


def is_loopback(host: str) -> bool:
    """Say whether an address is of this machine alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.1")
        (True, False)
    """
    return host == "::1" or host.startswith("127.")


def _looked_up(address: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return address


def _keep(at: Address) -> Store:
    """Open the notes, at the address given and at no other."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            at.address, at.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise KnobError(
            "MASTER_ADDR and MASTER_PORT must be an address of user 0's machine and a free port"
            f" there, got {at.address}:{at.port} ({error.strerror or error})"
        ) from error
    if is_loopback(str(place[0])) and at.address not in (place[0], "localhost"):
        logger.warning(
            "%s is %s here: processes on other machines cannot reach it", at.address, place[0]
        )
    settings: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store: Store = TCPStore(
        at.address, at.port, at.size, is_master=True, timeout=REACHING, **settings
    )
    return store
