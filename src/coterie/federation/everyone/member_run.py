"""A site that trains a model of its own, and answers the others while they train theirs."""

import logging
import threading
from pathlib import Path
from typing import Any

import torch

from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import Sites
from coterie.errors import CoterieError, MaskError, PeerLost
from coterie.federation.everyone.sealed_sites import FORGET, KnownKeys, SealedSites, answered
from coterie.federation.lead import (
    RECORD,
    REFUSED,
    RUN,
    at_work,
    problems_with,
    rule_of,
    train_here,
)
from coterie.federation.participants import lead_participant, peer_with
from coterie.federation.settings import site_settings
from coterie.privacy.calls import Calls
from coterie.recording import files
from coterie.recording.record import Record

logger = logging.getLogger(__name__)

METHODS = ("ready", "gradients")
REFUSAL = "it answers the sites that it names only, by calls that they have sealed"


class MemberRun:
    """One site in one job.

    Model, weights, record, verdict and page are in `run` in its folder, and stay there.

    To the others it gives gradients of its training examples, within its caps; its validation and
    test examples are its own.

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
        self._ended, self._lock = False, threading.Lock()
        self._failed: str | None = None
        self._known, self._strangers = KnownKeys(folder, site.keys), not site.keys
        self.calls: Calls | None = None

    def key(self, job: Any) -> dict[str, Any]:
        """Make a key for the calls of a job, and return it signed; the server passes it on."""
        identity = self.responder.peer.identity
        self.calls = Calls(identity, str(job)[:64], self._known(), strangers=self._strangers)
        return self.calls.offer

    def meet(self, offers: Any) -> dict[str, Any]:
        """Take over the other sites' keys for this job, and tell them here."""
        if self.calls is None:
            return {}
        found, refused = self.calls.meet(offers)
        ledger, known = self.responder.peer.ledger, self._known()
        for site, fingerprint in found.items():
            if site not in known:
                ledger.note(calls_with=site, fingerprint=fingerprint)
        for site, why in refused.items():
            ledger.note(caller=site, refused=f"{why}; {FORGET} {self._known.path.name}")
        self._known.add(found)
        return {"met": sorted(found)}

    def answer(self, call: Any) -> dict[str, Any]:
        """Return the sealed reply to a sealed call of a site that this one names.

        Others are refused.
        """
        if self.calls is None:
            return {"refused": REFUSAL}
        try:
            return answered(self.calls, call, self._answer)
        except MaskError as error:
            logger.warning("refused a call: %s", error)
            return {"refused": REFUSAL}

    def _answer(self, caller: str, method: str, arguments: dict[str, Any]) -> Any:
        if caller not in self.settings.sites or method not in METHODS:
            return {"refused": REFUSAL}
        if method == "ready":
            return self.responder.ready(arguments.get("batch_size"), arguments.get("gradients"))
        with self._lock:  # a request that came late may still be in work
            return self.responder.gradients(arguments.get("request"), caller)

    def check(self, sites: Sites) -> dict[str, Any]:
        """Say why others would not answer the whole of what all plan.

        A run that has begun is not held up.
        """
        if (self.out / RECORD).exists():
            return {"problems": []}
        return {
            "problems": problems_with(
                self.settings, self._sealed(sites), askers=len(self.settings.sites)
            )
        }

    def train(self, sites: Sites) -> dict[str, Any]:
        """Train, or go on training; what goes wrong is told here, and its kind to the server."""
        self._ended, self._failed = False, None
        try:
            with at_work(self.out):
                train_here(self.settings, self._sealed(sites), self.out, self._held, self._task)
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

    def _sealed(self, sites: Sites) -> Sites:
        """Return the other sites, asked by sealed calls that these carry."""
        if self.calls is None:
            raise PeerLost("the server has passed on no keys")
        return SealedSites(sites, self.calls)

    def state(self) -> dict[str, Any]:
        """Say how far the run is, and whether it has ended; nothing of what came out."""
        points = Record.load(self.out / RECORD).points if (self.out / RECORD).exists() else []
        step, steps = points[-1].step if points else 0, self.settings.training.steps
        return {"step": step, "steps": steps, "ended": self._ended, "failed": self._failed}
