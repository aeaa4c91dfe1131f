"""Calls between sites that pass through somebody who may neither read them nor make one up.

Each site makes a key for a job and signs it with the key that it is known by. Of two sites' keys
follow secrets for the requests and the replies each way. A call is encrypted, and bound to the job,
to who calls whom and to a number that is used once: one that was altered, repeated, or taken from
another job does not open.
"""

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

from coterie.errors import MaskError, printable
from coterie.privacy.keys import Identity, Offer, check_known, shared_secret

PURPOSE = b"coterie: a key for calls in the job "
WINDOW = 1024
"""How many calls late a call may come."""


class Calls:
    """The calls of one site in one job.

    Args:
        identity: by what the others know it.
        job: the name of the job.
        known: the fingerprints of other sites' keys.
        strangers: whether a site that is not known may take part.

    Example:
        >>> bern, basel = (Calls(Identity(site), "job 1") for site in ("bern", "basel"))
        >>> offers = {each.site: each.offer for each in (bern, basel)}
        >>> bern.meet(offers), basel.meet(offers)
        (({'basel': ...}, {}), ({'bern': ...}, {}))
        >>> number, sealed = bern.call("basel", b"a request")
        >>> basel.take("bern", number, sealed)
        b'a request'
        >>> basel.take("bern", number, sealed)
        Traceback (most recent call last):
        ...
        coterie.errors.MaskError: the call of 'bern' is a repeated one
        >>> bern.reply("basel", number, basel.answer("bern", number, b"a reply"))
        b'a reply'
    """

    def __init__(
        self,
        identity: Identity,
        job: str,
        known: Mapping[str, str] | None = None,
        *,
        strangers: bool = True,
    ) -> None:
        self.site = identity.site
        self.job = job
        self._known = known or {}
        self._strangers = strangers
        self._private, offer = identity.offer(purpose=self._purpose)
        self.offer = offer.message()
        self._secrets: dict[str, bytes] = {}  # by site
        self._number, self._taken, self._lock = 0, dict[str, set[int]](), threading.Lock()

    @property
    def _purpose(self) -> bytes:
        return PURPOSE + self.job.encode()

    def meet(self, offers: Any) -> tuple[dict[str, str], dict[str, str]]:
        """Take over the keys that others offer.

        Return their fingerprints, and why others are left out.

        One that is not signed, or not the one known here, is. Who has a key in this job keeps it.
        """
        found, refused = dict[str, str](), dict[str, str]()
        for site, message in offers.items() if isinstance(offers, dict) else ():
            if site == self.site or not isinstance(site, str):
                continue
            try:
                offer = Offer.read(site, message, self._purpose)
                if site in self._known or not self._strangers:
                    check_known({site: offer}, {site: self._known.get(site, "none")}, self.site)
                secret = hashlib.sha256(
                    shared_secret(self._private, offer) + self._purpose
                ).digest()
            except MaskError as error:
                refused[site] = str(error)
                continue
            if self._secrets.setdefault(site, secret) == secret:
                found[site] = offer.fingerprint
            else:
                refused[site] = f"{printable(site, 50)!r} has another key in this job"
        return found, refused

    def knows(self, site: str) -> bool:
        """Say whether this site has a key in this job."""
        return site in self._secrets

    def call(self, site: str, content: bytes) -> tuple[int, bytes]:
        """Return the number of a call to a site, and its content sealed."""
        with self._lock:
            self._number += 1
            number = self._number
        return number, self._sealed(site, (self.site, site, "call"), number, content)

    def take(self, site: str, number: int, sealed: bytes) -> bytes:
        """Return the content of a call by a site, once; a `MaskError` for any other."""
        content = self._opened(site, (site, self.site, "call"), number, sealed)
        with self._lock:
            taken = self._taken.get(site, set())
            if number in taken or number <= max(taken, default=number) - WINDOW:
                raise MaskError(f"the call of {printable(site, 50)!r} is a repeated one")
            late = max(taken | {number}) - WINDOW
            self._taken[site] = {old for old in taken | {number} if old > late}
        return content

    def answer(self, site: str, number: int, content: bytes) -> bytes:
        """Return the reply to a call by a site, sealed; to one call there is one."""
        return self._sealed(site, (self.site, site, "reply"), number, content)

    def reply(self, site: str, number: int, sealed: bytes) -> bytes:
        """Return what a site replies to a call to it; a `MaskError` where it is not its reply."""
        return self._opened(site, (site, self.site, "reply"), number, sealed)

    def _sealed(self, site: str, about: tuple[str, ...], number: int, content: bytes) -> bytes:
        cipher, bound = self._cipher(site, about)
        return bytes(cipher.encrypt(number.to_bytes(12, "big"), content, bound))

    def _opened(self, site: str, about: tuple[str, ...], number: int, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        cipher, bound = self._cipher(site, about)
        try:
            return bytes(cipher.decrypt(number.to_bytes(12, "big"), sealed, bound))
        except (InvalidTag, ValueError, OverflowError) as error:
            raise MaskError(
                f"what is said to be a {about[2]} by {printable(site, 50)!r} is not one"
            ) from error

    def _cipher(self, site: str, about: tuple[str, ...]) -> tuple[Any, bytes]:
        """Return what seals messages of one kind between this site and another, and what they are bound to."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if site not in self._secrets:
            raise MaskError(f"{printable(site, 50)!r} has no key in this job")
        bound = repr((self.job, *about)).encode()
        key = HKDF(hashes.SHA256(), length=32, salt=None, info=bound).derive(self._secrets[site])
        return ChaCha20Poly1305(key), bound
