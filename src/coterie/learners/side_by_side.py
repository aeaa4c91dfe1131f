"""Many runs at once: one model in many copies, trained side by side.

The parameters of all runs are the rows of a matrix (`Stack`), batches go through all copies of the model together
(`Copies`), and one optimizer that works element by element steps all rows. Two kinds of runs use this:

- Cross-fitting and cross-validation need the same training many times over, each blind to some of user 0's examples
  and with other weights (`side_by_side`); in a plain loop (`OneByOne`) where model or optimizer allow no more.
- `coterie.train_many` has runs of any users, seeds, rules and step sizes (`Program`), which draw only once the
  batches that they share.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from coterie.engines.in_process.engine import InProcess
from coterie.learners.batched import Batched
from coterie.learners.one_by_one import OneByOne
from coterie.learners.spec import RunSpec

__all__ = ["ELEMENTWISE", "Batched", "OneByOne", "Runs", "side_by_side", "why_one_by_one"]

ELEMENTWISE = frozenset(
    {"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""The optimizers of `torch.optim` that treat every number of a parameter by itself. Adagrad does too, but makes its
state before the first step, when the parameters are not stacked yet."""


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


def side_by_side(spec: RunSpec, seen: Tensor, *, starts: Tensor | None = None) -> Runs:
    """Return K runs, as one program where model, loss and optimizer allow it, else one by one.

    Args:
        spec: what to train; a run that is prepared.
        seen: of shape (K, n): which of user 0's examples each run learns from.
        starts: of shape (K, d): where each run starts; all at the model's parameters when None.

    Example:
        >>> from torch import nn
        >>> from coterie import User
        >>> users = [User(name, torch.randn(6, 2), torch.randn(6, 1)) for name in ("me", "a", "b")]
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> spec = RunSpec(model, nn.functional.mse_loss, users[0], users[1:], optimizer=sgd)
        >>> runs = side_by_side(spec, seen=torch.arange(6) % 2 == torch.tensor([[0], [1]]))
        >>> runs.advance(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        >>> type(runs).__name__, runs.x.shape, runs.grams().shape
        ('Batched', torch.Size([2, 3]), torch.Size([2, 3, 3]))
    """
    engine = spec.in_process()
    if why_one_by_one(spec, engine) is None:
        return Batched(spec, engine, seen, starts)
    return OneByOne(spec, seen, starts)


def why_one_by_one(spec: RunSpec, engine: InProcess | None = None) -> str | None:
    """Say why runs cannot be one program, or None where they can."""
    engine = engine or spec.in_process()
    if engine.capabilities.not_stacked:
        return engine.capabilities.not_stacked
    kind = type(spec.made_optimizer)
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element"
    return "the optimizer has taken steps before" if spec.made_optimizer.state else None
