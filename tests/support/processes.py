"""Peers in real processes on this machine, for the engines' tests: forked, bounded in time, gone afterwards."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.waiting import ENOUGH
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there

import coterie
from coterie.engines.engine import MakeEngine
from coterie.engines.processes.engine import TorchDistributed, serve
from coterie.engines.processes.processes import Processes, RemoteProcess
from coterie.errors import PeerLost

PATIENCE = ENOUGH
"""Seconds after which what should have happened has not."""


class Failed(Exception):  # noqa: N818  # it says what happened
    """What should make a child end with 1, without a word."""


def forked(work: Callable[[], object]) -> int:
    """Do some work in a child, and return its id; the child ends with 0, or with 1 after an error."""
    with warnings.catch_warnings():
        # threads, which Python warns of, are not used there
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        if not isinstance(error, Failed | coterie.errors.CoterieError):
            traceback.print_exc()
    finally:
        os._exit(status)  # whatever happened: no child runs the parent's code


def ended(child: int, patience: float = PATIENCE) -> int:
    """Wait for a child, and return how it ended; one that does not end is killed, and an error."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"process {child} did not end within {patience:g} s")


class Started:
    """A process for each rank from `first` on, and one that keeps their notes, as torchrun does.

    Nothing with a thread is left in this process, since threads do not survive the next fork.

    Args:
        works: what each rank does.
        first: the rank of the first of them.
        size: how many ranks there should be, where it is another number.
        kept_by_0: rank 0 keeps the notes.
    """

    def __init__(
        self,
        works: Sequence[Callable[[], object]],
        first: int = 0,
        *,
        size: int | None = None,
        kept_by_0: bool = False,
    ) -> None:
        self.variables = {
            "MASTER_ADDR": "127.0.0.1",
            "RANK": "0",
            "WORLD_SIZE": str(size or first + len(works)),
        }
        self.notes: int | None = None
        if kept_by_0:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.variables |= {"MASTER_PORT": str(free.getsockname()[1])}
        else:
            self.variables |= {
                "MASTER_PORT": self._keep_notes(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        self.children = [self.start(rank, work) for rank, work in enumerate(works, first)]

    def _keep_notes(self) -> str:
        """Start a process that keeps the notes, and return its port."""
        parent, (read, write) = os.getpid(), os.pipe()

        def keep_notes() -> None:
            notes = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(notes.port).encode())
            while os.getppid() == parent:
                time.sleep(0.2)

        self.notes = forked(keep_notes)
        port = os.read(read, 9).decode()
        os.close(read)
        os.close(write)
        return port

    def start(self, rank: int, work: Callable[[], object]) -> int:
        """Start a process for a rank, and return its id."""

        def child() -> None:
            os.environ.update(self.variables | {"RANK": str(rank)})
            work()

        return forked(child)

    def end(self, patience: float = PATIENCE) -> list[int]:
        """Wait for all, and return how each ended."""
        try:
            return [ended(child, patience) for child in self.children]
        finally:
            if self.notes is not None:
                os.kill(self.notes, signal.SIGKILL)
                os.waitpid(self.notes, 0)

    def kill(self) -> None:
        """Kill all."""
        for child in self.children:
            os.kill(child, signal.SIGKILL)


class Alone:
    """A process of rank 1 with nobody else: what user 0 says is given, what it says is kept."""

    rank, longest = 1, 0

    def __init__(self, heard: Mapping[str, Any]) -> None:
        self.heard, self.said, self.asked = dict(heard), dict[str, Any](), list[Any]()
        self.mates = {"user 0": RemoteProcess(0), "b": RemoteProcess(2)}
        self.mates["user 0"].name, self.mates["b"].name = "user 0", "b"

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def of_rank(self, rank: int) -> RemoteProcess:
        return self.mates["user 0" if rank == 0 else "b"]

    def hear(self, rank: int, subject: str, **entries: Any) -> Any:
        if subject not in self.heard:
            raise PeerLost(f"rank {rank} did not come")
        self.of_rank(rank).said[subject] = self.heard[subject]
        return Processes.hear(self, rank, subject, **entries)  # type: ignore[arg-type]  # as there

    def say(self, subject: str, content: Any) -> None:
        self.said[subject] = content

    def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> None:
        self.asked.append((names, method, arguments))

    _heard, rendezvous = threading.Condition(), SimpleNamespace(patience=0.1)


@contextmanager
def torch_distributed(
    serving: Sequence[Callable[..., object]] = (), **settings: Any
) -> Iterator[MakeEngine]:
    """Give a function that makes `TorchDistributed` engines whose peers are forked from this process.

    Args:
        serving: for each peer, what it does with (model, loss, peer) instead of `serve`.
        settings: the engine's.
    """
    engines: list[TorchDistributed] = []
    running: list[Started] = []

    def stop() -> None:
        while engines:
            engines.pop().close()
        while running:
            running.pop().end()

    def make(
        model: nn.Module,
        loss: Any,
        me: coterie.User,
        peers: Sequence[coterie.User],
        *,
        batch_size: int,
        seed: int,
    ) -> coterie.Engine:
        stop()
        timeout = settings.get("timeout", PATIENCE)
        serves = serving or [functools.partial(serve, timeout=timeout)] * len(peers)
        works = [
            functools.partial(do, model, loss, peer) for do, peer in zip(serves, peers, strict=True)
        ]
        running.append(Started(works, first=1))
        with mock.patch.dict(os.environ, running[-1].variables):
            try:
                keywords = {"batch_size": batch_size, "seed": seed, "timeout": timeout} | settings
                engines.append(TorchDistributed(model, loss, me, peers, **keywords))
            except BaseException:
                running[-1].kill()
                raise
        return engines[-1]

    try:
        yield make
    finally:
        stop()
