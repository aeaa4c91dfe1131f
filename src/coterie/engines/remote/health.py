"""How sites stand with user 0: who is waited for; and what can be true of what a site tells."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.engines.remote.sites import CountedTransport, Replies

logger = logging.getLogger(__name__)


@dataclass
class SiteHealth:
    """How a site stands."""

    pause: int  # steps to let pass before it is asked whether it is back
    missed: int = 0  # steps in a row without an answer
    since: int = 0  # the step that the pause is counted from
    silent_at: int = -1  # the last step that it missed
    probe: Replies | None = None  # the question whether it is back, where one is on its way


class Liveness:
    """Who is waited for: who gives nothing `misses` times in a row is dropped, and taken back when it says so.

    Every `probe_every` steps a question in the background finds out. One that comes back and again
    gives nothing is dropped at once, for twice as long each time.
    """

    def __init__(
        self, transport: CountedTransport, names: Sequence[str], *, misses: int, probe_every: int
    ) -> None:
        self._transport, self._misses, self._probe_every = transport, misses, probe_every
        self._sites = {name: SiteHealth(probe_every) for name in names}

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not waited for."""
        return tuple(name for name, site in self._sites.items() if site.missed >= self._misses)

    def not_asked(self, names: Collection[str], step: int) -> dict[str, str]:
        """Return which of these sites are not asked in a step, and why.

        One that is back is asked again.
        """
        self._take_back(step, names)
        dropped = self.dropped
        # One that missed this step at another point is not waited for at this one.
        silent = [
            name for name in names if self._sites[name].silent_at == step and name not in dropped
        ]
        return dict.fromkeys(silent, "no answer") | {
            n: "not waited for" for n in names if n in dropped
        }

    def answered(self, name: str) -> None:
        """Take note that a site has answered."""
        self._sites[name] = SiteHealth(self._probe_every)

    def miss(self, name: str, step: int, why: str | None) -> None:
        """Take note that a site has given nothing in a step, and why, where it said so."""
        site = self._sites[name]
        site.missed, site.silent_at = site.missed + 1, step
        if site.missed >= self._misses:
            site.since = step
            said = "" if why is None else f" ({why})"
            logger.warning(
                "step %d: %s gave nothing %d times%s, not waited for",
                step,
                name,
                self._misses,
                said,
            )

    def _take_back(self, step: int, names: Collection[str]) -> None:
        """Take back the sites that have answered a question in the background, and put it to the others."""
        dropped = self.dropped
        for name in [name for name in names if name in dropped]:
            site = self._sites[name]
            if site.probe is not None and site.probe.done():
                answer = site.probe.wait().get(name)
                site.probe, site.since = None, step
                # One more miss and it is dropped again, for twice as long.
                if isinstance(answer, dict) and answer.get("willing") is True:
                    site.missed, site.pause = self._misses - 1, 2 * site.pause
                    logger.warning("step %d: %s is back", step, name)
            elif site.probe is None and step - site.since >= site.pause:
                site.probe = self._transport.ask([name], "ready")


def seconds_told(reported: Any, most: float) -> float:
    """Return the seconds that a site says it computed, as far as they can be true."""
    return reported if isinstance(reported, float) and 0 <= reported <= most else 0.0
