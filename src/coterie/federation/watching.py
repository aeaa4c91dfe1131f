"""What a participant sees while NVFLARE works for it.

A few lines. What NVFLARE logs stays in a file.
"""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coterie.engines.peer import Caps
from coterie.errors import printable
from coterie.federation.lead import NEWS, RECORD, REFUSED, RUN, SUMMARY
from coterie.federation.participants import LOG as REQUESTS
from coterie.recording.progress import Show, TimeLeft, numbers_of
from coterie.recording.record import Record

LOG = "nvflare.log"
"""What NVFLARE's process writes, in the folder where it works."""

SECONDS_BETWEEN_LINES = 10.0
"""How often progress is told where it is not on a terminal, whose last line it changes."""

LEAST_ROOM = 2**20
"""How many bytes must be free on the disk of a site's folder."""

SECONDS_TO_CONNECT = 60.0
"""After which a site that has not connected is told what to look for."""

LONGEST_LINE = 1000

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
    """Lines that stay, and one below them that changes.

    `terminal` when None: where standard output is one.
    """

    def __init__(
        self, show_line: Callable[[str], None] = print, terminal: bool | None = None
    ) -> None:
        self._show_line, self._shown, self._at = show_line, "", -float("inf")
        self._text = ""  # how things stand, shown or not yet
        self._terminal = sys.stdout.isatty() if terminal is None else terminal

    def line(self, text: str) -> None:
        """Show a line that stays."""
        text = printable(text, LONGEST_LINE)
        if self._terminal:
            print("\r\033[K", end="", flush=True)
        self._show_line(f"{time.strftime('%H:%M:%S')} {text}")
        if self._terminal:
            print(self._shown, end="", flush=True)

    def now(self, text: str) -> None:
        """Show how things stand; see `look`."""
        self._text = printable(text, LONGEST_LINE)
        self.look()

    def look(self) -> None:
        """Show how things stand, if that is not shown yet.

        Without a terminal, not before its time.
        """
        if self._text == self._shown:
            return
        if self._terminal:
            print(f"\r\033[K{self._text}", end="", flush=True)
        elif time.monotonic() - self._at >= SECONDS_BETWEEN_LINES:
            self._at = time.monotonic()
            self._show_line(f"{time.strftime('%H:%M:%S')} {self._text}")
        else:
            return
        self._shown = self._text


class RunWatch:
    """Show what is new of a run: the lines of its news, and how far it is."""

    def __init__(
        self, out: Path, steps: int, show: Show, show_line: Callable[[str], None], tenths: bool
    ) -> None:
        self._record, self._news = out / RECORD, NewLines(out / NEWS)
        self._steps, self._show, self._show_line = steps, show, show_line
        # how many tenths of the run were told, where there is no bar
        self._tenth = 0 if tenths else 11
        self._left: TimeLeft | None = None

    def __call__(self) -> None:
        """Look what is new."""
        for line in self._news():
            self._show_line(line)
        points = Record.load(self._record).points if self._record.exists() else []
        if not points:
            return
        last = points[-1]
        losses = [point.validation["loss"] for point in points if point.validation]
        told = (last.own_loss, last.weight)
        loss, weight = (math.nan if value is None else value for value in told)
        best = min(losses, default=None)
        self._show(last.step, loss, weight, best)
        left = self._left = self._left or TimeLeft(last.step, self._steps)
        if 10 * last.step // self._steps > self._tenth:
            self._tenth = 10 * last.step // self._steps
            said = f"{numbers_of(loss, weight, best)}{left(last.step)}"
            self._show_line(f"step {last.step} of {self._steps}: {said}")


class SiteWatch:
    """Tell a site whether it is connected, what it has given, and what it has refused."""

    def __init__(self, folder: Path, log: NewLines, caps: Caps, given: int, screen: Screen) -> None:
        self.caps, self.given, self.screen = caps, given, screen
        self._log, self._requests = log, NewLines(folder / REQUESTS)
        self._refused: dict[str, int] = {}
        self._is_full, self._late = False, time.monotonic() + SECONDS_TO_CONNECT
        screen.now("waiting for the server")

    def __call__(self) -> None:
        """Look what is new."""
        self._look_at_disk()
        if any(_REGISTERED in line for line in self._log()):
            self.screen.line("connected to the server")
            self.now("no request yet")
            self._late = math.inf
        if time.monotonic() > self._late:
            self._late, where = math.inf, self._requests.path.parent
            after = f"no connection after {SECONDS_TO_CONNECT:g} s"
            self.screen.line(f"{after}: `coterie federate doctor {where}` finds out why")
        lines = [json.loads(line) for line in self._requests()]
        for line in lines:
            self.given += int(line.get("gradients", 0))
            if reason := line.get("refused") or line.get("failed"):
                self._refuse(str(reason), str(line.get("step")))
            if site := line.get("sum_with"):
                self.screen.line(f"masked sums with {site}, whose key is {line.get('fingerprint')}")
            if site := line.get("calls_with"):
                noted = f"{site}, seen for the first time, has the key {line.get('fingerprint')}"
                self.screen.line(f"{noted}: compare it by telephone, and write it under [keys]")
        lines = [line for line in lines if "fingerprint" not in line]
        if lines:
            most = "" if self.caps.gradients is None else f" of {self.caps.gradients}"
            refused = f", {sum(self._refused.values())} requests refused" if self._refused else ""
            self.now(f"step {lines[-1].get('step')}: {self.given}{most} gradients given{refused}")
        self.screen.look()

    def now(self, text: str) -> None:
        """Show how what is given stands."""
        self.screen.now(text)

    def _look_at_disk(self) -> None:
        """Tell when there is no room for the log: nothing is given then, and no file can say so."""
        full = shutil.disk_usage(self._requests.path.parent).free < LEAST_ROOM
        if full != self._is_full:
            self._is_full = full
            where = self._requests.path.parent
            now = "there is room again"
            if full:
                now = f"the disk of {where} is full: nothing is given until there is room"
            self.screen.line(now)

    def _refuse(self, reason: str, step: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1
        if self._refused[reason] == 1:  # once for each reason
            self.screen.line(f"refused at step {step}: {reason}")


class MemberWatch(SiteWatch):
    """Tell a site that trains a model of its own how far that is, too, and what came of it."""

    def __init__(
        self, folder: Path, log: NewLines, caps: Caps, given: int, screen: Screen, *, steps: int
    ) -> None:
        self._mine, self._given, self._steps, out = "", "", steps, folder / RUN
        super().__init__(folder, log, caps, given, screen)
        self._run = RunWatch(out, steps, self._follow, screen.line, tenths=False)
        self._ends = {path: _text(path) for path in (out / SUMMARY, out / REFUSED)}

    def __call__(self) -> None:
        """Look what is new."""
        super().__call__()
        self._run()
        for path, before in self._ends.items():
            if (text := _text(path)) != before:
                self._ends[path] = text
                for line in text.splitlines():
                    self.screen.line(line)

    def now(self, text: str) -> None:
        """Show how both stand."""
        self._given = text
        self.screen.now(f"{self._mine}{text}")

    def _follow(self, step: int, loss: float, weight: float, best: float | None) -> None:
        said = numbers_of(loss, weight, best)
        self._mine = f"own run: step {step} of {self._steps}, {said}; for others: "
        self.now(self._given)


class ServerWatch:
    """Tell user 0 which sites are connected."""

    def __init__(self, place: Path, screen: Screen) -> None:
        self._log, self.screen = NewLines(place / LOG), screen
        screen.now("waiting for sites")

    def __call__(self) -> None:
        """Look what is new."""
        for line in self._log():
            for pattern, words in _CLIENTS:
                if client := pattern.search(line):
                    total = re.search(r"Total clients: (\d+)", line)
                    self.screen.line(words.format(client[1]))
                    self.screen.now(f"sites connected: {total[1]}" if total else "")
        self.screen.look()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
