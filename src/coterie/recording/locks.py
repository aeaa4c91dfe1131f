"""Locks of open files, which the operating system frees when the process ends."""

import contextlib
import errno
import importlib
import os
from types import ModuleType


def _module(name: str) -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


fcntl = _module("fcntl")  # of Unix
msvcrt = _module("msvcrt")  # of Windows

_FAR = 1 << 30
"""The byte that is locked on Windows, behind what a file holds.

What is locked there cannot be read.
"""


def lock_for_process(file: int) -> None:
    """Lock a file for this process and none that it forks.

    An `OSError` where another has it or there are none.
    """
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _lock_on_windows(file, "LK_NBLCK")


def wait_for_lock(file: int) -> None:
    """Lock a file until it is closed; wait while another process or thread has it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    else:
        _lock_on_windows(file, "LK_LOCK")


def _lock_on_windows(file: int, how: str) -> None:
    if msvcrt is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    os.lseek(file, _FAR, os.SEEK_SET)
    msvcrt.locking(file, getattr(msvcrt, how), 1)
