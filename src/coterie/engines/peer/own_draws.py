"""Batches that a peer draws itself.

Who asks chooses neither the rows of a batch nor which rows go together.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


class OwnDraws:
    """Batches of whole blocks of examples, drawn by a secret.

    The secret puts every example into one block of at least `least`, once and for all. A batch is
    some blocks as a whole, and the secret, the seed and the step say which. So whatever is asked,
    and however answers are combined, what one point tells is told of whole blocks: with 100
    examples in blocks of 50, there are two.

    Example:
        >>> draws = OwnDraws(b"a secret", 100, least=50)
        >>> batches = [draws.indices(60, seed, step=0) for seed in range(20)]
        >>> {len(batch) for batch in batches}, len({tuple(batch.tolist()) for batch in batches})
        ({50}, 2)
    """

    def __init__(self, secret: bytes, n: int, least: int) -> None:
        self._secret, self._n = secret, n
        order = self._generator("blocks").permutation(n)
        self._blocks = np.array_split(order, max(1, n // least))

    def indices(self, size: int, seed: int, step: int) -> Tensor:
        """Return which examples a batch of about `size` has.

        The nearest number of blocks, at least one.
        """
        n_blocks = len(self._blocks)
        wanted = min(n_blocks, max(1, round(size * n_blocks / self._n)))
        chosen = self._generator(f"{seed}/{step}").choice(n_blocks, wanted, replace=False)
        return torch.from_numpy(np.concatenate([self._blocks[k] for k in np.sort(chosen)]))

    def _generator(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(secret_number(self._secret, purpose))


def secret_number(secret: bytes, purpose: str) -> int:
    """Return a number of 63 bits that only who has the secret can know."""
    return int.from_bytes(secret_bytes(secret, purpose, 8), "little") >> 1


def secret_bytes(secret: bytes, purpose: str, n: int = 32) -> bytes:
    """Return bytes that only who has the secret can know."""
    return hashlib.blake2b(
        purpose.encode(), key=hashlib.sha256(secret).digest(), digest_size=n
    ).digest()
