"""What user 0 sends to sites and gets from them, counted by user."""

from collections.abc import Sequence
from typing import Any

from coterie.engines.flare.messages import request_bytes
from coterie.engines.flare.sites import Replies, Sites
from coterie.recording.costs import Traffic


class Post:
    """Messages between user 0, called `me`, and sites with these names, each of whom has `timeout` seconds."""

    def __init__(self, sites: Sites, timeout: float, me: str, names: Sequence[str]) -> None:
        self.sites, self.timeout = sites, timeout
        self.traffic = {name: Traffic() for name in (me, *names)}
        self.mine = self.traffic[me]

    def ask(self, names: Sequence[str], method: str, **arguments: Any) -> Replies:
        """Ask sites what is short, and not counted; see `Sites.ask`."""
        return self.sites.ask(names, method, self.timeout, **arguments)

    def send(self, names: Sequence[str], method: str, request: dict[str, Any]) -> Replies:
        """Send a request to sites, and count it."""
        size = request_bytes(request)
        self.mine.bytes_sent += size * len(names)
        self.mine.messages += len(names)
        for name in names:
            self.traffic[name].bytes_received += size
        return self.ask(names, method, request=request)

    def received(self, name: str, size: int) -> None:
        """Count a message of a site."""
        self.mine.bytes_received += size
        self.traffic[name].bytes_sent += size
        self.traffic[name].messages += 1
