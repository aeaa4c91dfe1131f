"""What a site answers, whatever carries the messages.

Gradients, or its part of sums that hide the parts.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.engines.compression import HALVES, relative_error
from coterie.engines.messages import RefusedError, Reply, Request, decoded, encoded
from coterie.engines.peer import Peer
from coterie.errors import MaskError
from coterie.privacy.masks import Member, NoiseShare, check_margin, digest_of
from coterie.privacy.sums import SumsOnly

NO_POSTERIORS = "it adds gradients under masks, no posteriors; it may set `posteriors` in [sums]"

SUMS_OF_ROWS = {"gradient", "curvature"}
"""What of an E-step is the same whichever site has which row: from no sums can single sites' be told."""

METHODS = {"ready": False, "gradients": True, "offer": False, "join": True, "part": True}
"""What can be asked of a `Responder`, and whether it wants to know who asks."""


class Responder:
    """A site in one job. It gives its gradients, or with `sums` its part of masked sums and nothing else.

    Which sums it takes part in is its own decision; see `Member`.

    Args:
        peer: what computes the gradients.
        sums: which sums it takes part in. With None it also gives gradients on their own, and takes
            part in the sums that `SumsOnly()` allows.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from coterie import User
        >>> from coterie.engines.in_process.passes import Passes
        >>> user = User("a", torch.eye(2), torch.ones(2, 1))
        >>> peer = Peer(user, Passes(nn.Linear(2, 1), nn.functional.mse_loss))
        >>> Responder(peer, SumsOnly()).gradients({"step": 0})
        {'refused': 'it gives masked sums only; set `secure_sums` in [training]'}
    """

    def __init__(self, peer: Peer, sums: SumsOnly | None = None) -> None:
        self.peer, self.only_sums, self.sums = peer, sums is not None, sums or SumsOnly()
        check_margin(peer.margin, sums)
        self.known: dict[str, str] = {}  # the keys of those in the last agreement

    def answer(
        self, method: str, arguments: Mapping[str, Any], caller: str = "user 0"
    ) -> dict[str, Any]:
        """Answer what a transport has carried here, of what can be asked, from one it knows."""
        if not isinstance(method, str) or method not in METHODS:
            return {"refused": "there is no such question"}
        try:
            given = {**arguments, "caller": caller} if METHODS[method] else {**arguments}
            _signature(method).bind(self, **given)
        except TypeError:
            return {"refused": "the question has other arguments"}
        answer: dict[str, Any] = getattr(self, method)(**given)
        return answer

    def ready(self, batch_size: Any = None, gradients: Any = None) -> dict[str, Any]:
        """Say whether there is a gradient to give, and what is given at most; see `Peer.terms`."""
        terms = self.peer.terms(batch_size, gradients)
        if not self.only_sums:
            return terms
        why_not = terms["no_e_steps"] or ("" if self.sums.posteriors else NO_POSTERIORS)
        return terms | {"sums_of": self.sums.peers, "no_e_steps": why_not}

    def gradients(self, request: Any, caller: str = "user 0") -> dict[str, Any]:
        """Return the gradients asked for, or why there are none; see `Peer.answer`."""
        if self.only_sums:
            return self._refused(
                "it gives masked sums only; set `secure_sums` in [training]", caller, request
            )
        return answer_message(self.peer, caller, request)

    @functools.cached_property
    def member(self) -> Member:
        """What it is in masked sums."""
        return Member(
            self.peer.identity,
            self.sums,
            self.peer.margin,
            private=self.peer.privacy is not None,
            masked_only=self.only_sums,
        )

    def offer(self, batch_size: Any = None) -> dict[str, Any]:
        """Return a new key for one agreement, and the noise that the sum must have for such batches."""
        return self.member.offer() | self.peer.noise_terms(batch_size)

    def join(self, agreement: Any, caller: str = "user 0") -> dict[str, Any]:
        """Take part in the sums of an agreement, with the key offered last; say so, or why not."""
        try:
            agreed = self.member.join(agreement)
        except Exception as error:
            return self._refused(_reason(error), caller, {})
        self.known = {site: offer.fingerprint for site, offer in agreed.offers.items()}
        for site, offer in agreed.offers.items():
            self.peer.ledger.note(caller=caller, sum_with=site, fingerprint=offer.fingerprint)
        return {"joined": agreed.digest.hex()}

    def part(self, request: Any, caller: str = "user 0") -> dict[str, Any]:
        """Return the masked part of a sum.

        The gradients asked for, by their weight, or why there are none.

        The masks are those of this request, and its `round` must be larger than the last, so that
        no mask is used twice.
        """
        fields = request if isinstance(request, dict) else {}
        try:
            context = digest_of(request)
            masks = self.member.next_round(fields.get("round"), fields.get("work"))
            share, e_step = masks.agreement.share_of(masks.site), fields.get("e_step") or {}
            told = set(str(e_step.get("told", "")).split())
            if self.only_sums and not self.sums.posteriors and not told <= SUMS_OF_ROWS:
                return self._refused(NO_POSTERIORS, caller, request)
            reply = answer_message(self.peer, caller, request, share, masked=True)
            if "gradients" not in reply:
                return reply
            gradients = reply.pop("gradients")
            if e_step:  # its numbers are at most 1
                gradients = gradients * masks.agreement.largest
            part = masks.masked(gradients, context)
            return reply | {"round": fields["round"], "part": part}
        except Exception as error:
            return self._refused(_reason(error), caller, request)

    def _refused(self, reason: str, caller: str, request: Any) -> dict[str, Any]:
        step = request.get("step") if isinstance(request, dict) else None
        return {"refused": self.peer.refuse(reason, caller, step).refused}


@functools.cache
def _signature(method: str) -> inspect.Signature:
    return inspect.signature(getattr(Responder, method))


def reply_to(
    peer: Peer,
    caller: str,
    message: Any,
    share: NoiseShare | None = None,
    *,
    masked: bool = False,
    wanted: Sequence[bool] | None = None,
) -> Reply:
    """Return a peer's reply to a request as a message, at those points that are wanted.

    For a masked sum, with a share of its noise.

    Of an error only its kind leaves the site: its text may hold what is in the data.
    """
    try:
        request = Request.read(message, peer.passes.parameters)
        request = request if wanted is None else request.at(wanted)
        return peer.answer(request, caller, share, masked=masked)
    except RefusedError as refusal:
        step = message.get("step") if isinstance(message, dict) else None
        return peer.refuse(str(refusal), caller, step)
    except Exception as error:  # the log has it
        return Reply(refused=f"it failed with {type(error).__name__}")


def answer_message(
    peer: Peer, caller: str, message: Any, share: NoiseShare | None = None, *, masked: bool = False
) -> dict[str, Any]:
    """Return the same as a message."""
    reply = reply_to(peer, caller, message, share, masked=masked)
    if reply.gradients is None:
        return {"refused": reply.refused}
    about = {"site": peer.user.name, "step": message["step"]}
    about |= {"seconds": reply.seconds, "examples": reply.examples}
    about |= {} if reply.noise is None else {"noise": reply.noise}
    gradients, asked_as = reply.gradients, decoded(message["points"])
    # in half precision a share of noise could be rounded away
    plain = share is None and "e_step" not in message
    if plain and asked_as is not None and asked_as.dtype in HALVES.values():
        rounded = peer.rounded(gradients, asked_as.dtype, caller)
        # under masks it would tell of the gradient
        if not masked and (rounding := relative_error(gradients, rounded)):
            about["rounding"] = rounding
        gradients = rounded
    return {"gradients": encoded(gradients), **about}


def _reason(error: Exception) -> str:
    """Return what leaves of an error: its text may hold what is in the data."""
    return str(error) if isinstance(error, MaskError) else f"it failed with {type(error).__name__}"
