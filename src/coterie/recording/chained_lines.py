"""A file of lines that grows: every line carries a short hash over itself and the line before."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.errors import FileError
from coterie.recording import files

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
        files.write(self.path, whole)
        self._last, self._end, self._count = last, len(whole), len(texts)
        self._write_count()

    def append(self, line: Mapping[str, Any], *, sync: bool = False) -> None:
        """Add a line to the file, which must be as this object has read or written it.

        `sync`: to the disk.
        """
        text, last = _chained(line, self._last)
        if not self._count:
            self._write_count()  # so that there is never a line without a count
        with files.writing(self.path):
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
            with files.writing(self.path):
                for path in (self.count_path, self.path.parent):
                    if path is not None:
                        files.sync(path)
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
            files.reading(self.path, self.remedy),
            files.plain_file(self.path, self.remedy) as file,
        ):
            if (size := file.seek(0, os.SEEK_END)) < self._end:
                raise FileError(f"{self.path} is damaged: it has become shorter; {self.remedy}")
            if size > files.MOST:
                raise FileError(
                    f"{self.path} has {size} bytes, more than the {files.MOST} one may have;"
                    f" {self.remedy}"
                )
            file.seek(self._end)
            return file.read()

    def _write_count(self) -> None:
        if self.count_path is None:
            return
        with files.writing(self.count_path):
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
        written = files.read(self.count_path, self.remedy)
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
        with files.writing(self.path):
            files.sync(self.path)

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
