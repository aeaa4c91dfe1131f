"""Noise, samples and the clipping that they hide, by randomness that nobody can know.

All of it comes from the operating system, none of it from a seed.

Where little is needed, it is the operating system's own. Noise takes millions of numbers a
gradient: they are ChaCha20's stream under a key that is drawn for this gradient alone, and
forgotten. Who cannot break ChaCha20 cannot tell it from the system's own, and it comes ten times as
fast.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.privacy.keys import key_stream

CHUNK = 2**15
"""So many numbers are made at a time, as fit into a cache.

Of each chunk the first half of the stream are radii.
"""


def uniforms(n: int) -> Tensor:
    """Return numbers in (0, 1], multiples of 2⁻⁵³.

    Example:
        >>> numbers = uniforms(1000)
        >>> bool((numbers > 0).all() and (numbers <= 1).all())
        True
    """
    return _fractions(np.frombuffer(bytearray(os.urandom(8 * n)), dtype="<u8"))


def normals(n: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield n independent standard normal numbers in double precision, a chunk after the other.

    They come of the system's randomness; a GPU is sent the stream and makes them all at once. A
    chunk is overwritten by the next.

    Example:
        >>> [len(chunk) for chunk in normals(CHUNK + 3)]
        [32768, 3]
    """
    return normals_of(os.urandom(32), n, device)


def normals_of(key: bytes, n: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield what `normals` does, from this key (Box and Muller 1958)."""
    if device is not None and device.type == "cuda":
        words = np.stack([words.copy() for words in _stream(key, n)])
        # a shift keeps the sign, which is a digit here
        whole = (torch.from_numpy(words.view(np.int64)).to(device) >> 11) & (2**53 - 1)
        radii, angles = whole.double().add_(1).mul_(2.0**-53).unbind(1)
        radii, angles = radii.log().mul_(-2).sqrt_(), angles * (2 * math.pi)
        yield torch.stack([angles.cos() * radii, angles.sin() * radii], 1).flatten()[:n]
        return
    for done, words in zip(range(0, n, CHUNK), _stream(key, n), strict=True):
        radii, angles = _fractions(words[:, : n - done])
        np.log(radii.numpy(), out=radii.numpy())  # NumPy's is three times as fast as torch's
        radii.mul_(-2).sqrt_()
        angles.mul_(2 * math.pi)
        yield torch.cat([angles.cos().mul_(radii), angles.sin().mul_(radii)])[: n - done]


def _stream(key: bytes, n: int) -> Iterator["np.ndarray[Any, np.dtype[np.uint64]]"]:
    """Yield ChaCha20's stream for n numbers, a chunk after the other, each in the place of the last."""
    stream = key_stream(key)
    zeros, words = bytes(8 * CHUNK), np.empty((2, CHUNK // 2), dtype="<u8")
    for _ in range(0, n, CHUNK):
        stream.update_into(zeros, words.data.cast("B"))
        yield words


def poisson_sample(n: int, rate: float) -> Tensor:
    """Return which of n examples take part, each with this probability, whatever the others do.

    Example:
        >>> poisson_sample(3, 1.0)
        tensor([0, 1, 2])
    """
    return (uniforms(n) <= rate).nonzero().flatten()


def _fractions(words: "np.ndarray[Any, np.dtype[np.uint64]]") -> Tensor:
    """Return words of 64 bits, of which the array loses the last, as numbers in (0, 1]."""
    words >>= np.uint64(11)
    return torch.from_numpy(words.view(np.int64)).double().add_(1).mul_(2.0**-53)


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return what each example's gradient is multiplied by, so that its norm is at most `clip`.

    One that is not finite counts nothing: a refusal would tell of it.

    Example:
        >>> clip_factors(torch.tensor([0.5, 4.0, torch.nan]), clip=2.0)
        tensor([1.0000, 0.5000, 0.0000])
    """
    return torch.where(norms.isfinite(), clip / norms.clamp(min=clip), 0.0)


def clipped_sum(rows: Tensor, clip: float) -> Tensor:
    """Return the sum of gradients, one a row, each clipped to a norm; in double precision.

    Example:
        >>> clipped_sum(torch.tensor([[3.0, 4.0], [0.0, 0.1]]), clip=1.0)
        tensor([0.6000, 0.9000], dtype=torch.float64)
    """
    rows = rows.double()
    return clip_factors(rows.norm(dim=1), clip) @ rows.nan_to_num(0.0, 0.0, 0.0)


def noisy(total: Tensor, clip: float, noise: float, over: float = 1.0) -> Tensor:
    """Return a sum with normal noise of standard deviation `noise` · `clip` on every number, divided by a size.

    Both are added in double precision and given in single. So the last digits of a number, by which
    what was added could be told from what it was added to (Mironov 2012), do not leave.

    Example:
        >>> noisy(torch.zeros(2), clip=1.0, noise=1.0).dtype
        torch.float32
    """
    noisy, done = torch.empty_like(total, dtype=torch.float32), 0
    for chunk in normals(len(total), total.device):
        here = slice(done, done := done + len(chunk))
        noisy[here] = chunk.mul_(noise * clip / over).add_(total[here], alpha=1 / over)
    return noisy
