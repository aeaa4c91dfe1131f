"""Sums that hide their parts: every site adds masks to its part, and the masks of all sites cancel in the sum.

Parts are whole numbers modulo 2³². Each pair of sites has a mask that one adds and the other takes away. It is made
from a secret of the two, from what they agreed on, and from every word of the request: sites that were asked
different things have different masks, and their sum is noise.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import MaskError, printable
from coterie.privacy.keys import Offer, shared_secret

N_CHECKS = 4
"""How many zeros a part has at its end. Their sum is zero where the masks cancel, else with a chance of 2⁻¹²⁸."""

MAX_SITES = 1000
MAX_DEPTH = 4

Words = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the sites of a sum agree on.

    Args:
        weights: τ, the weight of each site.
        largest: what no entry of a gradient exceeds; one that does is an error.
        offers: the key of each site.
    """

    weights: Mapping[str, float]
    largest: float
    offers: Mapping[str, Offer]

    def message(self) -> dict[str, Any]:
        """Return it as plain data."""
        offers = {site: offer.message() for site, offer in self.offers.items()}
        return {"weights": dict(self.weights), "largest": self.largest, "offers": offers}

    @classmethod
    def read(cls, message: Any) -> "Agreement":
        """Return the agreement in a message; a `MaskError` where it is not one."""
        fields = message if isinstance(message, dict) else {}
        weights, largest, offers = (fields.get(name, 0) for name in ("weights", "largest", "offers"))
        if not isinstance(weights, dict) or not 2 <= len(weights) <= MAX_SITES:
            raise MaskError(f"a sum must have from 2 to {MAX_SITES} sites")
        if not all(isinstance(site, str) and _is_positive(weight) for site, weight in weights.items()):
            raise MaskError("the weights of a sum must be positive numbers by site")
        if not _is_positive(largest):
            raise MaskError("the largest entry of a sum must be a positive number")
        if not isinstance(offers, dict) or set(offers) != set(weights):
            raise MaskError("every site of a sum must have a key, and nobody else")
        read = {site: Offer.read(site, offer) for site, offer in offers.items()}
        if len({offer.key for offer in read.values()} | {o.identity for o in read.values()}) != 2 * len(read):
            raise MaskError("two sites of a sum have the same key")
        return cls(weights, float(largest), read)

    @property
    def digest(self) -> bytes:
        """What is the same at all sites that agreed on the same."""
        return digest_of(self.message())

    @property
    def scale(self) -> float:
        """How many units of the whole numbers are 1: the largest sum, rounded at every site, does not wrap."""
        return (2**31 - 1 - len(self.weights)) / (self.largest * math.fsum(self.weights.values()))


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
        >>> total(parts, agreed)
        Traceback (most recent call last):
        ...
        coterie.errors.MaskError: the masks do not cancel: the sites were not asked the same
    """

    def __init__(self, site: str, private: Any, agreement: Agreement) -> None:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.site, self.agreement = site, agreement
        self._keys: dict[str, bytes] = {}
        for other, offer in agreement.offers.items():
            if other != site:
                derive = HKDF(hashes.SHA256(), length=32, salt=agreement.digest, info=b"coterie: masks of a pair")
                self._keys[other] = derive.derive(shared_secret(private, offer))

    def masked(self, gradient: np.ndarray[Any, Any], context: bytes) -> Words:
        """Return τ_k g_k as whole numbers under the masks of this context, in which nothing else may be masked."""
        part = np.zeros(gradient.size + N_CHECKS, np.uint32)
        part[: gradient.size] = whole_numbers(gradient, self.agreement.weights[self.site], self.agreement)
        for other, key in self._keys.items():
            mask = _stream(key, context, len(part))
            if self.site < other:
                part += mask
            else:
                part -= mask
        return part


def whole_numbers(gradient: np.ndarray[Any, Any], weight: float, agreement: Agreement) -> Words:
    """Return τ_k g_k as whole numbers modulo 2³²; a `MaskError` for what is not finite or too large."""
    values = gradient.ravel().astype(np.float64)
    if gradient.dtype.kind != "f":
        raise MaskError("a masked sum is of floating-point numbers, not rounded to 16 bits")
    if not np.isfinite(values).all():
        raise MaskError("not finite")
    if values.size and np.abs(values).max() > agreement.largest:
        raise MaskError(
            f"an entry of the gradient is beyond {agreement.largest:g}, the largest that the sum takes; clip to a "
            "norm of at most that"
        )
    return np.rint(values * (weight * agreement.scale)).astype(np.int64).astype(np.uint32)


def total(parts: Sequence[Words], agreement: Agreement) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return Σ τ_k g_k from the masked parts of all sites; a `MaskError` where the masks do not cancel."""
    added = np.zeros_like(parts[0])
    for part in parts:
        added += part
    return revealed(added, agreement)


def revealed(added: Words, agreement: Agreement) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return Σ τ_k g_k from parts that have been added up; a `MaskError` where the masks do not cancel."""
    if added[-N_CHECKS:].any():
        raise MaskError("the masks do not cancel: the sites were not asked the same")
    return added[:-N_CHECKS].view(np.int32) / agreement.scale


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
    return hashlib.sha256(_encoded(value, MAX_DEPTH)).digest()


def _encoded(value: Any, depth: int) -> bytes:
    if isinstance(value, dict) and depth and all(isinstance(key, str) for key in value):
        return _framed(b"dict", *(_encoded(each, depth - 1) for key in sorted(value) for each in (key, value[key])))
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _framed(b"array", value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes())
    if value is None or type(value) in (bool, int, float, str):
        return _framed(type(value).__name__.encode(), repr(value).encode(errors="surrogatepass"))
    raise MaskError(f"a request must be plain data, got a {printable(type(value).__name__, 50)}")


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in (len(parts).to_bytes(8, "little"), *parts))


def _stream(key: bytes, context: bytes, n: int) -> Words:
    """Return n numbers that only who has the key can tell from random ones: ChaCha20 under a key of the context."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    once = HKDFExpand(hashes.SHA256(), length=32, info=b"coterie: a mask of " + context).derive(key)
    stream = Cipher(ChaCha20(once, bytes(16)), mode=None).encryptor()  # a key for one message needs no nonce
    return np.frombuffer(stream.update(bytes(4 * n)), "<u4").astype(np.uint32, copy=False)


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 1e-30 < number < 1e30
