"""A site that trains a model of its own, and answers the others while they train theirs."""

import logging
from pathlib import Path
from typing import Any

import torch

from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import Sites
from coterie.errors import CoterieError, PeerLost
from coterie.federation.lead import RECORD, REFUSED, RUN, at_work, problems_with, rule_of, train_here
from coterie.federation.participants import lead_participant, peer_with
from coterie.federation.settings import site_settings
from coterie.recording import files
from coterie.recording.record import Record

logger = logging.getLogger(__name__)


class MemberRun:
    """One site in one job. Model, weights, record, verdict and page are in `run` in its folder, and stay there.

    To the others it gives gradients of its training examples, within its caps; its validation and test examples
    are its own.

    Args:
        folder: the site's, with its settings.
    """

    def __init__(self, folder: Path) -> None:
        site = site_settings(folder)
        self.settings, self.out = site.as_lead(), folder / RUN
        rule_of(self.settings)  # what cannot be built is told now
        torch.set_num_threads(site.threads)
        self._held, self._task = lead_participant(folder, self.settings)
        self.responder = Responder(peer_with(folder, site, self._held))
        self._ended = False
        self._failed: str | None = None

    def check(self, sites: Sites) -> dict[str, Any]:
        """Say why others would not answer the whole of what all plan; a run that has begun is not held up."""
        if (self.out / RECORD).exists():
            return {"problems": []}
        return {"problems": problems_with(self.settings, sites, askers=len(self.settings.sites))}

    def train(self, sites: Sites) -> dict[str, Any]:
        """Train, or go on training; what goes wrong is told here, and its kind to the server."""
        self._ended, self._failed = False, None
        try:
            with at_work(self.out):
                train_here(self.settings, sites, self.out, self._held, self._task)
            self._ended = True
        except PeerLost as lost:  # the next job goes on from here
            self._failed = type(lost).__name__
            logger.warning("%s", lost)
        except Exception as error:  # a loader's, a model's or a rule's own may raise anything
            self._failed = type(error).__name__
            if not isinstance(error, CoterieError):
                logger.exception("the run has failed")
            files.write(self.out / REFUSED, f"{type(error).__name__}: {error}\n".encode())
        return self.state()

    def state(self) -> dict[str, Any]:
        """Say how far the run is, and whether it has ended; nothing of what came out."""
        points = Record.load(self.out / RECORD).points if (self.out / RECORD).exists() else []
        step, steps = points[-1].step if points else 0, self.settings.training.steps
        return {"step": step, "steps": steps, "ended": self._ended, "failed": self._failed}
