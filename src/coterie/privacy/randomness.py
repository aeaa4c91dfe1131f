"""Randomness that nobody can know: all of it comes from the operating system, none of it from a seed."""

import math
import os

import numpy as np
import torch
from torch import Tensor


def uniforms(n: int) -> Tensor:
    """Return numbers in (0, 1], multiples of 2⁻⁵³.

    Example:
        >>> numbers = uniforms(1000)
        >>> bool((numbers > 0).all() and (numbers <= 1).all())
        True
    """
    whole = np.frombuffer(os.urandom(8 * n), dtype="<u8") >> 11
    return torch.from_numpy((whole + 1).astype(np.float64)).mul_(2.0**-53)


def normals(n: int) -> Tensor:
    """Return independent standard normal numbers in double precision (Box and Muller 1958).

    Example:
        >>> normals(3).shape, normals(3).dtype
        (torch.Size([3]), torch.float64)
    """
    pairs = (n + 1) // 2
    radius, angle = uniforms(pairs).log_().mul_(-2).sqrt_(), uniforms(pairs).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


def poisson_sample(n: int, rate: float) -> Tensor:
    """Return which of n examples take part, each with this probability, whatever the others do.

    Example:
        >>> poisson_sample(3, 1.0)
        tensor([0, 1, 2])
    """
    return (uniforms(n) <= rate).nonzero().flatten()
