"""A site's side of a job.

What NVFLARE makes there. The code is the site's own; the job only names it.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nvflare.collab import collab

from coterie.engines.remote.responder import Responder
from coterie.federation.participants import responder_of

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
init: Callable[[F], F] = collab.init
publish: Callable[[F], F] = collab.publish


class Answering:
    """Answer who may ask, one request at a time."""

    refusal = "it answers user 0 only"

    def __init__(self) -> None:
        self.responder: Responder | None = None
        self.lock = threading.Lock()

    def answers(self) -> bool:
        """Say whether user 0 asks.

        It is at the server; NVFLARE knows the caller by its certificate.
        """
        return by_server()

    @publish
    def ready(self, batch_size: Any = None, gradients: Any = None) -> dict[str, Any]:
        """Say whether there is a gradient to give, and what is given at most."""
        if not self.answers() or self.responder is None:
            return {"willing": False}
        return self.responder.ready(batch_size, gradients)

    @publish
    def gradients(self, request: Any) -> dict[str, Any]:
        """Return the gradients asked for, or why there are none."""
        return self._answer("gradients", request=request)

    def _answer(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Answer who may ask; see `Responder`."""
        if not self.answers():  # somebody else would learn about these rows, and use up the caps
            logger.warning("refused %.100r: %s", str(collab.caller), self.refusal)
            return {"refused": self.refusal}
        if self.responder is None:
            return {"refused": "its data or model cannot be read"}
        arguments |= {} if method == "offer" else {"caller": str(collab.caller)}
        with self.lock:  # a request that came late may still be in work
            answer: dict[str, Any] = getattr(self.responder, method)(**arguments)
        return answer


class Site(Answering):
    """Answer user 0, with gradients or with masked sums."""

    @init
    def start(self) -> None:
        """Read the site's settings and its data.

        Where that fails the site refuses, and the others go on.
        """
        try:
            self.responder = responder_of(folder_here())
        except Exception:  # a loader of the site's own may raise anything
            logger.exception("this site gives no gradients, since its data or model cannot be read")

    @publish
    def offer(self, batch_size: Any) -> dict[str, Any]:
        """Return a key for masked sums, and the noise that they need."""
        return self._answer("offer", batch_size=batch_size)

    @publish
    def join(self, agreement: Any) -> dict[str, Any]:
        """Take part in masked sums, or say why not."""
        return self._answer("join", agreement=agreement)

    @publish
    def part(self, request: Any) -> dict[str, Any]:
        """Return the masked part of a sum, or why there is none."""
        return self._answer("part", request=request)


def folder_here() -> Path:
    """Return the site's folder, in which NVFLARE has one to work in."""
    return Path(collab.workspace.get_root_dir()).parent


def by_server() -> bool:
    """Say whether the server asks."""
    return bool(collab.caller == collab.server.name)
