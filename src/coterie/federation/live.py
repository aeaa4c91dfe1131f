"""A page on how a run with sites goes, for user 0 to open while it does: a file that is written anew, no server."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.engines.engine import Engine
from coterie.engines.messages import promise_told, whole_number
from coterie.engines.remote.sites import Replies, Sites
from coterie.errors import FileError, printable
from coterie.recording.progress import TimeLeft, numbers_of
from coterie.reporting.page import Lead, Section, line_chart, write_page
from coterie.training.hooks import Hook, Start
from coterie.training.run import Run, Step

logger = logging.getLogger(__name__)

LIVE = "live.html"
"""The page, in the folder of the run."""
SECONDS_BETWEEN_PAGES = 3.0
SECONDS_BETWEEN_QUESTIONS = 20.0
"""From one question to the sites, what they still give, to the next."""
LINES_OF_NEWS = 12
RELOAD = f"setTimeout(() => location.reload(), {1000 * SECONDS_BETWEEN_PAGES:.0f})"


class LivePage(Hook):
    """Write a page every few seconds: how far the run is, its losses, and how every site stands.

    Args:
        out: the folder of the run.
        sites: what carries questions to the sites, here what each still gives.
        names: the sites.
        timeout: seconds that they have to answer.
        news: the file with what has happened.
    """

    every_step = False

    def __init__(
        self, out: Path, sites: Sites, names: Sequence[str], timeout: float, news: Path
    ) -> None:
        self.out, self.sites, self.names, self.timeout, self.news = out, sites, names, timeout, news
        self.engine: Engine | None = None  # which counts the messages
        self._losses: dict[str, tuple[list[float], list[float]]] = {}
        self._terms: dict[str, Any] = {}  # what each site last said of what it gives
        self._asked: Replies | None = None
        self._asked_at = self._written_at = -math.inf

    def on_start(self, start: Start) -> None:
        """Take note of what the run is."""
        self._me, self._steps = start.spec.me.name, start.spec.steps
        self._left = TimeLeft(start.step, start.spec.steps)

    def on_step(self, step: Step) -> None:
        """Write the page where it is due."""
        if step.point is not None:
            losses = {"own loss": step.point.own_loss}
            losses["validation loss"] = step.point.validation.get("loss")
            for name, value in losses.items():
                if value is not None:
                    places, values = self._losses.setdefault(name, ([], []))
                    places.append(step.step)
                    values.append(value)
        if (now := time.monotonic()) - self._written_at >= SECONDS_BETWEEN_PAGES:
            self._written_at = now
            self._ask(now)
            self._write(step)

    def on_end(self, run: Run) -> None:
        """Let the page lead to that of the result."""
        ending = "has ended" if run.stopped is None else f"was stopped by {run.stopped}"
        said = Lead(f"The run {ending}, after {run.step} steps.", advice="See `index.html`.")
        self._write_page([], lead=said)

    @property
    def _title(self) -> str:
        return f"{self._me} with {', '.join(self.names)}"

    def _ask(self, now: float) -> None:
        """Ask the sites what they still give, and take over what they have said, without waiting."""
        if self._asked is not None and self._asked.done():
            self._terms |= self._asked.wait()
            self._asked = None
        elif self._asked is None and now - self._asked_at >= SECONDS_BETWEEN_QUESTIONS:
            self._asked, self._asked_at = self.sites.ask(self.names, "ready", self.timeout), now

    def _write(self, step: Step) -> None:
        traffic = {} if self.engine is None else self.engine.traffic()
        # that of who is left out went back to user 0's own gradient
        shares = {n: share for n, share in step.tau().items() if n not in step.left_out}
        of_all = step.weight / (sum(shares.values()) or math.inf)
        rows = [
            {
                "site": name,
                "in the last step": step.left_out.get(name, "answered"),
                "its weight": f"{of_all * shares.get(name, 0.0):.2f}",
                "still gives": _left_at(self._terms.get(name)),
                "messages": traffic[name].messages if name in traffic else 0,
            }
            for name in self.names
        ]
        losses = line_chart(self._losses, "steps", "loss")
        # a line may be in the making
        told = self.news.read_text(encoding="utf-8", errors="replace") if self.news.exists() else ""
        said = numbers_of(step.own_loss, step.weight, step.best_loss)
        lead = Lead(f"step {step.step} of {self._steps}: {said}{self._left(step.step)}")
        sections = [
            Section("Sites", tables=[rows]),
            *([Section("Losses", charts=[losses])] if losses else []),
            Section("News", text=[printable(line) for line in told.splitlines()[-LINES_OF_NEWS:]]),
        ]
        self._write_page(sections, lead=lead, script=RELOAD)

    def _write_page(self, sections: Sequence[Section], **how: Any) -> None:
        """Write the page; a run does not end because there is no room for it."""
        try:
            write_page(self.out / LIVE, self._title, sections, **how)
        except FileError as error:
            logger.info("no live page: %s", error)


def _left_at(terms: Any) -> str:
    """Return what a site says that it still gives, in words."""
    reported = terms if isinstance(terms, dict) else {}
    left, promise = whole_number(reported.get("left"), 0), promise_told(reported.get("promise"))
    words = [] if left is None else [f"{left} gradients"]
    if promise is not None:
        words.append(f"ε {promise['spent']:.3g} of {promise['epsilon']:.3g} spent")
    return ", ".join(words) or ("no limit" if reported else "not known yet")
