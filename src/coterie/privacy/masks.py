"""Sums that hide their parts.

Every site adds masks to its part, and the masks of all sites cancel in the sum.

Parts are whole numbers modulo 2³². Each pair of sites has a mask that one adds and the other takes
away. It is made from a secret of the two, from what they agreed on, and from every word of the
request: sites that were asked different things have different masks, and their sum is noise.
"""

import hashlib
import hmac
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coterie.errors import KnobError, MaskError, printable
from coterie.privacy.keys import (
    Giving,
    Identity,
    Offer,
    check_known,
    key_stream,
    private_key,
    shared_secret,
)
from coterie.privacy.sums import COARSEST, LARGEST, ROUNDING, SumsOnly

N_CHECKS = 4
"""How many zeros a part has at its end.

Their sum is zero where the masks cancel, else with a chance of 2⁻¹²⁸.
"""

CHUNK = 2**16
"""So many numbers are masked at a time, so that they stay near the processor."""

HEADROOM = 4.0
"""The whole numbers have room for so many times the largest sum.

A sum beyond it wraps around, as a whole: no part is cut, since where it is would tell of one site.
Of the numbers that wrap three in four are seen to be too large.
"""

EXACT = 2.0**50
"""Up to so many units a part is exact in double precision, dither and all.

One that is larger, or not finite, is spoiled: user 0 gets no sum, and does not see by whom.
"""

LEAST_UNITS = 4.0
"""So many units must a share of noise have.

Then it hides what is lost when a part is rounded to a whole number.
"""

MAX_SITES = 1000
MAX_DEPTH = 4

Words = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the sites of a sum agree on.

    Args:
        weights: τ, the weight of each site.
        largest: what no entry of the sum exceeds; user 0 believes none that does.
        offers: the key of each site.
        noise: the standard deviation of the noise that the sum has, where the sites split it: also
            without that of `margin` of them. Each site adds a share.
        margin: see there.
    """

    weights: Mapping[str, float]
    largest: float
    offers: Mapping[str, Offer]
    noise: float = 0.0
    margin: int = 0

    def message(self) -> dict[str, Any]:
        """Return it as plain data."""
        offers = {site: offer.message() for site, offer in self.offers.items()}
        plain = {"weights": dict(self.weights), "largest": self.largest, "offers": offers}
        return plain | {"noise": self.noise, "margin": self.margin}

    @classmethod
    def read(cls, message: Any) -> "Agreement":
        """Return the agreement in a message; a `MaskError` where it is not one."""
        fields = message if isinstance(message, dict) else {}
        weights, largest, offers = (
            fields.get(name, 0) for name in ("weights", "largest", "offers")
        )
        if not isinstance(weights, dict) or not 2 <= len(weights) <= MAX_SITES:
            raise MaskError(f"a sum must have from 2 to {MAX_SITES} sites")
        if not all(
            isinstance(site, str) and _is_positive(weight) for site, weight in weights.items()
        ):
            raise MaskError("the weights of a sum must be positive numbers by site")
        if not _is_positive(largest):
            raise MaskError("the largest entry of a sum must be a positive number")
        noise, margin = fields.get("noise", 0.0), fields.get("margin", 0)
        if not (_is_positive(noise) or (type(noise) in (int, float) and noise == 0)):
            raise MaskError("the noise of a sum must be a number, at least 0")
        if type(margin) is not int or not 0 <= margin < len(weights):
            raise MaskError(
                "the margin of a sum must be a whole number, less than that of its sites"
            )
        if not isinstance(offers, dict) or set(offers) != set(weights):
            raise MaskError("every site of a sum must have a key, and nobody else")
        read = {site: Offer.read(site, offer) for site, offer in offers.items()}
        if len(
            {offer.key for offer in read.values()} | {o.identity for o in read.values()}
        ) != 2 * len(read):
            raise MaskError("two sites of a sum have the same key")
        return cls(weights, float(largest), read, float(noise), margin)

    @property
    def digest(self) -> bytes:
        """What is the same at all sites that agreed on the same."""
        return digest_of(self.message())

    def share_of(self, site: str) -> "NoiseShare | None":
        """Return the noise that this site is to add; None where none is split.

        Each adds 1/(n − m) of the variance, so that any n − m sites have it all.

        Example:
            >>> agreed = Agreement({"a": 0.4, "b": 0.3, "c": 0.3}, 16.0, {}, noise=0.06, margin=1)
            >>> share = agreed.share_of("b")
            >>> round(share.of_sum, 6), round(share.added, 6)
            (0.2, 0.141421)
        """
        if not self.noise:
            return None
        of_sum, sites = self.noise / self.weights[site], len(self.weights)
        added = of_sum / math.sqrt(sites - self.margin)
        return NoiseShare(added, of_sum, sites, self.margin)

    @property
    def units_of_noise(self) -> float:
        """How many units of the whole numbers the share of each site has, where noise is split."""
        return self.noise * self.scale / math.sqrt(len(self.weights) - self.margin)

    @property
    def scale(self) -> float:
        """How many units of the whole numbers are 1."""
        return 2.0**31 / (HEADROOM * self.largest * math.fsum(self.weights.values()))


@dataclass(frozen=True)
class NoiseShare:
    """The noise that one site adds to its gradient so that a sum has enough, as standard deviations.

    All are in units of its gradient: what the sum has, divided by its weight.
    """

    added: float
    of_sum: float
    sites: int
    margin: int


class Masks:
    """The masks of one site in the sums of one agreement.

    Example:
        >>> from coterie.privacy.keys import Identity
        >>> made = {site: Identity(site).offer() for site in ("basel", "bern", "biel")}
        >>> offers = {site: offer for site, (_, offer) in made.items()}
        >>> agreed = Agreement({"basel": 0.5, "bern": 0.25, "biel": 0.25}, 10.0, offers)
        >>> masks = [Masks(site, private, agreed) for site, (private, _) in made.items()]
        >>> parts = [each.masked(np.array([k, -4.0]), b"step 0") for k, each in enumerate(masks)]
        >>> total(parts, agreed).round(6)
        array([ 0.75, -4.  ])
        >>> parts[0] = masks[0].masked(np.array([0.0, -4.0]), b"step 1")
        >>> total(parts, agreed)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        coterie.errors.MaskError: the masks do not cancel: ...
    """

    def __init__(self, site: str, private: Any, agreement: Agreement) -> None:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.site, self.agreement = site, agreement
        self._keys: dict[str, bytes] = {}
        for other, offer in agreement.offers.items():
            if other != site:
                derive = HKDF(
                    hashes.SHA256(),
                    length=32,
                    salt=agreement.digest,
                    info=b"coterie: masks of a pair",
                )
                self._keys[other] = derive.derive(shared_secret(private, offer))

    def masked(self, gradient: np.ndarray[Any, Any], context: bytes) -> Words:
        """Return τ_k g_k as whole numbers under the masks of this context, in which nothing else may be masked.

        No entry is cut or refused: that would tell of this site alone. So would the steps of
        rounding: before it, numbers of [-1, 1] are added, with which neither mean nor variance of
        the error depends on the entry (triangular dither). A gradient that is no sum's part, not
        finite or beyond `EXACT`, becomes random words: then nobody's masks cancel.
        """
        values, weight = gradient.ravel(), self.agreement.weights[self.site]
        part = np.zeros(values.size + N_CHECKS, np.uint32)
        if not np.abs(values, dtype=np.float64).max(initial=0.0) < EXACT / self.agreement.scale:
            return np.frombuffer(bytearray(secrets.token_bytes(part.nbytes)), np.uint32)
        zeros, mask = memoryview(bytes(4 * CHUNK)), np.empty(CHUNK, np.uint32)
        dither = _stream(secrets.token_bytes(32), b"")
        streams = [(_stream(key, context), self.site < other) for other, key in self._keys.items()]
        for start in range(0, len(part), CHUNK):
            chunk, here = values[start : start + CHUNK], part[start : start + CHUNK]
            dither.update_into(zeros[: 4 * len(chunk)], mask.data.cast("B"))
            here[: len(chunk)] = whole_numbers(
                chunk, weight, self.agreement, _triangular(mask[: len(chunk)])
            )
            for stream, adds in streams:
                stream.update_into(zeros[: here.nbytes], mask.data.cast("B"))
                (np.add if adds else np.subtract)(here, _little(mask[: len(here)]), out=here)
        return part


def whole_numbers(
    gradient: np.ndarray[Any, Any], weight: float, agreement: Agreement, dither: Any = 0.0
) -> Words:
    """Return τ_k g_k, whose entries have at most `EXACT` units, as whole numbers modulo 2³²."""
    if gradient.dtype.kind != "f":
        raise MaskError("a masked sum is of floating-point numbers, not rounded to 16 bits")
    values = np.multiply(gradient.ravel(), weight * agreement.scale, dtype=np.float64)
    values += dither
    whole: Words = np.rint(values, out=values).astype(np.int64).astype(np.uint32)
    return whole


def total(parts: Sequence[Words], agreement: Agreement) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return Σ τ_k g_k from the masked parts of all sites.

    A `MaskError` where the masks do not cancel.
    """
    added = np.zeros_like(parts[0])
    for part in parts:
        added += part
    return revealed(added, agreement)


def revealed(added: Words, agreement: Agreement) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return Σ τ_k g_k from parts that have been added up.

    A `MaskError` where the masks do not cancel, or a number is larger than any was to be.
    """
    if added[-N_CHECKS:].any():
        raise MaskError(
            "the masks do not cancel: the sites were not asked the same, or a gradient was not"
            " finite"
        )
    summed = added[:-N_CHECKS].view(np.int32) / agreement.scale
    most = agreement.largest * math.fsum(agreement.weights.values()) * (1 + ROUNDING)
    if np.abs(summed).max(initial=0.0) > most:
        raise MaskError(f"the sum has an entry beyond {agreement.largest:g}")
    return summed


def digest_of(value: Any) -> bytes:
    """Return a hash of plain data, in which any two different values differ.

    Example:
        >>> digest_of({"step": 1, "x": np.zeros(2)}) == digest_of({"x": np.zeros(2), "step": 1})
        True
        >>> digest_of(["a", "b"]) == digest_of(["ab"])
        Traceback (most recent call last):
        ...
        coterie.errors.MaskError: a request must be plain data, got a list
    """
    digest = hashlib.sha256()
    _encode(value, MAX_DEPTH, digest.update)
    return digest.digest()


def _encode(value: Any, depth: int, put: Callable[[Any], None]) -> None:
    """Write a value so that none begins with another: its kind, how long it is, what it holds."""
    if isinstance(value, dict) and depth and all(isinstance(key, str) for key in value):
        put(b"dict %d:" % len(value))
        for key in sorted(value):
            _encode(key, depth - 1, put)
            _encode(value[key], depth - 1, put)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        put(b"array %s %s:" % (value.dtype.str.encode(), repr(value.shape).encode()))
        put(np.ascontiguousarray(value).data)
    elif value is None or type(value) in (bool, int, float, str):
        text = repr(value).encode(errors="surrogatepass")
        put(b"%s %d:%s" % (type(value).__name__.encode(), len(text), text))
    else:
        raise MaskError(
            f"a request must be plain data, got a {printable(type(value).__name__, 50)}"
        )


def _stream(key: bytes, context: bytes) -> Any:
    """Return the stream of a pair of sites, or of one, for one context."""
    # HKDF's second half, of 32 bytes
    return key_stream(hmac.digest(key, b"coterie: a mask of " + context + b"\x01", "sha256"))


def _triangular(words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return for each word the sum of two uniform numbers of [-1/2, 1/2], made from its halves."""
    halves = words.view(np.uint16).reshape(-1, 2)
    return (halves[:, 0].astype(np.float64) + halves[:, 1]) / (2**16 - 1) - 1


def _little(words: Words) -> Words:
    """Return words of a stream as the same numbers on every machine."""
    return words.byteswap() if sys.byteorder == "big" else words


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 1e-30 < number < 1e30


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
