"""A peer in masked sums, whatever carries the messages.

Its keys, what it has agreed to, the masks of its parts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from coterie.errors import KnobError, MaskError, printable
from coterie.privacy.keys import Giving, Identity, check_known, private_key
from coterie.privacy.masks import LEAST_UNITS, Agreement, Masks
from coterie.privacy.sums import COARSEST, LARGEST, SumsOnly

MAX_ROUND = 2**62


class Member:
    """A peer in the masked sums of one job.

    Nothing leaves under masks but by its own consent, `sums`.

    In a job the sites of its sums are those of the first, less those that were lost since, and each
    keeps its weight. No mask is used twice: a round is larger than the last.

    Args:
        identity: by what the others know it.
        sums: which sums it takes part in.
        private: its gradients have noise. Where they have none, it weighs as much as each other
            site: from Σ τ_k c_k with unequal τ, and c_k that are counts, each c_k can be told.
        margin: it splits its noise with the other sites, of which so many may tell theirs; see
            `Privacy`.
        masked_only: it gives gradients under masks only. Sites that give theirs more freely then do
            not count: user 0 could have their gradients otherwise, and take them off the sum.

    Example:
        >>> members = {site: Member(Identity(site), SumsOnly()) for site in ("basel", "bern", "biel")}
        >>> offers = {site: member.offer() for site, member in members.items()}
        >>> told = {"weights": dict.fromkeys(offers, 1 / 3), "largest": 16.0, "offers": offers}
        >>> [len(member.join(told).offers) for member in members.values()]
        [3, 3, 3]
        >>> members["basel"].next_round(1).site
        'basel'
        >>> members["basel"].next_round(1)
        Traceback (most recent call last):
        ...
        coterie.errors.MaskError: the number of a round must be larger than the last
    """

    def __init__(
        self,
        identity: Identity,
        sums: SumsOnly,
        margin: int | None = None,
        *,
        private: bool = False,
        masked_only: bool = True,
    ) -> None:
        check_margin(margin, sums)
        self.identity, self.sums, self.private, self.margin = identity, sums, private, margin
        self.giving = (
            Giving.PLAIN if not masked_only else Giving.KNOWN_KEYS if sums.keys else Giving.MASKED
        )
        self._private: Any = None  # the key of the offer that is open
        self._joined: Any = None  # that of the agreement
        self._masks: Masks | None = None
        self._last: Agreement | None = None  # what it has agreed to last
        self._round = -1

    def offer(self) -> dict[str, str]:
        """Return a new key for one agreement."""
        self._private, offer = self.identity.offer(self.giving)
        return offer.message()

    def join(self, message: Any) -> Agreement:
        """Take part in the sums of an agreement, with the key offered last.

        A `MaskError` where it does not.
        """
        self._joined, self._private, self._masks = self._private, None, None
        agreed = Agreement.read(message)
        self._check(agreed, self._joined)
        self._masks = Masks(self.identity.site, self._joined, agreed)
        self._last, self._round = agreed, -1
        return agreed

    def kept(self) -> dict[str, Any]:
        """Return, as plain data, what another process needs to go on in this job: a secret."""
        keys = {"offered": self._private, "joined": self._joined if self._masks else None}
        last = None if self._last is None else self._last.message()
        told = {name: key and key.private_bytes_raw().hex() for name, key in keys.items()}
        return told | {"last": last, "round": self._round}

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Go on in a job from what `kept` has returned; in a new one where that is empty."""
        keys = {name: kept.get(name) for name in ("offered", "joined")}
        self._private, self._joined = (
            key and private_key(bytes.fromhex(key)) for key in keys.values()
        )
        self._last = Agreement.read(kept["last"]) if kept.get("last") else None
        self._masks = (
            Masks(self.identity.site, self._joined, self._last)
            if self._joined and self._last
            else None
        )
        self._round = kept.get("round", -1)

    def next_round(self, number: Any, work: object = None) -> Masks:
        """Return the masks of the next round, which are good for one part.

        None for steps of its own.
        """
        if self._masks is None:
            raise MaskError("it has joined no sum")
        if work is not None:
            raise MaskError("it adds gradients under masks, not steps of its own")
        if type(number) is not int or not self._round < number < MAX_ROUND:
            raise MaskError("the number of a round must be larger than the last")
        self._round = number
        return self._masks

    def _check(self, agreed: Agreement, private: Any) -> None:
        """Refuse an agreement that this peer does not consent to."""
        me, weights = self.identity.site, agreed.weights
        key = None if private is None else private.public_key().public_bytes_raw()
        if me not in weights or agreed.offers[me].key != key:
            raise MaskError("it has not offered this key")
        check_known(agreed.offers, self.sums.keys, me)
        freer = [
            site
            for site, offer in agreed.offers.items()
            if site != me and offer.giving < self.giving
        ]
        counted = [weight for site, weight in weights.items() if site not in freer]
        if not self.sums.allowed(torch.tensor([counted], dtype=torch.float64)).item():
            giving = "give masked sums only"
            if self.giving is Giving.KNOWN_KEYS:
                giving = "know the others' keys"
            but = (
                f"; {printable(freer[0], 50)!r} does not {giving}, and does not count"
                if freer
                else ""
            )
            raise MaskError(f"it gives {self.sums}{but}")
        if not self.private and len(set(weights.values())) > 1:
            raise MaskError(
                "it weighs as much as each other site of a sum, and this sum has unequal weights"
            )
        if not self.private and not LARGEST <= agreed.largest <= COARSEST:
            raise MaskError(
                f"the largest entry of a sum must lie in [{LARGEST:g}, {COARSEST:g}], got"
                f" {agreed.largest:g}"
            )
        self._check_noise(agreed)
        if self._last is not None:
            _check_same_job(self._last, agreed)

    def _check_noise(self, agreed: Agreement) -> None:
        """Refuse a sum whose noise is split where this peer's is not, or the other way round, or by too few."""
        share = agreed.share_of(self.identity.site)
        if (share is None) != (self.margin is None):
            said = "splits its noise" if share is None else "does not split its noise"
            raise MaskError(f"it {said} over the sites of a sum, and the sum says otherwise")
        if share is not None and self.margin is not None and share.margin < self.margin:
            raise MaskError(
                f"the sum's noise has a margin of {share.margin} sites, and it asks for"
                f" {self.margin}"
            )
        if share is not None and agreed.units_of_noise < LEAST_UNITS:
            raise MaskError(
                f"the noise would be rounded away where entries may be {agreed.largest:g}"
            )


def check_margin(margin: int | None, sums: SumsOnly | None) -> None:
    """Refuse to split noise where there is nobody to split it with.

    Without masks, or where sites are not known.
    """
    if margin is None:
        return
    if sums is None:
        raise KnobError(
            "`margin` splits the noise over the sites of masked sums, and this peer gives its"
            " gradients on their own too, with too little noise; give masked sums only (`[sums]`,"
            " `secure_sums`), or leave `margin` out"
        )
    if not sums.keys:
        raise KnobError(
            "`margin` splits the noise over other sites, and user 0 could be all of them: tell the"
            " fingerprints of their keys (`keys` in [sums]; a site sees its own while it leaves"
            " `margin` out), or leave `margin` out"
        )
    if not margin < sums.peers:
        raise KnobError(f"`margin` must be less than `peers` of a sum, {sums.peers}, got {margin}")


def _check_same_job(before: Agreement, agreed: Agreement) -> None:
    """Refuse an agreement that is not the one before, less some sites.

    Sums could be compared by it.
    """
    if any(before.weights.get(site) != weight for site, weight in agreed.weights.items()):
        raise MaskError(
            "in a job the sites of a sum and their weights stay: sites may be lost, not join"
        )
    if before.largest != agreed.largest:
        raise MaskError("in a job the largest entry of a sum stays")
    if any(before.offers[site].identity != offer.identity for site, offer in agreed.offers.items()):
        raise MaskError("in a job a site keeps the key that it is known by")
