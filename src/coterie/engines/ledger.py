"""What a peer has given and refused, in a file that processes share; and the secret that lies beside it."""

import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from coterie.errors import CoterieError, KnobError

MAX_LOGGED_CHARACTERS = 200
"""How much of a text that comes from elsewhere, or of an error, a line holds."""

_CHAIN = b', "chain": "'


class Ledger:
    """A log of requests, one JSON object a line, that says how many gradients were given.

    Processes that share the file count each other's: a line is added under a lock, after those of the others were
    read. It is written before the gradient leaves, so that a process that is killed has counted what it gave. Each
    line holds a digest of itself and of the one before, so that an altered or lost line is told. Without a path
    nothing is written, and what this process gave is counted.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> one, other = (Ledger(Path(folder.name) / "requests.jsonl") for _ in range(2))
        >>> one.give(2, at_most=3, caller="user 0"), other.give(2, at_most=3, caller="user 0")
        (True, False)
        >>> other.given
        2
        >>> folder.cleanup()
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self._given, self._read_to, self._chain = path, 0, 0, ""

    @property
    def given(self) -> int:
        """How many gradients were given, over every run that the file knows of."""
        if self.path is not None and self.path.exists():
            with self._locked():
                pass
        return self._given

    def give(self, gradients: int = 1, *, at_most: int | None = None, **line: Any) -> bool:
        """Write down that so many gradients are given, and say whether they may be: `at_most` in all."""
        with self._locked() as file:
            if at_most is not None and self._given + gradients > at_most:
                return False
            self._write(file, {"gradients": gradients, **line})
            self._given += gradients
        return True

    def note(self, **line: Any) -> None:
        """Write down something else: a refusal, an error."""
        with self._locked() as file:
            self._write(file, line)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO | None]:
        """Keep other processes out, and count what they have given."""
        if self.path is None:
            yield None
            return
        with open(self.path, "a+b", opener=_owner_only) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file lets it go
            self._read(file)
            yield file

    def _read(self, file: BinaryIO) -> None:
        """Count what was added; a last line that was cut by a kill is cut off: nothing left after it."""
        if file.seek(0, os.SEEK_END) < self._read_to:
            raise self._damaged("it has become shorter")
        file.seek(self._read_to)
        whole, end, cut = file.read().rpartition(b"\n")
        for text in whole.splitlines():
            body, _, chain = text.rpartition(_CHAIN)
            if chain != self._digest(body).encode() + b'"}':
                raise self._damaged(f"{text[:60]!r} is not what was written there")
            self._chain = self._digest(body)
            self._given += int(json.loads(body + b"}").get("gradients", 0))
        self._read_to += len(whole + end)
        if cut:
            file.truncate(self._read_to)

    def _write(self, file: BinaryIO | None, line: dict[str, Any]) -> None:
        if file is None:
            return
        shown = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}
        short = {k: v[:MAX_LOGGED_CHARACTERS] if isinstance(v, str) else v for k, v in shown.items()}
        body = json.dumps(short)[:-1].encode()  # line ends and control characters are escaped
        chain = self._digest(body)
        text = body + _CHAIN + chain.encode() + b'"}\n'
        file.write(text)
        file.flush()
        self._chain, self._read_to = chain, self._read_to + len(text)

    def _digest(self, body: bytes) -> str:
        return hashlib.blake2b(self._chain.encode() + body, digest_size=8).hexdigest()

    def _damaged(self, what: str) -> CoterieError:
        return CoterieError(f"{self.path} is damaged: {what}. It counts what was given: put it back as it was")


def kept_secret(path: Path) -> bytes:
    """Return a random secret that is kept in a file of its owner's alone, and made where there is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = kept_secret(Path(folder) / "secret")
        ...     first == kept_secret(Path(folder) / "secret"), len(first)
        (True, 64)
    """
    if not path.exists():
        made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(made, "xb", opener=_owner_only) as file:
            file.write(secrets.token_hex(32).encode())
        with suppress(FileExistsError):  # another process was faster, and its secret counts
            os.link(made, path)
        made.unlink()
    return read_secret(path)


def read_secret(path: Path, at_least: int = 16) -> bytes:
    """Return what is in a file that nobody but its owner may read."""
    try:
        mode, content = path.stat().st_mode, path.read_bytes().strip(b"\r\n")
    except OSError as error:
        raise KnobError(f"the secret {path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise KnobError(f"others may read the secret {path}; `chmod 600 {path}`, or make a new one")
    if len(content) < at_least:
        raise KnobError(f"the secret {path} must have at least {at_least} bytes, got {len(content)}")
    return content


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
