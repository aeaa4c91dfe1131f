"""Files that are read again.

Written whole or not at all, with a SHA-256, and read without running code.

Whatever coterie reads again goes through here; what grows line by line is `ChainedLines`. What is
not as it was written, and what cannot be read or written, is a `FileError` that names the file and
the remedy.
"""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        sync_path(path.parent)  # the new name is on the disk too


def sync_path(path: Path) -> None:
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


_CHAIN = re.compile(rb'"chain": "([0-9a-f]{12})"\}')
_LENGTH = len('"chain": "0123456789ab"}')
_DIGITS = 12


class ChainedLines:
    """JSON objects, one a line, of which none can be altered or lost without being noticed.

    The last entry of a line, `chain`, is a hash over the rest of it and the chain of the line
    before. A line that was altered, and one before which a line is missing, is a `FileError` with
    its number. A last line without an end, as a kill leaves it, is left out when the file is read,
    and overwritten when a line is added. Lines that are missing at the end are told where they are
    counted, in a file beside; else what must be there has to be known from elsewhere.

    One process writes at a time; another may `read_on` and then write, where a lock keeps them
    apart.

    Args:
        path: the file.
        remedy: what to do where it is damaged.
        counted: keep the number of lines and the last chain in a file beside, whose name ends in
            `.count`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = ChainedLines(Path(folder) / "ledger.jsonl", "ask whoever wrote it")
        ...     lines.write([{"step": 0}])
        ...     lines.append({"step": 1})
        ...     print(lines.path.read_text(), end="")
        ...     lines.read()
        {"step": 0, "chain": "2437a3aad914"}
        {"step": 1, "chain": "8ad84e22ea7b"}
        [{'step': 0}, {'step': 1}]
    """

    def __init__(self, path: Path, remedy: str, *, counted: bool = False) -> None:
        self.path, self.remedy = path, remedy
        self.count_path = path.with_name(f"{path.name}.count") if counted else None
        # the chain at the last whole line, and where that ends in the file
        self._last, self._end = "", 0
        self._count = 0  # of whole lines up to there
        self._has_synced = False

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the file anew, whole or not at all."""
        last, texts = "", list[bytes]()
        for line in lines:
            text, last = _chained(line, last)
            texts.append(text)
        whole = b"".join(texts)
        write(self.path, whole)
        self._last, self._end, self._count = last, len(whole), len(texts)
        self._write_count()

    def append(self, line: Mapping[str, Any], *, sync: bool = False) -> None:
        """Add a line to the file, which must be as this object has read or written it.

        `sync`: to the disk.
        """
        text, last = _chained(line, self._last)
        if not self._count:
            self._write_count()  # so that there is never a line without a count
        with writing(self.path):
            # one that was deleted is not begun anew without its lines
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                self._drop_cut_line(descriptor)
                if os.pwrite(descriptor, text, self._end) < len(text):
                    raise OSError("only a part of a line was written")
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._last, self._end, self._count = last, self._end + len(text), self._count + 1
        self._write_count()
        # the files' names too; later counts may be lost, being too small then
        if sync and not self._has_synced:
            with writing(self.path):
                for path in (self.count_path, self.path.parent):
                    if path is not None:
                        sync_path(path)
            self._has_synced = True

    def read(self) -> list[dict[str, Any]]:
        """Return all whole lines, without their chains."""
        self._last, self._end, self._count = "", 0, 0
        return self.read_on()

    def read_on(self) -> list[dict[str, Any]]:
        """Return the whole lines that others have added since this object last read or wrote."""
        data = self._new_data()
        *whole, rest = data.split(b"\n")
        last, lines, chains = self._last, [], {self._count: self._last}
        for number, text in enumerate(whole, self._count + 1):
            line, last = self._checked_line(text, last, number)
            lines.append(line)
            chains[number] = last
        # a whole line whose end was altered
        if (more := _CHAIN.search(rest)) and more.end() < len(rest):
            raise self._damaged(self._count + len(whole) + 1)
        self._check_count(chains)
        self._last = last
        self._end = self._end + len(data) - len(rest)
        self._count = self._count + len(whole)
        return lines

    def _new_data(self) -> bytes:
        """Return what stands after the lines that this object knows."""
        with (
            reading(self.path, self.remedy),
            plain_file(self.path, self.remedy) as file,
        ):
            if (size := file.seek(0, os.SEEK_END)) < self._end:
                raise FileError(f"{self.path} is damaged: it has become shorter; {self.remedy}")
            if size > MOST:
                raise FileError(
                    f"{self.path} has {size} bytes, more than the {MOST} one may have;"
                    f" {self.remedy}"
                )
            file.seek(self._end)
            return file.read()

    def _write_count(self) -> None:
        if self.count_path is None:
            return
        with writing(self.count_path):
            descriptor = os.open(self.count_path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # in one piece, also where it is killed
                os.pwrite(descriptor, _counted(self._count, self._last), 0)
            finally:
                os.close(descriptor)

    def _check_count(self, chains: Mapping[int, str]) -> None:
        """Refuse a file that has fewer lines than were counted, by the chains of those that are there."""
        if self.count_path is None or (max(chains) == 0 and not self.count_path.exists()):
            return
        written = read(self.count_path, self.remedy)
        count = int(written[:_DIGITS]) if written[:_DIGITS].isdigit() else -1
        if count > max(chains):
            raise FileError(
                f"{self.path} is damaged: {self.count_path} tells of {count} lines, and"
                f" {max(chains)} are there; {self.remedy}"
            )
        if count < 0 or (count in chains and written != _counted(count, chains[count])):
            raise FileError(
                f"{self.count_path} is damaged, or not that of {self.path.name}; {self.remedy}"
            )

    def sync(self) -> None:
        """Make sure that all lines are on the disk, not only with the operating system."""
        with writing(self.path):
            sync_path(self.path)

    def _drop_cut_line(self, descriptor: int) -> None:
        """Cut off what a kill or a full disk left of a line.

        Whatever else is not as expected is another's.
        """
        size = os.fstat(descriptor).st_size
        if size < self._end or b"\n" in os.pread(descriptor, size - self._end, self._end):
            raise FileError(
                f"{self.path} was changed by somebody else while it was written; {self.remedy}"
            )
        if size > self._end:
            os.ftruncate(descriptor, self._end)

    def _checked_line(self, text: bytes, last: str, number: int) -> tuple[dict[str, Any], str]:
        """Return a line and its chain, if it is as it was written and follows the line before."""
        chain = _CHAIN.fullmatch(text[-_LENGTH:])
        if chain is None and number == 1:
            raise FileError(
                f"line 1 of {self.path} carries no chain: it is no file of coterie, damaged, or of"
                f" an earlier version; {self.remedy}"
            )
        if chain is None or _hash(text[:-_LENGTH], last) != chain[1].decode():
            raise self._damaged(number)
        try:
            line = json.loads(text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # not written by this class, in spite of its chain
            raise FileError(
                f"line {number} of {self.path} is not JSON ({error}); {self.remedy}"
            ) from error
        return line, line.pop("chain")

    def _damaged(self, number: int) -> FileError:
        return FileError(
            f"{self.path} is damaged: its line {number} was altered, or a line before it is lost;"
            f" {self.remedy}"
        )


def _counted(count: int, last: str) -> bytes:
    """Return what the file with the count holds, always of the same length."""
    return f"{count:0{_DIGITS}d} {last:0>12}\n".encode()


def _hash(body: bytes, last: str) -> str:
    return hashlib.blake2b(last.encode() + body, digest_size=6).hexdigest()


def _chained(line: Mapping[str, Any], last: str) -> tuple[bytes, str]:
    """Return the text of a line that follows a chain, and the chain at it."""
    body = json.dumps(line)[:-1].encode() + (b", " if line else b"")
    chain = _hash(body, last)
    return body + f'"chain": "{chain}"}}\n'.encode(), chain


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
