"""Randomness that nobody can know: all of it comes from the operating system, none of it from a seed."""

import os

import numpy as np
import torch
from torch import Tensor

_ADDED = 4
"""A normal number is the sum of so many, over the root of it: its last bits then do not tell it apart."""


def uniforms(n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return numbers in (0, 1], multiples of 2⁻⁵³.

    Example:
        >>> numbers = uniforms(1000)
        >>> bool((numbers > 0).all() and (numbers <= 1).all())
        True
    """
    whole = np.frombuffer(os.urandom(8 * n), dtype="<u8") >> 11
    return np.asarray((whole + 1) * 2.0**-53)


def normals(n: int) -> Tensor:
    """Return independent standard normal numbers in double precision.

    Of a sum of several the last bits cannot be taken back to what it was added to, as those of one draw can
    (Mironov 2012; Holohan and Braghin 2021).

    Example:
        >>> normals(3).shape, normals(3).dtype
        (torch.Size([3]), torch.float64)
    """
    pairs = _ADDED * n // 2  # whole, since `_ADDED` is even
    radius, angle = np.sqrt(-2 * np.log(uniforms(pairs))), 2 * np.pi * uniforms(pairs)
    each = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(each.reshape(_ADDED, n).sum(0) / np.sqrt(_ADDED))


def poisson_sample(n: int, rate: float) -> Tensor:
    """Return which of n examples take part, each with this probability, whatever the others do.

    Example:
        >>> poisson_sample(3, 1.0)
        tensor([0, 1, 2])
    """
    return torch.from_numpy(np.flatnonzero(uniforms(n) <= rate))
