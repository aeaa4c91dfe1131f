"""A folder that one process at a time writes to."""

import errno
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from coterie.errors import FileError, KnobError
from coterie.recording import files
from coterie.recording.files import lock_for_process

LOCK = "lock"
"""The file in a folder that the operating system locks; it is there while the folder is claimed."""

T = TypeVar("T")
_BETWEEN_TRIES = 0.2
_claims: dict[Path, "Claim"] = {}
_changing = threading.Lock()


@contextmanager
def claimed(folder: Path, patience: float = 0.0) -> Iterator["Claim"]:
    """Keep other processes, and other threads of this one, out of a folder, which is made where it is not there.

    The operating system holds the lock, and frees it when the process ends, however that happens. A
    thread may claim a folder again that it has claimed.

    Args:
        folder: the folder.
        patience: how many seconds to wait for another process; then it is a `FileError` that names
            the process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, claimed(Path(folder)) as claim:
        ...     print(sorted(path.name for path in Path(folder).iterdir()))
        ['lock']
    """
    claim = _claim(folder, patience)
    try:
        yield claim
    finally:
        claim.release()


class Claim:
    """A folder that this thread writes to; made by `claimed`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner, self.times = folder, (os.getpid(), threading.get_ident()), 0
        # what could not be written when it was last tried, and why
        self.unwritten: dict[str, FileError] = {}
        self.key = folder.resolve()
        self.made = False  # whether the folder was not there before
        self._file: int | None = None
        self._inode = 0

    def acquire(self) -> None:
        """Lock the folder, or say who has."""
        path = self.folder / LOCK
        self.made = self.made or not self.folder.exists()
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    lock_for_process(file)
                except OSError as error:
                    os.lseek(file, 0, os.SEEK_SET)
                    holder = os.read(file, 200).decode("utf-8", "replace") or "another process"
                    os.close(file)
                    if error.errno in (errno.EAGAIN, errno.EACCES):
                        raise self.in_use(holder) from error
                    return warnings.warn(
                        f"{self.folder} is on a file system without locks ({error.strerror}): let"
                        " no second run write to it",
                        stacklevel=2,
                    )
                if _is_at(file, path):
                    break
                os.close(file)  # whoever had it removed it meanwhile
            self._inode = self.folder.stat().st_ino
        self._file = file
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def keep(self) -> None:
        """Make sure that the folder is there, and still this process's.

        One that was deleted is made again.
        """
        if self._file is None or _is_at(self._file, self.folder / LOCK):
            return
        ours = self.folder.exists() and self.folder.stat().st_ino == self._inode
        if not ours:
            warnings.warn(
                f"{self.folder} was deleted while a run wrote to it, and is written anew",
                stacklevel=4,
            )
            if self.folder.exists() and any(self.folder.iterdir()):
                raise FileError(
                    f"{self.folder} was deleted, and holds something else now; name another folder"
                )
        os.close(self._file)
        self._file = None
        self.acquire()

    def attempt(self, what: str, write: Callable[[], T]) -> T | None:
        """Write something of a run, and return what that returns.

        Where it fails, on a full disk for example, a warning says so, once, and the run goes on:
        what it has computed is in memory, and later attempts bring all of it.
        """
        try:
            self.keep()
            result = write()
        except FileError as error:
            if what not in self.unwritten:
                warnings.warn(
                    f"{error}. The run goes on in memory; its {what} will be written when that can"
                    " be done again",
                    stacklevel=4,
                )
            self.unwritten[what] = error
            return None
        self.unwritten.pop(what, None)
        return result

    def release(self) -> None:
        """Let the folder go, once for every time that it was claimed."""
        with _changing:
            self.times -= 1
            if self.times or self.owner[0] != os.getpid():  # a forked process has no lock
                return
            _claims.pop(self.key, None)
        if self._file is not None:
            with suppress(OSError):
                if _is_at(self._file, self.folder / LOCK):
                    (self.folder / LOCK).unlink()
                if self.made:
                    self.folder.rmdir()  # which fails unless nothing was written to it
            os.close(self._file)

    def in_use(self, holder: str) -> FileError:
        """Return the error for one who comes second."""
        return FileError(
            f"{self.folder} is in use by {holder}; wait until it has ended, stop it, or name"
            " another folder"
        )


def _claim(folder: Path, patience: float) -> Claim:
    if folder.exists() and not folder.is_dir():
        raise KnobError(f"`out` must be a folder, {str(folder)!r} is a file; name another")
    until, claim = time.monotonic() + patience, Claim(folder)
    with _changing:
        before = _claims.get(claim.key)
        if before is not None and before.owner[0] == os.getpid():
            if before.owner != claim.owner:
                raise claim.in_use("another thread of this process")
            before.times += 1
            return before
        _claims[claim.key] = claim
        claim.times = 1
    try:
        _wait_for(claim, until)
    except BaseException:
        with _changing:
            _claims.pop(claim.key, None)
        raise
    return claim


def _wait_for(claim: Claim, until: float) -> None:
    while True:
        try:
            return claim.acquire()
        except FileError:
            if time.monotonic() >= until:
                raise
        time.sleep(_BETWEEN_TRIES)


def _is_at(file: int, path: Path) -> bool:
    """Say whether an open file is the one at a path."""
    try:
        there, here = path.stat(), os.fstat(file)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
