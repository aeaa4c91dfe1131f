"""Between organisations, where user 0 sees the sum of the sites' gradients and nobody's own."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.engines.engine import Capabilities
from coterie.engines.flare.messages import pack_request, read_part, request_bytes
from coterie.engines.flare.sites import Replies, Sites
from coterie.engines.in_process.engine import InProcess
from coterie.engines.requests import Request
from coterie.errors import KnobError, MaskError, printable
from coterie.gradients.gradients import Gradients, complete
from coterie.gradients.trained_part import frozen_digest
from coterie.privacy.keys import Offer
from coterie.privacy.masks import Agreement, Words, total
from coterie.recording.traffic import Traffic
from coterie.users.user import Loss, User, check_names

logger = logging.getLogger(__name__)

MASKED = "masked by one that is missing"


class SecureSums:
    """The weighted sum of the gradients of peers in other organisations, each of which is under masks.

    Sites agree on keys, which user 0 passes on, and on τ, which stays for the run. Without the part of one site the
    others' are noise: a step in which one is missing is taken alone. One that gives no answer is lost for this job,
    and so is one that refuses `misses` times in a row; the others then agree on new keys.

    Args:
        model, loss, me, peers, sites, names, batch_size, seed, timeout: as for `Flare`.
        misses: steps in a row after which a site that refuses is lost.
        minimum: how many peers there must be for a step to use their sum.
        largest: what no entry of a gradient may exceed; the error of a sum is about 1e-9 of it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User] = (),
        *,
        sites: Sites,
        names: Sequence[str],
        batch_size: int = 32,
        seed: int = 0,
        timeout: float = 10.0,
        misses: int = 3,
        minimum: int = 1,
        largest: float = 16.0,
    ) -> None:
        for knob, least in {"misses": misses, "minimum": minimum}.items():
            if least < 1:
                raise KnobError(f"`{knob}` must be at least 1, got {least}")
        for knob, value in {"timeout": timeout, "largest": largest}.items():
            if not 0 < value < 1e30:
                raise KnobError(f"`{knob}` must be positive, got {value}")
        if peers:
            raise KnobError(f"`peers` must be empty, got {len(peers)}: the peers' examples are at their sites")
        check_names([me.name, *names])
        self.names, self.sites, self.batch_size, self.seed = tuple(names), sites, batch_size, seed
        self.timeout, self.misses, self.minimum, self.largest = timeout, misses, minimum, float(largest)
        self.own = InProcess(model, loss, me, batch_size=batch_size, seed=seed)
        self._traffic = {name: Traffic() for name in (me.name, *names)}
        self._mine = self._traffic[me.name]
        self._frozen = frozen_digest(model)
        self._tau: dict[str, float] = {}  # that of the first step
        self._agreed: Agreement | None = None
        self._round = 0  # it goes on over agreements, so that a late request is of none but its own
        self._lost: dict[str, str] = {}  # why
        self._refusals = dict.fromkeys(names, 0)  # in a row

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do: sums, and nothing else."""
        return Capabilities(rows=False, batch_size=self.batch_size, examples=self.own.capabilities.examples)

    @property
    def lost(self) -> Mapping[str, str]:
        """The sites that are no longer asked, each with the reason."""
        return self._lost

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return the own gradient and the peers' sum at x; see `Engine.gradients`."""
        if rows:
            raise KnobError("masked sums have no rows; use a rule that needs none, with `rows=False`")
        sent = self._send(x, step, {name: float(weight) for name, weight in weights.items() if weight})
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        self._mine.seconds_computing += time.perf_counter() - began
        if not weights:
            return mine
        found, left_out = (None, {}) if sent is None else self._added(sent.wait(), step, x)
        left_out |= {name: self._lost[name] for name in weights if name in self._lost and name not in left_out}
        left_out |= {name: "too few sites for a sum" for name in weights if sent is None and name not in left_out}
        answered = 0.0 if found is None or self._agreed is None else sum(self._agreed.weights.values())
        peers, answered = complete(mine.own, mine.own if found is None else found, answered)
        return replace(mine, peers=peers, answered=answered, left_out=left_out)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        knobs = {name: getattr(self, name) for name in ("timeout", "misses", "minimum", "largest")}
        peers = dict.fromkeys(self.names, "at its site")
        return self.own.describe() | {"engine": "NVFLARE, masked sums", "peers": peers} | knobs

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, by user; a site's waiting is not known here."""
        return self._traffic

    def close(self) -> None:
        """Do nothing: the sites are let go where the job ends."""

    def _send(self, x: Tensor, step: int, weights: dict[str, float]) -> Replies | None:
        """Ask the sites for their parts, and return what waits for them; None where there is no sum to be had."""
        if not weights:
            return None
        if self._tau and weights != self._tau:
            raise KnobError(f"`tau` must stay as it is where sums are masked: step {step} has other weights")
        self._tau = weights
        if self._agreed is None:
            self._agreed = self._agree(step)
        if self._agreed is None:
            return None
        buffers = {name: buffer[None] for name, buffer in self.own.passes.model.named_buffers()}
        request = Request(x.detach()[None], step, self.seed, self.batch_size, buffers, self._frozen)
        self._round += 1
        message = pack_request(request) | {"round": self._round}
        names, size = list(self._agreed.weights), request_bytes(message)
        self._mine.bytes_sent += size * len(names)
        self._mine.messages += len(names)
        for name in names:
            self._traffic[name].bytes_received += size
        return self.sites.ask(names, "part", self.timeout, request=message)

    def _agree(self, step: int) -> Agreement | None:
        """Let the sites that are left agree on keys; None where too few are left."""
        while len(here := [name for name in self._tau if name not in self._lost]) >= max(2, self.minimum):
            offers, replies = {}, self.sites.ask(here, "offer", self.timeout).wait()
            for name in here:
                try:
                    offers[name] = Offer.read(name, replies.get(name))
                except MaskError as error:
                    self._lose(name, step, "no answer" if replies.get(name) is None else str(error))
            if len(offers) < len(here):
                continue
            agreed = Agreement({name: self._tau[name] for name in here}, self.largest, offers)
            replies = self.sites.ask(here, "join", self.timeout, agreement=agreed.message()).wait()
            for name in here:
                if (reason := _why_not_joined(replies.get(name), agreed)) is not None:
                    self._lose(name, step, reason)
            if not self._lost.keys() & set(here):
                logger.warning("step %d: masked sums of %s", step, ", ".join(here))
                return agreed
        return None

    def _added(self, replies: Mapping[str, Any], step: int, x: Tensor) -> tuple[Tensor | None, dict[str, str]]:
        """Return the sum of all parts, and why there is none."""
        agreed = self._agreed
        if agreed is None:
            raise TypeError("parts of a sum that nobody has agreed on")
        parts: list[Words] = []
        left_out: dict[str, str] = {}
        for name in agreed.weights:
            part = read_part(name, replies.get(name), step, self._round, x.numel())
            if isinstance(part, str):
                left_out[name] = part
                self._miss(name, step, part)
                continue
            self._refusals[name] = 0
            parts.append(part)
            self._mine.bytes_received += part.nbytes
            self._traffic[name].bytes_sent += part.nbytes
            self._traffic[name].messages += 1
        if left_out:
            return None, left_out | {name: MASKED for name in agreed.weights if name not in left_out}
        try:
            return torch.from_numpy(total(parts, agreed)).to(x), {}
        except MaskError as error:
            for name in agreed.weights:
                self._lose(name, step, printable(error))
            return None, dict.fromkeys(agreed.weights, printable(error))

    def _miss(self, name: str, step: int, reason: str) -> None:
        """Count a refusal; one that gives no answer at all, or nonsense, is lost at once."""
        self._refusals[name] += 1
        if not reason.startswith("refused") or self._refusals[name] >= self.misses:
            self._lose(name, step, reason)

    def _lose(self, name: str, step: int, reason: str) -> None:
        self._lost[name], self._agreed = reason, None
        logger.warning("step %d: %s is lost (%s); the others agree on new keys", step, name, reason)


def _why_not_joined(reply: Any, agreed: Agreement) -> str | None:
    fields = reply if isinstance(reply, dict) else {}
    joined, refused = fields.get("joined"), fields.get("refused")
    if isinstance(joined, str) and joined == agreed.digest.hex():
        return None
    if isinstance(refused, str):
        return "refused: " + printable(refused, 150)
    return "no answer" if reply is None else "has not joined the sum"
