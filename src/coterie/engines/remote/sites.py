"""The sites that user 0 can ask, whatever carries the messages, and who of them is waited for."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from coterie.engines.messages import NO_ANSWER, message_bytes
from coterie.engines.peer import Peer
from coterie.engines.remote.responder import Responder
from coterie.privacy.sums import SumsOnly
from coterie.recording.costs import Traffic

logger = logging.getLogger(__name__)

Kind: TypeAlias = tuple[int, int, str]
"""What takes about as long to answer: so many points, so many steps of one's own, such an E-step."""

SLACK = 4.0
"""How much longer than of late an answer may take."""


class Replies(Protocol):
    """The replies of sites to one message, as they come."""

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the replies by site; one that failed has none."""


class Sites(Protocol):
    """The sites that can be asked; another transport is one class with this method."""

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Replies:
        """Send a message to sites and return at once; a site has so many seconds to answer.

        `method` and its arguments, of plain data and arrays, are those of a `Responder`: "ready",
        "gradients", and for masked sums "offer", "join" and "part".
        """


@dataclass(frozen=True)
class LocalReplies:
    """Replies that are all there."""

    replies: Mapping[str, Any]

    def done(self) -> bool:
        """Say that nothing more will come."""
        return True

    def wait(self) -> Mapping[str, Any]:
        """Return the replies."""
        return self.replies


@dataclass(frozen=True)
class FutureReplies:
    """Replies that come one by one; see `Replies`. None is that of a site that gave none."""

    answers: Mapping[str, futures.Future[Any]]
    end: float  # by `time.monotonic`

    def done(self) -> bool:
        """Say whether every site has answered, is lost or has run out of time."""
        return time.monotonic() >= self.end or all(
            answer.done() for answer in self.answers.values()
        )

    def wait(self, needed: Callable[[Any], bool] | None = None) -> Mapping[str, Any]:
        """Wait until it is done, or an answer is not what is needed; return the answers by name."""
        waiting, here = set(self.answers.values()), set[futures.Future[Any]]()
        while waiting and (left := self.end - time.monotonic()) > 0:
            when = futures.ALL_COMPLETED if needed is None else futures.FIRST_COMPLETED
            here, waiting = futures.wait(waiting, left, when)
            if needed is not None and not all(needed(answer.result()) for answer in here):
                break
        there = {name: answer.result() for name, answer in self.answers.items() if answer.done()}
        return {name: value for name, value in there.items() if value is not None}


class LocalSites:
    """Sites in this process.

    A consortium with no network between. Nobody answers for a name without a peer.
    """

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None = None) -> None:
        self.responders = {name: Responder(peer, sums) for name, peer in peers.items()}

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        """Ask the sites that are here; see `Sites.ask`."""
        here = {name: self.responders[name] for name in names if name in self.responders}
        return LocalReplies({name: one.answer(method, arguments) for name, one in here.items()})


class CountedTransport:
    """Messages between user 0, called `me`, and sites with these names, each of whom has `timeout` seconds."""

    def __init__(self, sites: Sites, timeout: float, me: str, names: Sequence[str]) -> None:
        self.sites, self.timeout = sites, timeout
        self.traffic = {name: Traffic() for name in (me, *names)}
        self.mine = self.traffic[me]

    def ask(self, names: Sequence[str], method: str, **arguments: Any) -> Replies:
        """Ask sites what is short, and not counted; see `Sites.ask`."""
        return self.sites.ask(names, method, self.timeout, **arguments)

    def send(
        self,
        names: Sequence[str],
        method: str,
        request: Mapping[str, Any],
        *,
        patience: float | None = None,
        **more: Any,
    ) -> Replies:
        """Send a request to sites, who have `patience` seconds where it is given, and count it."""
        size = message_bytes(request)
        self.mine.bytes_sent += size * len(names)
        self.mine.messages += len(names)
        for name in names:
            self.traffic[name].bytes_received += size
        seconds = self.timeout if patience is None else patience
        return self.sites.ask(names, method, seconds, request=request, **more)

    def received(self, name: str, size: int) -> None:
        """Count a message of a site."""
        self.mine.bytes_received += size
        self.traffic[name].bytes_sent += size
        self.traffic[name].messages += 1


@dataclass
class SiteHealth:
    """How a site stands."""

    pause: int  # steps to let pass before it is asked whether it is back
    missed: int = 0  # steps in a row without an answer
    since: int = 0  # the step that the pause is counted from
    silent_at: int = -1  # the last step that it missed
    probe: Replies | None = None  # the question whether it is back, where one is on its way


class Liveness:
    """Who is waited for, and how long.

    Who gives nothing `misses` times in a row is dropped, and taken back when it says so: every
    `probe_every` steps a question in the background finds out. One that comes back and again gives
    nothing is dropped at once, for twice as long each time.
    """

    def __init__(
        self, transport: CountedTransport, names: Sequence[str], *, misses: int, probe_every: int
    ) -> None:
        self._transport, self._misses, self._probe_every = transport, misses, probe_every
        self._sites = {name: SiteHealth(probe_every) for name in names}
        self.took: dict[tuple[str, Kind], float] = {}  # how long answers have taken of late

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not waited for."""
        return tuple(name for name, site in self._sites.items() if site.missed >= self._misses)

    def not_asked(self, names: Collection[str], step: int) -> dict[str, str]:
        """Return which of these sites are not asked in a step, and why.

        One that is back is asked again.
        """
        left_out = {}
        for name in names:
            site = self._sites[name]
            if site.missed >= self._misses:
                self._probe(name, site, step)
            if site.missed >= self._misses:
                left_out[name] = "not waited for"
            elif site.silent_at == step:  # at another point: it is not waited for at this one
                left_out[name] = NO_ANSWER
        return left_out

    def patience(self, names: Sequence[str], kind: Kind) -> float:
        """Return how long to wait for sites, by how long they took to answer the like."""
        most = self._transport.timeout
        took = max(self.took.get((name, kind), math.inf) for name in names)
        return min(most, max(most / self._misses, SLACK * took))

    def answered(self, name: str) -> None:
        """Take note that a site has answered."""
        self._sites[name] = SiteHealth(self._probe_every)

    def miss(self, name: str, step: int, why: str) -> None:
        """Take note that a site has given nothing in a step, and why."""
        site = self._sites[name]
        site.missed, site.silent_at = site.missed + 1, step
        if site.missed >= self._misses:
            site.since = step
            said = "" if why == NO_ANSWER else f" ({why})"
            logger.warning(
                "step %d: %s gave nothing %d times%s, not waited for",
                step,
                name,
                self._misses,
                said,
            )

    def _probe(self, name: str, site: SiteHealth, step: int) -> None:
        """Take back a site that has answered a question in the background, or put it to it."""
        if site.probe is not None and site.probe.done():
            answer = site.probe.wait().get(name)
            site.probe, site.since = None, step
            # One more miss and it is dropped again, for twice as long.
            if isinstance(answer, dict) and answer.get("willing") is True:
                site.missed, site.pause = self._misses - 1, 2 * site.pause
                logger.warning("step %d: %s is back", step, name)
        elif site.probe is None and step - site.since >= site.pause:
            site.probe = self._transport.ask([name], "ready")
