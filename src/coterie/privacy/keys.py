"""Keys between sites.

One by which a site is known for good, and one that it makes for each set of sites.
"""

import hashlib
import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from coterie.errors import CoterieError, MaskError, not_installed, printable

MASKED_SUMS = b"coterie: a key for masked sums"
"""What an offer is for where nothing else is said."""


class Giving(IntEnum):
    """How a site gives its gradients.

    What it gives elsewhere can be taken off a sum, and leaves the others'.
    """

    PLAIN = 0  # on their own too
    MASKED = 1  # under masks only
    KNOWN_KEYS = 2  # under masks only, with sites whose keys it knows


@dataclass(frozen=True)
class Offer:
    """What a site shows of itself before a sum.

    A key for this sum alone, signed by the key it is known by.
    """

    site: str
    key: bytes  # X25519, 32 bytes
    identity: bytes  # Ed25519, 32 bytes
    signature: bytes  # of the site's name, its giving and its key, by its identity
    giving: Giving = Giving.PLAIN

    @property
    def fingerprint(self) -> str:
        """What people compare, by telephone for example."""
        return fingerprint(self.identity)

    def message(self) -> dict[str, str]:
        """Return it as plain data."""
        plain = {name: getattr(self, name).hex() for name in ("key", "identity", "signature")}
        return {"site": self.site, "giving": self.giving.name, **plain}

    @classmethod
    def read(cls, site: str, message: Any, purpose: bytes = MASKED_SUMS) -> Self:
        """Return the offer of a site in a message.

        A `MaskError` where it is not one, or not signed for this.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        fields = message if isinstance(message, dict) else {}
        texts = [fields.get(name) for name in ("key", "identity", "signature")]
        try:
            giving = Giving[str(fields.get("giving"))]
            key, identity, signature = (
                bytes.fromhex(text) for text in texts if isinstance(text, str)
            )
            Ed25519PublicKey.from_public_bytes(identity).verify(
                signature, _signed(purpose, site, giving, key)
            )
        except (LookupError, ValueError, InvalidSignature) as error:
            raise MaskError(
                f"the key of {printable(site, 50)!r} is not signed by that site"
            ) from error
        named = fields.get("site")
        if not isinstance(named, str) or named != site or len(key) != 32:
            raise MaskError(f"the key of {printable(site, 50)!r} is not one")
        return cls(site, key, identity, signature, giving)


class Identity:
    """By what a site is known to the others, over all its jobs where it keeps its secret.

    Args:
        site: its name.
        secret: 32 bytes that only the site knows; made here when None.

    Example:
        >>> basel, bern = Identity("basel", bytes(32)), Identity("bern")
        >>> basel.fingerprint
        '139e-3940-e64b-5491-7220-88d9-a0d7-4162'
        >>> (a, offered), (b, returned) = basel.offer(), bern.offer()
        >>> shared_secret(a, returned) == shared_secret(b, Offer.read("basel", offered.message()))
        True
    """

    def __init__(self, site: str, secret: bytes | None = None) -> None:
        check_installed()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.site = site
        self._key = Ed25519PrivateKey.from_private_bytes(
            secrets.token_bytes(32) if secret is None else secret
        )

    @property
    def fingerprint(self) -> str:
        """What people compare."""
        return fingerprint(self._key.public_key().public_bytes_raw())

    def offer(
        self, giving: Giving = Giving.PLAIN, purpose: bytes = MASKED_SUMS
    ) -> tuple[Any, Offer]:
        """Return a new private key, and what the others may see of it and of how the site gives its gradients.

        It is good for one purpose, which is in what is signed.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        private = X25519PrivateKey.generate()
        key = private.public_key().public_bytes_raw()
        signature = self._key.sign(_signed(purpose, self.site, giving, key))
        return private, Offer(
            self.site, key, self._key.public_key().public_bytes_raw(), signature, giving
        )


def private_key(secret: bytes) -> Any:
    """Return the private key of an offer, from its bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def check_installed() -> None:
    """Refuse to make keys and masks without the package that makes them."""
    if importlib.util.find_spec("cryptography") is None:
        raise CoterieError(not_installed("cryptography", "privacy"))


def key_stream(key: bytes) -> Any:
    """Return what writes bytes that only who has the key can tell from random ones, by ChaCha20.

    A key is used for one stream, which needs no nonce.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ImportError as error:
        raise CoterieError(not_installed("cryptography", "privacy")) from error
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def shared_secret(private: Any, offer: Offer) -> bytes:
    """Return what this site and the one that made the offer know, and nobody else."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return bytes(private.exchange(X25519PublicKey.from_public_bytes(offer.key)))
    except ValueError as error:  # a key with which every secret is the same
        raise MaskError(f"the key of {printable(offer.site, 50)!r} is not one") from error


def check_known(offers: Mapping[str, Offer], known: Mapping[str, str], me: str) -> None:
    """Refuse a set of sites with one whose fingerprint is not that in `known`.

    Any will do where that is empty.
    """
    for site, offer in offers.items():
        if known and site != me and known.get(site, "").strip().lower() != offer.fingerprint:
            said = f"{printable(site, 50)!r} has the key {offer.fingerprint}"
            raise MaskError(f"{said}, which is not the one known here")


def fingerprint(identity: bytes) -> str:
    """Return the fingerprint of a key."""
    digest = hashlib.sha256(identity).hexdigest()[:32]
    return "-".join(digest[start : start + 4] for start in range(0, 32, 4))


def _signed(purpose: bytes, site: str, giving: Giving, key: bytes) -> bytes:
    return purpose + b", of " + site.encode() + b": %d: " % giving + key
