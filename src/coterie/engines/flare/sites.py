"""The sites that user 0 can ask, whatever carries the messages; and sites in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coterie.engines.flare.messages import answer_message
from coterie.engines.peer import Peer


class Replies(Protocol):
    """The replies of sites to one message, as they come."""

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the replies by site; one that failed has none."""


class Sites(Protocol):
    """The sites that can be asked."""

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Replies:
        """Send a message to sites and return at once; a site has so many seconds to answer.

        `method` is "gradients", with the argument `request` of plain data and arrays; or "ready", which asks for
        `Peer.terms`: whether there is a gradient to give.
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


class LocalSites:
    """Sites in this process: a consortium with no network between. Nobody answers for a name without a peer."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        self.peers = peers

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> LocalReplies:
        """Ask the sites that are here; see `Sites.ask`."""
        here = {name: self.peers[name] for name in names if name in self.peers}
        if method == "ready":
            return LocalReplies({name: peer.terms() for name, peer in here.items()})
        return LocalReplies({name: answer_message(peer, "user 0", **arguments) for name, peer in here.items()})
