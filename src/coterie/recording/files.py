"""Files that are read again.

Written whole or not at all, with a SHA-256, and read without running code.

Whatever coterie reads again goes through here, or through `ChainedLines` where it grows line by
line. What is not as it was written, and what cannot be read or written, is a `FileError` that names
the file and the remedy.
"""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from coterie.errors import FileError

DIGITS = 64
"""How long a SHA-256 is, in hexadecimal."""

JSON_HEAD, JSON_END = b'{"sha256": "', b'",'
"""What stands before and after the digest of a JSON file.

The file is an object whose first entry it is.
"""

MOST = 2**34
"""How many bytes a file may have that is read as a whole."""
MOST_TEXT = 2**26
"""How many a file of settings or results may have."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sha256(data: bytes | memoryview) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's error while a file is written into a `FileError` that names it and the remedy."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        room = "make its folder one that can be written to"
        if error.errno in _NO_ROOM:
            room = "make room on its disk"
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}); {room}, or name another"
        ) from error


def write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file, so that at any moment, also after a power cut, it is the old one or the new one, whole.

    It is written beside its place, flushed to the disk and renamed; the folder is made where it is
    not there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(Path(folder) / "new" / "note.txt", b"whole")
        ...     (Path(folder) / "new" / "note.txt").read_text()
        'whole'
    """
    fresh = path.with_name(f"{path.name}.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            fresh.unlink(missing_ok=True)  # a part of a file is of no use, and takes room
            raise
        fresh.replace(path)
        sync(path.parent)  # the new name is on the disk too


def sync(path: Path) -> None:
    """Make sure that what a file holds, or which names a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path, remedy: str, error: type[FileError] = FileError) -> Iterator[None]:
    """Turn an operating system's error while a file is read into a `FileError` that names it and the remedy."""
    try:
        yield
    except FileError:
        raise
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}); {remedy}") from problem


def read(path: Path, remedy: str, error: type[FileError] = FileError, *, most: int = MOST) -> bytes:
    """Return what a file holds; what is no plain file, or larger than `most` bytes, is not read."""
    with reading(path, remedy, error), plain_file(path, remedy, error) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise error(
                f"{path} has {size} bytes, more than the {most} that one may have; {remedy}"
            )
        return file.read()


@contextmanager
def plain_file(path: Path, remedy: str, error: type[FileError] = FileError) -> Iterator[BinaryIO]:
    """Open a file for reading, unless it is a device, a pipe or a folder: those may have no end."""
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise error(f"{path} is no plain file; {remedy}")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def checked(
    path: Path,
    head: bytes,
    end: bytes,
    data: bytes,
    *,
    remedy: str,
    error: type[FileError] = FileError,
) -> bytes:
    """Return what follows the digest in a file's data, which stands between head and end, once it is right."""
    start = len(head) + DIGITS + len(end)
    body = data[start:]
    digest, written = sha256(body), data[len(head) : len(head) + DIGITS]
    if data[:start] != head + digest.encode() + end:
        raise error(
            f"{path} is damaged (truncated or altered): its SHA-256 is {digest[:12]}… instead of "
            f"{written[:12].decode('ascii', 'replace')}…; {remedy}"
        )
    return body


def check_inflated(data: bytes, most: int) -> None:
    """Refuse a ZIP archive that would take more than so many bytes, before it is read; a `ValueError`.

    Example:
        >>> import io
        >>> with zipfile.ZipFile(held := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        ...     archive.writestr("a", b" " * 10**6)
        >>> check_inflated(held.getvalue(), 10**5)
        Traceback (most recent call last):
        ...
        ValueError: it inflates to 1000000 bytes, more than the 100000 that it may have
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(each.file_size for each in archive.infolist())
    if size > most:
        raise ValueError(f"it inflates to {size} bytes, more than the {most} that it may have")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, with its SHA-256 as the first entry.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "settings.json"
        ...     write_json(path, {"steps": 60})
        ...     print(read_json(path, "begin again"), "sha256" in json.loads(path.read_text()))
        ...     _ = path.write_text(path.read_text().replace("60", "90"))
        ...     read_json(path, "begin again")  # doctest: +ELLIPSIS +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        coterie.errors.FileError: settings.json is damaged (truncated or altered): …; begin again
    """
    body = json.dumps(content, indent=1)[1:].encode()
    write(path, JSON_HEAD, sha256(body).encode(), JSON_END, body)


def read_json(path: Path, remedy: str, needed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the object that `write_json` wrote, without its digest.

    It must have the entries that are needed.
    """
    data = read(path, remedy, most=MOST_TEXT)
    if not data.startswith(JSON_HEAD):
        raise FileError(
            f"{path} carries no SHA-256: it is damaged, or of an earlier version of coterie;"
            f" {remedy}"
        )
    body = checked(path, JSON_HEAD, JSON_END, data, remedy=remedy)
    try:
        content = json.loads(b"{" + body)
    except (
        ValueError,
        RecursionError,
    ) as error:  # not written by `write_json`, in spite of its digest
        raise FileError(f"{path} is not JSON ({error}); {remedy}") from error
    if missing := [name for name in needed if name not in content]:
        raise FileError(
            f"{path} has no entry {missing[0]!r}: it is of another version of coterie; {remedy}"
        )
    return dict(content)


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


def _lock_on_windows(file: int, mode: str) -> None:
    if msvcrt is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    os.lseek(file, _FAR, os.SEEK_SET)
    msvcrt.locking(file, getattr(msvcrt, mode), 1)
