"""What users and their examples weigh in one loss over the batches of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coterie.engines.in_process.sampler import Batches


@dataclass(frozen=True)
class Weights:
    """τ as tensors, in the order of the batches: of each user, and of each example."""

    users: Tensor
    examples: Tensor

    @classmethod
    def of(cls, tau: Sequence[float], batches: Sequence[Batches], like: Tensor) -> Self:
        """Return τ, given by position among the peers asked, for the users of these batches."""
        users = [tau[position] for batch in batches for position in batch.positions]
        examples = [
            tau[k] / batch.size
            for batch in batches
            for k in batch.positions
            for _ in range(batch.size)
        ]
        return cls(like.new_tensor(users), like.new_tensor(examples))

    def users_over(self, batches: Sequence[Batches], counts: Tensor) -> Tensor:
        """Return the weight of each example where examples count differently in their users' losses."""
        each = zip(
            batches, torch.split(counts.to(self.users), [batch.n for batch in batches]), strict=True
        )
        users = torch.split(self.users, [len(batch.positions) for batch in batches])
        shares = [
            tau.repeat_interleave(batch.size) * over_counts(batch, some)
            for tau, (batch, some) in zip(users, each, strict=True)
        ]
        return torch.cat(shares)

    def split(self, groups: Sequence[Sequence[Batches]]) -> list[Self]:
        """Return the weights of some batches after the other's."""
        users = torch.split(
            self.users, [sum(len(batch.positions) for batch in some) for some in groups]
        )
        examples = torch.split(self.examples, [sum(batch.n for batch in some) for some in groups])
        return [type(self)(*pair) for pair in zip(users, examples, strict=True)]


def over_counts(batch: Batches, counts: Tensor) -> Tensor:
    """Return for each example one over what all examples of its user count.

    0 where they count nothing.
    """
    totals = batch.by_user(counts).sum(1)
    return torch.where(totals == 0, 0.0, 1 / totals).repeat_interleave(batch.size)
