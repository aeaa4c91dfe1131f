"""What a peer has given and refused, in a file that processes share; and the secret that lies beside it."""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coterie.errors import KnobError
from coterie.recording.chained_lines import ChainedLines
from coterie.recording.files import writing

MAX_LOGGED_CHARACTERS = 200
"""How much of a text that comes from elsewhere, or of an error, a line holds."""


class Ledger:
    """A log of requests, one JSON object a line, that says how many gradients were given.

    Processes that share the file count each other's: a line is added under a lock, after those of the others were
    read. It is written before the gradient leaves, so that a process that is killed has counted what it gave. An
    altered or lost line is told. Without a path nothing is written, and what this process gave is counted.

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
        self.path, self._given = path, 0
        remedy = "it counts what was given: put it back as it was"
        self._lines = None if path is None else ChainedLines(path, remedy, counted=True)

    @property
    def given(self) -> int:
        """How many gradients were given, over every run that the file knows of."""
        if self.path is not None and self.path.exists():
            with self._alone():
                pass
        return self._given

    def give(self, gradients: int = 1, *, at_most: int | None = None, **line: Any) -> bool:
        """Write down that so many gradients are given, and say whether they may be: `at_most` in all."""
        with self._alone():
            if at_most is not None and self._given + gradients > at_most:
                return False
            self._write({"gradients": gradients, **line})
            self._given += gradients
        return True

    def note(self, **line: Any) -> None:
        """Write down something else: a refusal, an error."""
        with self._alone():
            self._write(line)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes out, and count what they have given."""
        if self.path is None or self._lines is None:
            yield
            return
        with writing(self.path), open(self.path, "ab", opener=_owner_only) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file lets it go
            self._given += sum(int(line.get("gradients", 0)) for line in self._lines.read_on())
            yield

    def _write(self, line: dict[str, Any]) -> None:
        if self._lines is not None:
            shown = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}
            short = {k: v[:MAX_LOGGED_CHARACTERS] if isinstance(v, str) else v for k, v in shown.items()}
            self._lines.append(short)  # JSON escapes line ends and control characters


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
