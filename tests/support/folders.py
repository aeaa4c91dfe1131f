"""Folders that fail a run: another process has one, or nothing can be written to it for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.processes import ended, forked

from coterie.recording.claim import claimed
from coterie.training.run import Step


@contextmanager
def claimed_elsewhere(folder: Path) -> Iterator[int]:
    """Let another process claim a folder, and give its id; it is killed at the end, if it is still there."""
    read, write = os.pipe()

    def hold() -> None:
        with claimed(folder):
            os.write(write, b"!")
            signal.pause()

    child = forked(hold)
    os.read(read, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        ended(child)
        os.close(read)
        os.close(write)


class Disk:
    """A disk on which nothing can be written from one step of a run to another, which is told of the steps.

    Args:
        number: the error, as `errno.ENOSPC`.
        first: the first step after which writing fails.
        last: the last one.
        calls: the functions of `os` that fail: `pwrite` adds a line to a record, `fsync` is part of
            all else.
    """

    def __init__(
        self, number: int, first: int, last: int, calls: Sequence[str] = ("pwrite", "fsync")
    ) -> None:
        self.number, self.first, self.last, self.calls = number, first, last, calls
        self.failures = self.step = 0

    def follow(self, step: Step) -> None:
        """Be told of a step; a hook."""
        self.step = step.step

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let everything be written to this disk."""
        with ExitStack() as stack:
            for call in self.calls:
                stack.enter_context(mock.patch.object(os, call, self._failing(getattr(os, call))))
            yield

    def _failing(self, works: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if self.first <= self.step <= self.last:
                self.failures += 1
                raise OSError(self.number, os.strerror(self.number))
            return works(*arguments)

        return call
