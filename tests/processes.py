"""Peers in real processes on this machine, for the engines' tests: forked, bounded in time, gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there

import coterie
from coterie.engines import MakeEngine, torch_group
from coterie.engines.torch_distributed import TorchDistributed, serve

PATIENCE = 30.0
"""Seconds after which what should have happened has not."""


def launched(size: int) -> tuple[Any, list[dict[str, str]]]:
    """Return a place for notes, as torchrun keeps it, and the variables that torchrun sets for each rank."""
    notes = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(notes.port), "WORLD_SIZE": str(size)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return notes, [shared | {"RANK": str(rank)} for rank in range(size)]


def forked(work: Callable[[], object], quiet: bool = True) -> int:
    """Do some work in a child, and return its id; the child ends with 0, or with 1 after an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads, which Python warns of, are not used there
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except coterie.errors.CoterieError as error:
        if not quiet:
            print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # whatever happened: no child runs the parent's code


def ended(child: int, patience: float = PATIENCE) -> int:
    """Wait for a child, and return how it ended; one that does not end is killed, and an error."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"process {child} did not end within {patience:g} s")


@contextmanager
def torch_distributed(**settings: Any) -> Iterator[MakeEngine]:
    """Give a function that makes `TorchDistributed` engines whose peers are forked from this process."""
    children: list[int] = []
    engines: list[TorchDistributed] = []
    kept: list[Any] = []

    def stop() -> None:
        while engines:
            engines.pop().close()
        while children:
            ended(children.pop())
        torch_group._stores.clear()
        kept.clear()

    def make(
        model: nn.Module, loss: Any, me: coterie.User, peers: Sequence[coterie.User], *, batch_size: int, seed: int
    ) -> coterie.Engine:
        stop()
        pipes = []
        for peer in peers:
            read, write = os.pipe()

            def work(peer: coterie.User = peer, read: int = read) -> None:
                os.environ.update(json.loads(os.read(read, 10_000)))
                serve(model, loss, peer, timeout=PATIENCE)

            children.append(forked(work))
            os.close(read)
            pipes.append(write)
        place, (mine, *theirs) = launched(1 + len(peers))  # only now: its thread would not survive a fork
        kept.append(place)
        for pipe, variables in zip(pipes, theirs, strict=True):
            os.write(pipe, json.dumps(variables).encode())
            os.close(pipe)
        with mock.patch.dict(os.environ, mine):
            try:
                keywords = {"batch_size": batch_size, "seed": seed, "timeout": PATIENCE} | settings
                engines.append(TorchDistributed(model, loss, me, peers, **keywords))
            except BaseException:
                for child in children:
                    os.kill(child, signal.SIGKILL)
                raise
        return engines[-1]

    try:
        yield make
    finally:
        stop()
