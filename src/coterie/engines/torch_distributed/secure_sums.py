"""Masked sums under torch.distributed.

What passes from rank to rank, and what user 0 gets of one peer, is noise.

Peers agree by notes, when user 0 says so in a message. The parts are added up on the way, as whole
numbers.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from coterie.engines.peer import Peer
from coterie.engines.requests import Request, to_array
from coterie.engines.torch_distributed.group import Group
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.wire import Notes, Outcome, Wire
from coterie.errors import MaskError
from coterie.gradients.gradients import Gradients
from coterie.privacy.masked_sums import MaskedSums
from coterie.privacy.masks import N_CHECKS, Words, digest_of
from coterie.privacy.member import Member
from coterie.privacy.sums import SumsOnly

logger = logging.getLogger(__name__)

ASKS = {"offer": Ask.OFFER, "join": Ask.JOIN}


class SecureSums:
    """The masked sums of one run, for user 0.

    See `MaskedSums`. What a message raises is left to the engine.
    """

    def __init__(self, sums: MaskedSums, group: Group, wire: Wire, names: Sequence[str]) -> None:
        self.sums, self._group, self._wire, self._names = sums, group, wire, names
        self._number = 0  # of the agreement that is being made

    def agree(self, weights: Mapping[str, float], step: int) -> bool:
        """Say whether there is a sum to be had, after peers have agreed on keys where they must."""
        return self.sums.agree(weights, step, self._asked) is not None

    def with_sum(
        self,
        mine: Gradients,
        answers: Tensor,
        notes: Mapping[str, Notes],
        weights: Mapping[str, float],
        step: int,
    ) -> Gradients:
        """Return user 0's gradient together with the sum in an answer."""
        told = {name: notes[name].outcomes[0] for name, weight in weights.items() if weight}
        missing = {
            name: "refused" if outcome is Outcome.REFUSED else "no answer"
            for name, outcome in told.items()
            if outcome is not Outcome.GRADIENT and name not in self.sums.lost
        }
        words = to_array(answers[: self._wire.n_numbers + N_CHECKS]).view(np.uint32)
        return self.sums.with_sum(mine, *self.sums.added(words, missing, step), weights)

    def _asked(self, names: Sequence[str], method: str, **arguments: Any) -> Mapping[str, Any]:
        """Ask peers to leave a note, and return the notes by name."""
        self._number += method == "offer"
        for argument, value in arguments.items():
            self._group.leave_note(_key(argument, self._number), value)
        self._wire.request.ask(ASKS[method], self._number)
        self._wire.send_request().wait()
        ranks = {name: 1 + self._names.index(name) for name in names}
        return {
            name: self._group.read_note(_key(method, self._number, rank), name)
            for name, rank in ranks.items()
        }


class MaskedPart:
    """A peer's part of masked sums, of which it says itself which ones.

    Args:
        peer: what computes the gradients.
        sums: which sums it takes part in.
        group: where notes are left.
        run: user 0's note of the run, which all peers must have alike.
        constants: the tensors of the model that are not trained, in the same way.
        masked_only: it gives nothing that is not masked.
    """

    def __init__(
        self,
        peer: Peer,
        sums: SumsOnly,
        group: Group,
        run: dict[str, Any],
        constants: dict[str, Any],
        *,
        masked_only: bool,
    ) -> None:
        self.peer, self._group, self._batch_size = peer, group, run["batch_size"]
        self._shared = digest_of({"run": run, "constants": constants}).hex()
        how = {"private": peer.is_private, "masked_only": masked_only}
        self.member = Member(peer.identity, sums, peer.margin, **how)
        self._takes_part, self._round = False, 0
        logger.warning(
            "%s: masked sums; its key has the fingerprint %s",
            peer.user.name,
            peer.identity.fingerprint,
        )

    def agree(self, ask: Ask, number: int) -> None:
        """Offer a key, or join the sums of an agreement if it is to take part and consents."""
        rank = self._group.rank
        if ask is Ask.OFFER:
            offer = self.member.offer() | self.peer.noise_terms(self._batch_size)
            self._group.leave_note(_key("offer", number, rank), offer)
            return
        agreement = self._group.read_note(_key("agreement", number), "user 0", weights=dict)
        self._takes_part, self._round = self.peer.user.name in agreement["weights"], 0
        if self._takes_part:
            self._group.leave_note(_key("join", number, rank), self._joined(agreement))

    def _joined(self, agreement: dict[str, Any]) -> dict[str, Any]:
        try:
            agreed = self.member.join(agreement)
        except MaskError as error:
            return {"refused": self.peer.refuse(str(error)).refused}
        for name, offer in agreed.offers.items():
            self.peer.ledger.note(sum_with=name, fingerprint=offer.fingerprint)
            if name != self.peer.user.name:
                logger.warning(
                    "%s: masked sums with %s, whose key is %s",
                    self.peer.user.name,
                    name,
                    offer.fingerprint,
                )
        return {"joined": agreed.digest.hex()}

    def of(self, request: Request, message: Tensor) -> tuple[Words | None, Outcome]:
        """Return the part of the next sum, under masks of the message, and what became of the request."""
        if not self._takes_part:
            return None, Outcome.NOTHING
        self._round += 1  # all peers count alike, since all get every message
        try:
            context = digest_of(
                {"shared": self._shared, "round": self._round, "message": message.cpu().numpy()}
            )
            masks = self.member.next_round(self._round, request.work)
            reply = self.peer.answer(
                request, share=masks.agreement.share_of(masks.site), masked=True
            )
            if reply.gradients is None:
                return None, Outcome.REFUSED
            part = masks.masked(to_array(reply.gradients), context)
        except MaskError as error:
            self.peer.refuse(str(error), step=request.step)
            return None, Outcome.REFUSED
        return part, Outcome.GRADIENT


def constants_of(model: nn.Module) -> dict[str, Any]:
    """Return the tensors of a model that are not trained, as arrays by name."""
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    return {name: to_array(tensor) for name, tensor in (*frozen.items(), *model.named_buffers())}


def _key(what: str, number: int, rank: int | None = None) -> str:
    return f"sums/{number}/{what}" + ("" if rank is None else f"/{rank}")
