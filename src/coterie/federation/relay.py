"""The server's part where everyone trains.

Let all begin, watch until all have ended, and know nothing else.
"""

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.engines.remote.sites import Sites
from coterie.errors import PeerLost, printable
from coterie.federation.lead import REFUSED, REMEDY, RUN, SUMMARY, at_work
from coterie.federation.settings import members_of
from coterie.recording import files

logger = logging.getLogger(__name__)

MEMBERS = "members.json"
"""How far everybody is."""
PATIENCE = 60.0
"""How many seconds a site may be silent before the end of the others does not wait for it."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_BEGIN = 5.0
"""How many seconds a site that answers has to begin to train."""
WHOLE_RUN = 365 * 86400.0
"""How many seconds a site may train, at most."""


def relay(
    folder: Path, sites: Sites, *, patience: float = PATIENCE, pause: float = SECONDS_BETWEEN_LOOKS
) -> None:
    """Let all sites train and answer each other until all have ended, or those that have not are silent.

    The sites' keys are passed on first, by which they call each other and nobody else can. Who has
    ended goes on answering until then. Where the caps of a site are too small for what all plan,
    nobody begins. One that starts anew has another key: all go on
    in another job. What is written to `run` in the server's folder is how far everybody is.
    """
    names, out = members_of(folder), folder / RUN
    with at_work(out):
        offers = sites.ask(names, "key", patience, job=secrets.token_hex(16)).wait()
        sites.ask(names, "meet", patience, offers=dict(offers)).wait()
        if problems := _problems(sites.ask(names, "check", patience).wait()):
            files.write(out / REFUSED, f"{'; '.join(problems)}. {REMEDY}".encode())
            return
        sites.ask(names, "train", WHOLE_RUN)
        members = {name: MemberProgress(patience) for name in names}
        tenth = 0
        while not all(one.is_over for one in members.values()):
            time.sleep(pause)
            states = sites.ask(names, "state", patience / 4).wait()
            for name, one in members.items():
                one.hear(name, states.get(name))
            if anew := [name for name, one in members.items() if one.is_anew]:
                raise PeerLost(f"started anew: {', '.join(anew)}; all go on in another job")
            files.write_json(out / MEMBERS, {name: one.to_plain() for name, one in members.items()})
            now = min((one.tenth for one in members.values() if not one.is_over), default=tenth)
            if now > tenth:
                tenth, taken = now, [f"{name} {one}" for name, one in members.items()]
                logger.warning("steps taken: %s", ", ".join(taken))
        files.write(out / SUMMARY, f"{ended_in_words(members)}\n".encode())


@dataclass
class MemberProgress:
    """How far a site is, as it says itself."""

    patience: float
    step: int = 0
    steps: int = 0
    ended: bool = False
    failed: str | None = None
    last_seen: float = field(default_factory=time.monotonic)  # when it was heard of last
    silent: bool = False
    idle_since: float = math.inf  # since when it answers and has not begun to train

    def __str__(self) -> str:
        return f"{self.step} of {self.steps}" if self.steps else "none"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of its run in this job."""
        is_late = time.monotonic() - self.last_seen > self.patience
        return self.ended or self.failed is not None or is_late

    @property
    def is_anew(self) -> bool:
        """Whether its process has started since all were asked to train, and knows nothing of that."""
        return not self.is_over and time.monotonic() - self.idle_since > SECONDS_TO_BEGIN

    @property
    def tenth(self) -> int:
        """How many tenths of its run are done."""
        return 10 * self.step // self.steps if self.steps else 0

    def hear(self, name: str, state: Any) -> None:
        """Take over what a site says of itself, and tell what is new."""
        if not isinstance(state, Mapping):
            if not self.silent and time.monotonic() - self.last_seen > self.patience / 4:
                self.silent = True
                logger.warning("%s does not answer", name)
            return
        if self.silent:
            logger.warning("%s is back", name)
        self.last_seen, self.silent = time.monotonic(), False
        idle = state.get("began") is not True
        self.idle_since = min(self.idle_since, self.last_seen) if idle else math.inf
        step, steps, failed = (state.get(key) for key in ("step", "steps", "failed"))
        self.step, self.steps = (
            number if type(number) is int and number >= 0 else 0 for number in (step, steps)
        )
        if state.get("ended") is True and not self.ended:
            self.ended = True
            logger.warning("%s has ended after %d steps", name, self.step)
        if isinstance(failed, str) and self.failed is None:
            self.failed = printable(failed, 100)
            logger.warning("%s has failed with %s, and says there why", name, self.failed)

    def to_plain(self) -> dict[str, Any]:
        """Return what is written down."""
        return {"step": self.step, "steps": self.steps, "ended": self.ended, "failed": self.failed}


def ended_in_words(members: Mapping[str, MemberProgress]) -> str:
    """Return in a few lines who has ended."""
    ended = [f"{name} ({one.step} steps)" for name, one in members.items() if one.ended]
    lines = [f"ended: {', '.join(ended) or 'nobody'}. What came out is with each site alone."]
    for name, one in members.items():
        if one.failed is not None:
            lines.append(f"{name} has failed with {one.failed}, and says there why")
        elif not one.ended:
            lines.append(f"{name} was not heard of after step {one.step}")
    return "\n".join(lines)


def progress_of(out: Path) -> dict[str, int]:
    """Return the step at which everybody was when it was last written down."""
    about = files.read_json(out / MEMBERS, "`coterie federate run --resume` writes it anew")
    steps = {name: one.get("step") for name, one in about.items() if isinstance(one, dict)}
    return {name: step for name, step in steps.items() if type(step) is int}


def unfinished(out: Path) -> list[str]:
    """Return who had not ended when it was last written down."""
    about = files.read_json(out / MEMBERS, "`coterie federate run --resume` writes it anew")
    return [
        name
        for name, one in about.items()
        if not (isinstance(one, dict) and one.get("ended") is True)
    ]


def _problems(replies: Mapping[str, Any]) -> list[str]:
    """Return why somebody would not be answered to the end; each reason once."""
    problems: list[Any] = []
    for reply in replies.values():
        said = reply.get("problems") if isinstance(reply, Mapping) else None
        problems += said if isinstance(said, Sequence) and not isinstance(said, str) else []
    return list(dict.fromkeys(printable(each, 200) for each in problems if isinstance(each, str)))
