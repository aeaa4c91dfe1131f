"""What a peer that gives sums only takes for a sum: several peers, none of whom outweighs the others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import KnobError

COUNTED = 0.1
"""A peer takes part in a sum where its weight is at least this part of the largest."""


@dataclass(frozen=True)
class SumsOnly:
    """Which weighted sums a peer takes part in.

    Args:
        peers: how many must take part at least; one of far less weight than another does not count.
        share: how much of all weight one peer may have at most.

    Example:
        >>> SumsOnly().allowed(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.2, 0.3]]))
        tensor([False,  True])
    """

    peers: int = 3
    share: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.peers, int) or self.peers < 1:
            raise KnobError(f"`peers` must be a whole number, at least 1, got {self.peers!r}")
        if not 0 < self.share <= 1:
            raise KnobError(f"`share` must lie in (0, 1], got {self.share!r}")

    def allowed(self, weights: Tensor) -> Tensor:
        """Say of each row of weights, NaN for who is not asked, whether it is a sum to take part in."""
        asked = weights.nan_to_num(nan=0.0, posinf=torch.inf)
        total, largest = asked.sum(1), asked.max(1).values
        sound = asked.isfinite().all(1) & (asked >= 0).all(1) & (total > 0) & total.isfinite()
        counted = ((asked > 0) & (asked >= COUNTED * largest[:, None])).sum(1)
        return sound & (largest <= self.share * total * (1 + 1e-9)) & (counted >= self.peers)
