"""A step of the trunk: its models follow the peers only, and a gradient far longer than usual is not heard."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.learners.points import Judged, Sums

FAR = 10.0
"""A gradient counts as missing where it is more than so many times as long as is usual (`Judged.lengths`), of all
steps so far the largest. One step would not do: good peers' gradients may vanish while another's does not."""


@dataclass(frozen=True, eq=False)
class Near:
    """What whom to listen to is judged by, without gradients that are far longer than usual."""

    judged: Judged
    longest: Tensor  # of shape (R − 1,): how long a gradient may be at each trunk from now on
    far: NDArray[np.bool_]  # of shape (N,): the peers that sent a longer one
    usual: float  # how long a gradient usually is

    @classmethod
    def of(cls, judged: Judged, longest: Tensor, *, bounded: bool, names: Sequence[str]) -> "Near":
        """Leave out what is far longer than usual; nothing unless `bounded`.

        `longest` (R − 1,) is how long gradients could be before.
        """
        lengths, usual = judged.lengths()
        longest = torch.fmax(longest, FAR * usual) if bounded else torch.full_like(longest, math.inf)
        far = lengths > longest.unsqueeze(1)
        near = judged.without(far, f"more than {FAR:g} times as long as the median of all", names)
        return cls(near, longest, far.any(0).cpu().numpy(), float(usual.mean()))


def followed(asked: Sums, longest: Tensor, out: Tensor) -> None:
    """Write the directions of trunks (…, R, d): the peers' sums, or nothing where they are far too long."""
    answered = asked.answered.clamp(min=1e-12)
    near = asked.sums.norm(dim=-1) <= longest * answered
    torch.div(asked.sums, divisors(answered, near), out=out)


def divisors(weights: Tensor, followed: Tensor) -> Tensor:
    """Return by what to divide rows of sums, so that those not followed become zero."""
    return torch.where(followed, weights, math.inf).unsqueeze(-1)
