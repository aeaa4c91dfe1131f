"""A step of the branch: its copies follow the own gradients more and more, the peers less and less."""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.choosing.adaptive.trunk import divisors
from coterie.choosing.adaptive.whom import Array
from coterie.learners.points import Sums


class SecondHalf(NamedTuple):
    """The peers' weights in the branch's copies and in pooled, which do not change."""

    weights: Tensor  # of shape (R, N)
    arrays: list[Array]  # the same
    longest: Tensor  # of shape (R,): how long a sum of the peers may be


def mixed(ours: Tensor, asked: Sums, longest: Tensor, alpha: float | Tensor, out: Tensor) -> Tensor:
    """Write the directions of the branch's copies, who have own gradients `ours` (…, R − 1, d), and of pooled.

    Return which of the peers' sums, (…, R), are heard: no more came than they sent while they were judged.
    """
    copies, sums = ours.shape[-2], asked.sums
    heard: Tensor = sums.norm(dim=-1) <= longest
    share = alpha * (asked.answered * heard)[..., :copies].unsqueeze(-1)
    branch, pooled = out[..., :copies, :], out[..., copies:, :]
    torch.mul(1 - share, ours, out=branch)
    branch += (alpha * heard[..., :copies]).unsqueeze(-1) * sums[..., :copies, :]
    answered = asked.answered[..., copies:].clamp(min=1e-12)
    torch.div(sums[..., copies:, :], divisors(answered, heard[..., copies:]), out=pooled)
    return heard
