"""A shared secret under torch.distributed.

Notes and requests carry a tag that only who has the secret can make.
"""

import hmac
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.engines.peer.ledger import read_secret

VARIABLE = "COTERIE_SECRET_FILE"
"""The environment variable that names the file with the secret, the same in every process."""

TAG_BYTES = 32


def shared_secret() -> bytes | None:
    """Return the secret of this cluster, or None where no file is named."""
    path = os.environ.get(VARIABLE)
    return read_secret(Path(path)) if path else None


def note_tag(secret: bytes, *parts: str) -> str:
    """Return the tag of a note."""
    return hmac.new(secret, "\n".join(parts).encode(), "sha256").hexdigest()


class Seal:
    """Tags of the messages of one run, in order.

    None can be made without the secret, left out or sent again.

    Args:
        secret: the cluster's.
        nonce: what is new in every run.

    Example:
        >>> sender, receiver = Seal(b"secret", "a"), Seal(b"secret", "a")
        >>> message = torch.zeros(4, dtype=torch.uint8)
        >>> tag = sender.tag(message)
        >>> receiver.fits(message, tag), receiver.fits(message, tag)
        (True, False)
    """

    def __init__(self, secret: bytes, nonce: str) -> None:
        self._key, self._count = hmac.digest(secret, nonce.encode(), "sha256"), 0

    def tag(self, message: Tensor) -> Tensor:
        """Return the tag of the next message, of bytes."""
        self._count += 1
        mac = hmac.new(self._key, self._count.to_bytes(8, "little"), "sha256")
        mac.update(np.ascontiguousarray(message.cpu().numpy()).data)
        return torch.frombuffer(bytearray(mac.digest()), dtype=torch.uint8)

    def fits(self, message: Tensor, tag: Tensor) -> bool:
        """Say whether a tag is that of the next message."""
        return hmac.compare_digest(bytes(tag.cpu().tolist()), bytes(self.tag(message).tolist()))
