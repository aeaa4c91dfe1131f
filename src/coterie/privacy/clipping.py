"""Sums to which no example adds more than a norm, and the noise on them."""

import torch
from torch import Tensor

from coterie.privacy.randomness import normals


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
    given, done = torch.empty_like(total, dtype=torch.float32), 0
    for chunk in normals(len(total), total.device):
        here = slice(done, done := done + len(chunk))
        given[here] = chunk.mul_(noise * clip / over).add_(total[here], alpha=1 / over)
    return given
