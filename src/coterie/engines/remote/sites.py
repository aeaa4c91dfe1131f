"""The sites that user 0 can ask, whatever carries the messages; and sites in this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol

from coterie.engines.peer import Peer
from coterie.engines.remote.messages import request_bytes
from coterie.engines.remote.responder import Responder
from coterie.privacy.sums import SumsOnly
from coterie.recording.costs import Traffic


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
        request: dict[str, Any],
        *,
        patience: float | None = None,
        **more: Any,
    ) -> Replies:
        """Send a request to sites, who have `patience` seconds where it is given, and count it."""
        size = request_bytes(request)
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
