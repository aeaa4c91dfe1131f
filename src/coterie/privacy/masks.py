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

from coterie.errors import MaskError, printable
from coterie.privacy.keys import Offer, shared_secret
from coterie.privacy.sums import ROUNDING

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
    """Return what writes bytes that only who has the key can tell from random ones.

    ChaCha20, one key a context.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # HKDF's second half, of 32 bytes
    once = hmac.digest(key, b"coterie: a mask of " + context + b"\x01", "sha256")
    # a key for one message needs no nonce
    return Cipher(ChaCha20(once, bytes(16)), mode=None).encryptor()


def _triangular(words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return for each word the sum of two uniform numbers of [-1/2, 1/2], made from its halves."""
    halves = words.view(np.uint16).reshape(-1, 2)
    return (halves[:, 0].astype(np.float64) + halves[:, 1]) / (2**16 - 1) - 1


def _little(words: Words) -> Words:
    """Return words of a stream as the same numbers on every machine."""
    return words.byteswap() if sys.byteorder == "big" else words


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 1e-30 < number < 1e30
