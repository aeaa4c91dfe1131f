"""What a site answers, whatever carries the messages: gradients, or its part of sums that hide the parts."""

import functools
from typing import Any

import torch

from coterie.engines.flare.messages import answer_message
from coterie.engines.peer import Peer
from coterie.errors import MaskError
from coterie.privacy.keys import Identity, check_known
from coterie.privacy.masks import Agreement, Masks, digest_of
from coterie.privacy.sums import SumsOnly


class Responder:
    """A site in one job. It gives its gradients, or with `sums` its part of masked sums and nothing else.

    In a job the sites of its sums are those of the first, less those that were lost since, and each keeps its
    weight. A sum needs the site's own consent, by `sums`, to its sites and weights.

    Args:
        peer: what computes the gradients.
        sums: which sums it takes part in. With None it also gives gradients on their own, and takes part in the
            sums that `SumsOnly()` allows.

    Example:
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
        self._private: Any = None  # the key of the offer that is open
        self._masks: Masks | None = None
        self._last: Agreement | None = None  # what it has agreed to last
        self._round = -1

    def ready(self) -> dict[str, Any]:
        """Say whether there is a gradient to give, and what is given at most."""
        return self.peer.terms() | ({"sums_of": self.sums.peers} if self.only_sums else {})

    def gradients(self, request: Any, caller: str = "user 0") -> dict[str, Any]:
        """Return the gradients asked for, or why there are none; see `Peer.answer`."""
        if self.only_sums:
            return self._refused("it gives masked sums only; set `secure_sums` in [training]", caller, request)
        return answer_message(self.peer, caller, request)

    def offer(self) -> dict[str, Any]:
        """Return a new key for one agreement."""
        self._private, offer = self.identity.offer()
        return offer.message()

    @functools.cached_property
    def identity(self) -> Identity:
        """By what the other sites know it; the same in all jobs where its secret is kept."""
        return Identity(self.peer.user.name, self.peer.secret_for("identity in masked sums"))

    def join(self, agreement: Any, caller: str = "user 0") -> dict[str, Any]:
        """Take part in the sums of an agreement, with the key offered last; say so, or why not."""
        private, self._private, self._masks = self._private, None, None
        try:
            agreed = Agreement.read(agreement)
            self._check(agreed, private)
            masks = Masks(self.peer.user.name, private, agreed)
        except Exception as error:
            reason = str(error) if isinstance(error, MaskError) else f"it failed with {type(error).__name__}"
            return self._refused(reason, caller, {})
        for site, offer in agreed.offers.items():
            self.peer.ledger.note(caller=caller, sum_with=site, fingerprint=offer.fingerprint)
        self._masks, self._last, self._round = masks, agreed, -1
        return {"joined": agreed.digest.hex()}

    def part(self, request: Any, caller: str = "user 0") -> dict[str, Any]:
        """Return the masked part of a sum: the gradients asked for, by their weight, or why there are none.

        The masks are those of this request, and its `round` must be larger than the last, so that no mask is used
        twice.
        """
        try:
            context, masks = digest_of(request), self._next_round(request)
            reply = answer_message(self.peer, caller, request)
            if "gradients" not in reply:
                return reply
            gradients = reply.pop("gradients")
            return reply | {"round": self._round, "part": masks.masked(gradients, context)}
        except Exception as error:
            reason = str(error) if isinstance(error, MaskError) else f"it failed with {type(error).__name__}"
            return self._refused(reason, caller, request)

    def _next_round(self, request: Any) -> Masks:
        fields = request if isinstance(request, dict) else {}
        at = fields.get("round")
        if self._masks is None:
            raise MaskError("it has joined no sum")
        if fields.get("work") is not None:  # what is added to a gradient would tell by refusals where it lies
            raise MaskError("it adds gradients under masks, not steps of its own")
        if type(at) is not int or not self._round < at < 2**62:
            raise MaskError("the number of a round must be larger than the last")
        self._round = at
        return self._masks

    def _check(self, agreed: Agreement, private: Any) -> None:
        """Refuse an agreement that this site does not consent to."""
        me, weights = self.peer.user.name, agreed.weights
        key = None if private is None else private.public_key().public_bytes_raw()
        if me not in weights or agreed.offers[me].key != key:
            raise MaskError("it has not offered this key")
        if not self.sums.allowed(torch.tensor([list(weights.values())], dtype=torch.float64)).item():
            raise MaskError(f"it gives {self.sums}")
        check_known(agreed.offers, self.sums.keys, me)
        if self._last is not None:
            _check_same_job(self._last, agreed)

    def _refused(self, reason: str, caller: str, request: Any) -> dict[str, Any]:
        step = request.get("step") if isinstance(request, dict) else None
        return {"refused": self.peer.refuse(reason, caller, step).refused}


def _check_same_job(before: Agreement, agreed: Agreement) -> None:
    """Refuse an agreement that is not the one before, less some sites: sums could be compared by it."""
    if any(before.weights.get(site) != weight for site, weight in agreed.weights.items()):
        raise MaskError("in a job the sites of a sum and their weights stay: sites may be lost, not join")
    if before.largest != agreed.largest:  # refusals would tell how large its entries are
        raise MaskError("in a job the largest entry of a sum stays")
    if any(before.offers[site].identity != offer.identity for site, offer in agreed.offers.items()):
        raise MaskError("in a job a site keeps the key that it is known by")
