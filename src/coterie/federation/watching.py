"""What a participant sees while NVFLARE works for it: a few lines. What NVFLARE logs stays in a file."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coterie.engines.caps import Caps
from coterie.federation.participants import LOG as REQUESTS

LOG = "nvflare.log"
"""What NVFLARE's process writes, in the folder where it works."""

SECONDS_BETWEEN_LINES = 10.0
"""How often progress is told where it is not on a terminal, whose last line it changes."""

_REGISTERED = "Successfully registered client"
_CLIENTS = (
    (re.compile(r"Client: New client (\S+?)(?:@\S*)? joined\b"), "{} is connected"),
    (re.compile(r"Client Name:(\S+) left\b"), "{} has left"),
    (re.compile(r"Remove the dead Client\. Name: (\S+?)\.? "), "{} is lost"),
)


class NewLines:
    """The whole lines that were added to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = path.stat().st_size if path.exists() else 0

    def __call__(self) -> list[str]:
        """Return them."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        return whole.decode(errors="replace").splitlines() if whole else []


class Screen:
    """Lines that stay, and one below them that changes; `terminal` when None: where standard output is one."""

    def __init__(self, show_line: Callable[[str], None] = print, terminal: bool | None = None) -> None:
        self._show_line, self._shown, self._at = show_line, "", -float("inf")
        self._terminal = sys.stdout.isatty() if terminal is None else terminal

    def line(self, text: str) -> None:
        """Show a line that stays."""
        text = _printable(text)
        if self._terminal:
            print("\r\033[K", end="", flush=True)
        self._show_line(f"{time.strftime('%H:%M:%S')} {text}")
        if self._terminal:
            print(self._shown, end="", flush=True)

    def now(self, text: str) -> None:
        """Show how things stand."""
        text = _printable(text)
        if text == self._shown:
            return
        if self._terminal:
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - self._at >= SECONDS_BETWEEN_LINES:
            self._at = time.monotonic()
            self._show_line(f"{time.strftime('%H:%M:%S')} {text}")
        else:
            return
        self._shown = text


class SiteWatch:
    """Tell a site whether it is connected, what it has given, and what it has refused."""

    def __init__(self, folder: Path, place: Path, caps: Caps, given: int, screen: Screen) -> None:
        self.caps, self.given, self.screen = caps, given, screen
        self._log, self._requests = NewLines(place / LOG), NewLines(folder / REQUESTS)
        self._refused: dict[str, int] = {}
        screen.now("waiting for user 0's server")

    def __call__(self) -> None:
        """Look what is new."""
        if any(_REGISTERED in line for line in self._log()):
            self.screen.line("connected to user 0's server")
            self.screen.now("no request yet")
        lines = [json.loads(line) for line in self._requests()]
        for line in lines:
            self.given += int(line.get("gradients", 0))
            if reason := line.get("refused") or line.get("failed"):
                self._refuse(str(reason), str(line.get("step")))
            if site := line.get("sum_with"):
                self.screen.line(f"masked sums with {site}, whose key is {line.get('fingerprint')}")
        lines = [line for line in lines if "sum_with" not in line]
        if lines:
            most = "" if self.caps.gradients is None else f" of {self.caps.gradients}"
            refused = f", {sum(self._refused.values())} requests refused" if self._refused else ""
            self.screen.now(f"step {lines[-1].get('step')}: {self.given}{most} gradients given{refused}")

    def _refuse(self, reason: str, step: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1
        if self._refused[reason] == 1:  # once for each reason
            self.screen.line(f"refused at step {step}: {reason}")


class ServerWatch:
    """Tell user 0 which sites are connected."""

    def __init__(self, place: Path, screen: Screen) -> None:
        self._log, self.screen = NewLines(place / LOG), screen
        screen.now("waiting for sites")

    def __call__(self) -> None:
        """Look what is new."""
        for line in self._log():
            for pattern, words in _CLIENTS:
                if found := pattern.search(line):
                    total = re.search(r"Total clients: (\d+)", line)
                    self.screen.line(words.format(found[1]))
                    self.screen.now(f"sites connected: {total[1]}" if total else "")


def _printable(text: str) -> str:
    """Return a text without what would move the cursor or change colours: parts of it come from elsewhere."""
    return "".join(character if character.isprintable() else "?" for character in text)
