"""The server's side of a job where everyone trains: what NVFLARE makes there."""

from pathlib import Path

from nvflare.collab import collab

from coterie.federation.everyone.relay import relay
from coterie.federation.lead_job import CollabSites, main
from coterie.federation.site_job import publish


class Relay:
    """Pass messages on."""

    @main
    def run(self) -> None:
        """Let all sites train, and stay until they have."""
        relay(Path(collab.workspace.get_root_dir()).parent, CollabSites())

    @publish
    def here(self) -> bool:
        """Say that the server is there, to a site that another one has not answered."""
        return True
