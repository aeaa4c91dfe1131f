"""The directions of the models that follow the peers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.engine import Answers, PeerEvidence, combined

FAR = 10.0
"""A gradient counts as missing where it is more than so many times as long as is usual (`PeerEvidence.lengths`), of
all steps so far the largest. One step would not do: good peers' gradients may vanish while
another's does not."""


@dataclass(frozen=True, eq=False)
class WithoutOutliers:
    """What the peers are weighed by, without gradients that are far longer than usual."""

    evidence: PeerEvidence
    left_out: Mapping[str, str]
    longest: Tensor  # of shape (R,): how long a gradient may be at each point from now on
    outlier: NDArray[np.bool_]  # of shape (N,): the peers that sent a longer one
    usual: float  # how long a gradient usually is

    @classmethod
    def of(
        cls, answers: Answers, longest: Tensor, *, bounded: bool, names: Sequence[str]
    ) -> "WithoutOutliers":
        """Leave out what is far longer than usual; nothing unless `bounded`.

        `longest` (R,) is how long gradients could be before.
        """
        if answers.judged is None:
            raise AssertionError("every peer was asked by itself")
        lengths, usual = answers.judged.lengths()
        longest = (
            torch.fmax(longest, FAR * usual) if bounded else torch.full_like(longest, math.inf)
        )
        far = lengths > longest.unsqueeze(1)
        outlier = far.any(0).cpu().numpy()
        why = f"more than {FAR:g} times as long as the median of all"
        out = {name: why for name, one in zip(names, outlier.tolist(), strict=True) if one}
        kept = answers.judged.without(far)
        return cls(kept, {**out, **answers.left_out}, longest, outlier, float(usual.mean()))

    def sums(self, answers: Answers, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the peers' sums at all points, and the weight in each.

        Without outliers where rows are at hand.
        """
        asked, judged = len(weights), len(self.evidence.ours)
        sums, answered = peer_sums(answers, asked)
        if self.evidence.theirs.shape[2] < sums.shape[1]:  # sketches: the sums came by themselves
            return sums, answered
        first, weight = combined(self.evidence.theirs, weights[:judged])
        return torch.cat([first, sums[judged:]]), torch.cat([weight, answered[judged:]])


class PeerSums(NamedTuple):
    """The peers' sums at some points."""

    sums: Tensor  # of shape (…, R, d)
    answered: Tensor  # of shape (…, R): the weight that is in each


def peer_sums(answers: Answers, asked: int) -> PeerSums:
    """Return what peers answered at the first points."""
    if answers.sums is None:
        raise AssertionError("sums were asked for")
    return PeerSums(answers.sums[:asked], answers.answered)


def followed(peers: PeerSums, longest: Tensor, out: Tensor) -> None:
    """Write the directions of models (…, R, d).

    The peers' sums, or nothing where they are far too long.
    """
    answered = peers.answered.clamp(min=1e-12)
    near = peers.sums.norm(dim=-1) <= longest * answered
    torch.div(peers.sums, _divisors(answered, near), out=out)


def _divisors(weights: Tensor, followed: Tensor) -> Tensor:
    """Return by what to divide rows of sums, so that those not followed become zero."""
    return torch.where(followed, weights, math.inf).unsqueeze(-1)
