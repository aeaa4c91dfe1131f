"""What a peer that gives sums only takes for a sum.

Several peers, none of whom outweighs the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.arguments import COUNT, FLAG, check_fields, instance, mapped, real

COUNTED = 0.1
"""A peer takes part in a sum where its weight is at least this part of the largest."""

LARGEST = 16.0
"""What no entry of a masked sum exceeds, if user 0 does not say otherwise, and the least it may say.

A gradient that is far beyond it gives no sum: were it less, user 0 would find out which are.
"""

COARSEST = 2.0**12 * LARGEST
"""The most that user 0 may say: where whole numbers are coarse, their steps tell of single sites."""

ROUNDING = 1e-6
"""How much more than its share a peer may have, relatively.

Weights are rounded to single precision on the way.
"""


@dataclass(frozen=True)
class SumsOnly:
    """Which weighted sums a peer takes part in.

    Args:
        peers: how many must take part at least; one of far less weight than another does not count.
        share: how much of all weight one peer may have at most.
        keys: the fingerprint of each other peer's key, where sums are masked; any key will do when
            empty.
        posteriors: add posteriors too. Sums of gradients are the same whoever has which example;
            from sums of posteriors under several priors those of single peers can be worked out.

    Example:
        >>> SumsOnly().allowed(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.2, 0.3]]))
        tensor([False,  True])
    """

    peers: int = 3
    share: float = 0.5
    keys: Mapping[str, str] = field(default_factory=dict)
    posteriors: bool = False

    def __post_init__(self) -> None:
        keys = mapped(instance(str, "a text"), 'a table of fingerprints: site = "its fingerprint"')
        share = real("lie in (0, 1]", lambda value: 0 < value <= 1)
        known = {"peers": COUNT, "share": share, "keys": keys, "posteriors": FLAG}
        check_fields(self, known)

    def allowed(self, weights: Tensor) -> Tensor:
        """Say of each row of weights, NaN for who is not asked, whether it is a sum to take part in."""
        asked = weights.nan_to_num(nan=0.0, posinf=torch.inf)
        total, largest = asked.sum(1), asked.max(1).values
        sound = asked.isfinite().all(1) & (asked >= 0).all(1) & (total > 0) & total.isfinite()
        counted = ((asked > 0) & (asked >= COUNTED * largest[:, None])).sum(1)
        return sound & (largest <= self.share * total * (1 + ROUNDING)) & (counted >= self.peers)

    def __str__(self) -> str:
        return (
            f"sums of at least {self.peers} peers only, none of which has more than {self.share:g}"
            " of the weight"
        )

    def nearest(self, weights: Tensor) -> Tensor:
        """Return rows of weights that are sums to take part in, close to these and of the same totals.

        The largest weights are cut to the share, and what is cut off goes to the next largest. A
        row with too few peers that are asked stays as it is.

        Example:
            >>> SumsOnly().nearest(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.2, 0.3, 0.0]]))
            tensor([[0.5000, 0.2500, 0.2500, 0.0000],
                    [0.5000, 0.2000, 0.3000, 0.0000]])
        """
        fine = self.allowed(weights)
        rows = [
            row if is_fine else self._nearest(row)
            for row, is_fine in zip(weights, fine.tolist(), strict=True)
        ]
        return torch.stack(rows)

    def _nearest(self, weights: Tensor) -> Tensor:
        asked, total = ~weights.isnan(), weights.nansum()
        if (
            int(asked.sum()) < self.peers
            or self.peers * self.share < 1
            or not (total > 0 and total.isfinite())
        ):
            return weights
        shares = weights.nan_to_num(nan=0.0) / total
        largest = shares.masked_fill(~asked, -1.0).argsort(descending=True, stable=True)[
            : self.peers
        ]
        # what is added here makes all smaller
        shares[largest] = shares[largest].clamp(min=2 * COUNTED * self.share)
        shares = (shares / shares.sum()).clamp(max=self.share)
        room = torch.zeros_like(shares)
        room[largest] = self.share - shares[largest]
        shares = shares + room * ((1 - shares.sum()) / room.sum().clamp(min=1e-12)).clamp(0, 1)
        return (shares * total).masked_fill(~asked, torch.nan)
