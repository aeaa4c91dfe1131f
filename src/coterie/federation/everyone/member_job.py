"""A site's side of a job where everyone trains: what NVFLARE makes there."""

from typing import Any

from coterie.federation.everyone.member_run import REFUSAL, MemberRun
from coterie.federation.lead_job import CollabSites
from coterie.federation.site_job import Answering, by_server, folder_here, init, logger, publish
from coterie.registry import import_from_environment


class MemberSite(Answering):
    """Train when the server says so, and answer the sites that this one names, one request at a time."""

    refusal = REFUSAL

    def __init__(self) -> None:
        super().__init__()
        self.run: MemberRun | None = None

    @init
    def start(self) -> None:
        """Read the site's settings and its data.

        Where that fails the site does nothing, and the others go on.
        """
        try:
            import_from_environment()  # what this site named when it was started
            self.run = MemberRun(folder_here())
            self.responder = self.run.responder
        except Exception:  # a loader of the site's own may raise anything
            logger.exception("this site takes no part, since its data or model cannot be read")

    def answers(self) -> bool:
        """Answer nobody by calls that are not sealed.

        NVFLARE's server can say of any that a site made it.
        """
        return False

    @publish
    def call(self, call: Any) -> dict[str, Any]:
        """Answer a sealed call of a site that this one names."""
        return {"refused": self.refusal} if self.run is None else self.run.answer(call)

    @publish
    def key(self, job: Any) -> dict[str, Any]:
        """Return this site's key for the calls of a job."""
        return self.run.key(job) if by_server() and self.run is not None else {}

    @publish
    def meet(self, offers: Any) -> dict[str, Any]:
        """Take over the other sites' keys."""
        return self.run.meet(offers) if by_server() and self.run is not None else {}

    @publish
    def check(self) -> dict[str, Any]:
        """Say why others would not answer to the end what this site plans."""
        if by_server() and self.run is not None:
            return self.run.check(CollabSites(relayed=True))
        return {}

    @publish
    def train(self) -> dict[str, Any]:
        """Train; it returns when the run has ended."""
        if by_server() and self.run is not None:
            return self.run.train(CollabSites(relayed=True))
        return {}

    @publish
    def state(self) -> dict[str, Any]:
        """Say how far the run is."""
        if not by_server():
            return {}
        return {"failed": "data that cannot be read"} if self.run is None else self.run.state()
