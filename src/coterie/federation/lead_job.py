"""User 0's side of a job: what NVFLARE makes at the server, and how the sites are asked."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nvflare.collab import collab

from coterie.errors import PeerLost
from coterie.federation.lead import lead
from coterie.registry import import_from_environment

F = TypeVar("F", bound=Callable[..., Any])
main: Callable[[F], F] = collab.main


class User0:
    """Train at user 0's place."""

    @main
    def run(self) -> None:
        """Train with user 0's settings and data, which lie beside the server's folder."""
        import_from_environment()  # what user 0 named when it started the server
        lead(Path(collab.workspace.get_root_dir()).parent, CollabSites())


class CollabSites:
    """The sites of this job, asked through NVFLARE's Collab.

    Args:
        relayed: this is a site that asks others through the server. Where one does not answer, it
            finds out whether the server does: without it nobody can be reached.
    """

    def __init__(self, *, relayed: bool = False) -> None:
        self.parent, self.relayed = os.getppid(), relayed

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "CollabReplies":
        """Send a request to sites and return at once.

        One that is not in this job does not answer.
        """
        here = {client.name for client in collab.clients}
        asked = [name for name in names if name in here]
        if not asked:
            return CollabReplies(None, self.parent)
        group = collab.get_clients(asked)(blocking=False, timeout=timeout)
        patience = timeout if self.relayed else None
        return CollabReplies(getattr(group, method)(**arguments), self.parent, patience)


class CollabReplies:
    """What sites answer, as it comes."""

    def __init__(self, queue: Any, parent: int, patience: float | None = None) -> None:
        self.queue = queue  # Collab's, or None where nobody was asked
        # the process that this one was started by, without which no site can be reached
        self.parent = parent
        # how long to wait for the server's own answer; None where this is the server
        self.patience = patience

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""
        return self.queue is None or bool(self.queue.num_whole_items_received >= self.queue.limit)

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the answers by site."""
        answers = {} if self.queue is None else dict(self.queue)
        if collab.is_aborted:  # calls fail at once from now on
            raise PeerLost("NVFLARE has ended the job")
        if os.getppid() != self.parent:
            raise PeerLost("the process of NVFLARE that started this one is gone")
        if self.patience is not None and self.queue is not None and len(answers) < self.queue.limit:
            self._find_server(self.patience)
        return answers

    def _find_server(self, patience: float) -> None:
        try:
            collab.server(timeout=patience).here()
        except Exception as error:  # Collab raises several kinds
            raise PeerLost(f"the server does not answer: {type(error).__name__}") from error
