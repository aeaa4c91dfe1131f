"""A site that trains a model of its own, and answers the others while they train theirs."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.engines.messages import from_bytes, to_bytes
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import Replies, Sites
from coterie.errors import CoterieError, MaskError, PeerLost
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


KNOWN_KEYS = "known_keys.json"
"""The fingerprints of other sites' keys as they were first seen, in a site's folder."""
FORGET = "if it has a new key, compare its fingerprint by telephone and take its entry out of"


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
        self._began = self._ended = False
        self._lock = threading.Lock()
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
        askers = len(self.settings.sites)
        return {"problems": problems_with(self.settings, self._sealed(sites), askers=askers)}

    def train(self, sites: Sites) -> dict[str, Any]:
        """Train, or go on training; what goes wrong is told here, and its kind to the server."""
        self._began, self._ended, self._failed = True, False, None
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
        about = {"step": step, "steps": steps, "ended": self._ended, "failed": self._failed}
        return about | {"began": self._began}


class SealedSites:
    """Other sites, asked by sealed calls; who has no key in this job does not answer."""

    def __init__(self, sites: Sites, calls: Calls) -> None:
        self._sites, self._calls, self._told = sites, calls, set[str]()

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "SealedReplies":
        """Ask sites; see `Sites.ask`."""
        content, sent = to_bytes({"method": method, "arguments": arguments}), {}
        for name in filter(self._calls.knows, names):
            number, sealed = self._calls.call(name, content)
            call = {"by": self._calls.site, "number": number, "sealed": _as_array(sealed)}
            sent[name] = number, self._sites.ask([name], "call", timeout, call=call)
        return SealedReplies(sent, self._calls, self._told)


@dataclass(frozen=True)
class SealedReplies:
    """Replies to sealed calls: what does not open is no reply.

    That is told once: one that was started anew has no keys until all go on in another job, and is
    asked many times a second whether it is back.
    """

    sent: Mapping[str, tuple[int, Replies]]
    calls: Calls
    told: set[str]

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""
        return all(replies.done() for _, replies in self.sent.values())

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the replies by site."""
        found = {}
        for name, (number, replies) in self.sent.items():
            reply = replies.wait().get(name)
            if reply is None:
                continue
            try:
                found[name] = from_bytes(self.calls.reply(name, number, _sealed_in(reply)))
            except (MaskError, ValueError) as error:
                said = f"{name}: what came as its reply is left out: {error}"
                if said not in self.told:
                    self.told.add(said)
                    logger.warning(said)
        return found


def answered(
    calls: Calls, call: Any, answer: Callable[[str, str, dict[str, Any]], Any]
) -> dict[str, Any]:
    """Return the sealed reply to a sealed call, by what answers (caller, method, arguments).

    What is not a call by a site that is known, or was there before, is a `MaskError`.
    """
    fields = call if isinstance(call, dict) else {}
    by, number = fields.get("by"), fields.get("number")
    if not isinstance(by, str) or type(number) is not int:
        raise MaskError("a call must be sealed by the site that calls")
    content = calls.take(by, number, _sealed_in(call))
    try:
        asked = from_bytes(content)
        method, arguments = str(asked["method"]), dict(asked["arguments"])
    except (ValueError, TypeError, LookupError) as error:
        raise MaskError(f"a call by {by!r} names no method and arguments") from error
    return {"sealed": _as_array(calls.answer(by, number, to_bytes(answer(by, method, arguments))))}


class KnownKeys:
    """The keys of other sites.

    Those that were compared, or each as it was first seen, as `ssh` does.

    Args:
        folder: the site's.
        compared: the fingerprints in its settings, of all sites; when empty, first sight decides.
    """

    def __init__(self, folder: Path, compared: Mapping[str, str]) -> None:
        self.path, self.compared = folder / KNOWN_KEYS, dict(compared)

    def __call__(self) -> dict[str, str]:
        """Return the fingerprints that are known."""
        if self.compared or not self.path.exists():
            return self.compared
        known = files.read_json(self.path, f"{FORGET} {self.path}")
        return {str(site): str(fingerprint) for site, fingerprint in known.items()}

    def add(self, found: Mapping[str, str]) -> None:
        """Remember keys that were seen for the first time."""
        known = self()
        if not self.compared and not found.keys() <= known.keys():
            files.write_json(self.path, {**found, **known})
            self.path.chmod(0o600)


def _as_array(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype=np.uint8)


def _sealed_in(message: Any) -> bytes:
    sealed = message.get("sealed") if isinstance(message, dict) else None
    if not isinstance(sealed, np.ndarray) or sealed.dtype != np.uint8 or sealed.ndim != 1:
        raise MaskError("it is not sealed")
    return sealed.tobytes()
