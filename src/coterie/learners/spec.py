"""What is to be trained, and what many runs of it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from coterie.users.user import Loss, User

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be learned and how, as `coterie.train` was told.

    Args:
        model: the model, at the parameters to start from.
        loss: the mean loss of a batch from (output, target).
        me: user 0.
        peers: the others.
        optimizer: an optimizer of this model that has taken no step.
        scheduler: a function of the optimizer that returns a learning-rate scheduler.
        steps: how many steps a run takes.
        batch_size: examples each user draws for a gradient.
        seed: what batches are drawn from, with the user's name and the step.
    """

    model: nn.Module
    loss: Loss
    me: User
    peers: tuple[User, ...]
    optimizer: Optimizer
    scheduler: Scheduler | None = None
    steps: int = 1000
    batch_size: int = 32
    seed: int = 0


class Runs(Protocol):
    """K runs side by side."""

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run.

        Args:
            weights: of shape (K, 1 + N): of the own gradient, then of each peer's; every row sums to 1.
        """

    def grams(self) -> Tensor:
        """Return what each gradient lacks of the held-out one, multiplied out, of shape (K, 1 + N, 1 + N).

        With the rows of G the own gradient on the examples that the run sees and the peers' gradients, and h
        the gradient on those it is blind to: (G − 1hᵀ)(G − 1hᵀ)ᵀ, in double precision.
        """

    def held_out_losses(self) -> Tensor:
        """Return the loss of each of user 0's examples, of shape (K, n); NaN where the run sees it."""


def scheduler_of(scheduler: Scheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """Return the scheduler; none in the place of one that waits for a validation loss, which runs here have not."""
    made = scheduler and scheduler(optimizer)
    return None if isinstance(made, ReduceLROnPlateau) else made
