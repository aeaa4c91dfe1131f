"""What a peer has given and refused, in a file that processes share.

And the secret that lies beside it.
"""

import hashlib
import math
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from coterie.errors import FileError, KnobError
from coterie.privacy.accountant import (
    MAX_KINDS,
    Budget,
    Event,
    dp_accounting_packages,
    epsilon_of,
    merged,
)
from coterie.privacy.privacy import Privacy
from coterie.recording.files import ChainedLines, wait_for_lock, writing

MAX_LOGGED_CHARACTERS = 200
"""How much of a text that comes from elsewhere, or of an error, a line holds."""

MAX_BACK = 60.0
"""How many seconds a clock may go back, as one that is set right does."""


class Ledger:
    """A log of requests, one JSON object a line, that says how many gradients were given.

    Processes that share the file count each other's: a line is added under a lock, after those of
    the others were read. It is written before the gradient leaves, so that a process that is killed
    has counted what it gave. An altered or lost line is told. Without a path nothing is written,
    and what this process gave is counted.

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
        # private gradients by kind; the latest time of a line
        self._spent, self._latest = Counter[Event](), 0.0
        remedy = "it counts what was given: put it back as it was"
        self._lines = None if path is None else ChainedLines(path, remedy, counted=True)

    @property
    def given(self) -> int:
        """How many gradients were given, over every run that the file knows of."""
        self._read()
        return self._given

    @property
    def spent(self) -> Counter[Event]:
        """How many of those were private, by kind."""
        self._read()
        return self._spent.copy()

    def give(self, gradients: int = 1, *, at_most: int | None = None, **line: Any) -> bool:
        """Write down that so many gradients are given, and say whether they may be.

        `at_most` in all.
        """
        with self._alone():
            if at_most is not None and self._given + gradients > at_most:
                return False
            self._write({"gradients": gradients, **line})
            self._given += gradients
        return True

    def spend(
        self, event: Event, gradients: int, why_not: Callable[[], str | None], **line: Any
    ) -> str | None:
        """Write down to the disk that so many private gradients are given, or return why they may not be.

        `why_not` looks at `given_so_far` and `spent_so_far` while no other process can add to them.
        A clock that has gone back is a reason too: the file may be an old copy of itself.
        """
        with self._alone():
            if reason := self._clock_gone_back() or why_not():
                return reason
            entry = {"gradients": gradients, "rate": event.rate, "noise": event.noise, **line}
            self._write(entry, sync=True)
            self._count(entry)
        return None

    @property
    def given_so_far(self) -> int:
        """How many gradients were given, as far as this object has read."""
        return self._given

    @property
    def spent_so_far(self) -> Mapping[Event, int]:
        """How many of those were private, by kind."""
        return self._spent

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
        if self.path.exists() and not self.path.is_file():  # to open a pipe would wait for ever
            raise FileError(
                f"{self.path} must be a plain file; put the ledger back, or name another file"
            )
        with writing(self.path), open(self.path, "ab", opener=owner_only) as file:
            wait_for_lock(file.fileno())  # closing the file lets it go
            for number, line in enumerate(self._lines.read_on(), 1):
                try:
                    self._count(line)
                except (KnobError, LookupError, TypeError, ValueError, OverflowError) as error:
                    what = (
                        f"line {number} of those added to {self.path} tells of what cannot be:"
                        f" {error}"
                    )
                    raise FileError(f"{what}; put it back as it was") from error
            yield

    def _read(self) -> None:
        """Count what other processes have given.

        Where the file is gone but not its count, that is told.
        """
        beside = None if self._lines is None else self._lines.count_path
        if any(path is not None and path.exists() for path in (self.path, beside)):
            with self._alone():
                pass

    def _count(self, line: Mapping[str, Any]) -> None:
        gradients = int(line.get("gradients", 0))
        if gradients < 0:
            raise ValueError(f"{gradients} gradients")
        self._given += gradients
        if "time" in line:
            self._latest = max(self._latest, datetime.fromisoformat(line["time"]).timestamp())
        if "noise" in line:
            self._spent[Event(line["rate"], line["noise"])] += gradients

    def _clock_gone_back(self) -> str | None:
        if time.time() > self._latest - MAX_BACK:
            return None
        return f"its clock has gone back: its log has a line of {_as_text(self._latest)}"

    def _write(self, line: dict[str, Any], *, sync: bool = False) -> None:
        if self._lines is not None:
            now = time.time()
            self._latest = max(self._latest, now)
            shown = {"time": _as_text(now), **line}
            short = {
                k: v[:MAX_LOGGED_CHARACTERS] if isinstance(v, str) else v for k, v in shown.items()
            }
            self._lines.append(short, sync=sync)  # JSON escapes line ends and control characters


class Spending:
    """What was spent of a promise, over every run that a ledger knows of.

    Args:
        privacy: the promise.
        ledger: what was given.
        most: how many gradients are given in all; no limit when None.
    """

    def __init__(self, privacy: Privacy, ledger: Ledger, most: int | None) -> None:
        self.privacy, self.ledger, self.most = privacy, ledger, most
        self._budget = Budget(privacy.epsilon, privacy.delta)
        dp_accounting_packages()  # one that is missing is told at once,
        _ = self.epsilon  # and so is a damaged log

    @property
    def epsilon(self) -> float:
        """The ε that was spent; infinite where gradients were given without noise.

        Kinds of events beyond `MAX_KINDS` count as the next that costs more.
        """
        # in this order: another thread may add to both
        given, spent = self.ledger.given, self.ledger.spent
        return math.inf if given > spent.total() else epsilon_of(merged(spent), self.privacy.delta)

    def over_budget(self, event: Event, count: int) -> str | None:
        """Return why so many more private gradients are too many, if they are.

        Called under the log's lock.
        """
        given, spent = self.ledger.given_so_far, self._beside(event)
        if given > spent.total():
            return (
                "it has given gradients without noise before, so that nothing can be promised of"
                " its examples"
            )
        if self.most is not None and given + count > self.most:
            return f"it has {self.most - given} gradients left to give, and was asked for {count}"
        wanted = spent[event] + count
        if self._budget.most(spent, event, wanted) < wanted:
            return f"{count} more gradients would exceed its ε = {self._budget.epsilon:g}"
        return None

    def left(self, event: Event, wanted: int) -> int:
        """Return how many such gradients are left.

        `wanted` where so many are, and the exact number where not.
        """
        given, spent = self.ledger.given, self._beside(event)
        if given > spent.total():
            return 0
        most = self._budget.most(spent, event, spent[event] + wanted) - spent[event]
        return max(0, min(wanted, most, wanted if self.most is None else self.most - given))

    def _beside(self, event: Event) -> Counter[Event]:
        """Return what was spent, by few kinds, of which one is this."""
        spent = Counter(self.ledger.spent_so_far)
        these = spent.pop(event, 0)
        return merged(spent, MAX_KINDS - 1) + Counter({event: these})

    def told(self) -> dict[str, float]:
        """Return what others may know: the promise, and how much of it was spent."""
        names = ("epsilon", "delta", "clip")
        return {name: float(getattr(self.privacy, name)) for name in names} | {
            "spent": self.epsilon
        }


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
        with writing(path):
            with open(made, "xb", opener=owner_only) as file:
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
        raise KnobError(
            f"the secret {path} must have at least {at_least} bytes, got {len(content)}"
        )
    return content


def secret_number(secret: bytes, purpose: str) -> int:
    """Return a number of 63 bits that only who has the secret can know."""
    return int.from_bytes(secret_bytes(secret, purpose, 8), "little") >> 1


def secret_bytes(secret: bytes, purpose: str, n: int = 32) -> bytes:
    """Return bytes that only who has the secret can know."""
    return hashlib.blake2b(
        purpose.encode(), key=hashlib.sha256(secret).digest(), digest_size=n
    ).digest()


def _as_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def owner_only(path: str, flags: int) -> int:
    """Open a file, as `open` lets an opener do, which is its owner's alone where it is new."""
    return os.open(path, flags, 0o600)
