"""Where the processes of torch.distributed meet: an address, and the store that is kept there."""

import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.distributed_c10d import PrefixStore, Store

from coterie.errors import KnobError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
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
            place = cls(address, *map(int, numbers))
        except ValueError as error:
            raise KnobError(
                f"MASTER_PORT, RANK and WORLD_SIZE must be whole numbers, got {tuple(numbers)}"
            ) from error
        if place.size < 2:
            raise KnobError(
                "WORLD_SIZE is 1: user 0 would have no peers; start a process for each user"
            )
        return place

    @property
    def others(self) -> list[int]:
        """The ranks of all other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def keeps_store(self) -> bool:
        """Whether this process keeps the store: user 0 does, unless torchrun does."""
        return not self.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def keep(self, waiting: timedelta, *, all_come: bool) -> Store:
        """Open the store, keep it as long as this process lives, and return it.

        At once, or once all have come.
        """
        if self not in _kept:
            listener = _listener(self.address, self.port)
            how: dict[str, Any] = {
                "timeout": waiting,
                "wait_for_workers": all_come,
                "master_listen_fd": listener,
            }
            _kept[self] = TCPStore(self.address, self.port, self.size, is_master=True, **how)
        return _kept[self]

    def reach(self, waiting: timedelta) -> Store:
        """Return a connection of its own to the store, whoever else has come.

        `DistError` where nobody keeps it.
        """
        try:
            socket.create_connection(
                (self.address, self.port), timeout=waiting.total_seconds()
            ).close()
        except OSError as error:  # torch would try for long, and write much about it
            raise dist.DistNetworkError(
                f"nobody answers at {self.address}:{self.port}: {error}"
            ) from error
        store = TCPStore(
            self.address, self.port, is_master=False, timeout=waiting, wait_for_workers=False
        )
        return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


_kept: dict[Place, Store] = {}
"""The stores that this process keeps."""


def _listener(address: str, port: int) -> int:
    """Return what listens at the address given and at no other."""
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
            "MASTER_ADDR and MASTER_PORT must be an address of user 0's machine and a free port"
            f" there, got {address}:{port} ({error.strerror or error})"
        ) from error
    if str(place[0]).startswith("127.") and address not in (place[0], "localhost"):
        logger.warning(
            "%s is %s here: processes on other machines cannot reach it", address, place[0]
        )
    return listener.detach()


def stay_on_loopback() -> None:
    """Let gloo, too, listen on this machine alone where everybody is on it.

    Else it takes the host's address.
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if os.environ.get("MASTER_ADDR", "").startswith(("127.", "localhost")) and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
