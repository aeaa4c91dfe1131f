"""Many runs at once: one model in many copies, trained side by side.

The parameters of all runs are the rows of a matrix (`Stack`), batches go through all copies of the model together
(`Copies`), and an optimizer that works element by element does not notice. Two kinds of runs go so:

- Cross-fitting and cross-validation need the same training many times over, each blind to some of user 0's examples
  and with other weights (`side_by_side`); in a plain loop (`OneByOne`) where model or optimizer allow no more.
- `coterie.train_many` has runs of any users, seeds, rules and step sizes (`Program`), which draw only once the
  batches that they share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.engines.in_process.engine import InProcess
from coterie.learners.batched import Batched
from coterie.learners.one_by_one import OneByOne
from coterie.learners.spec import Problem, Runs, Scheduler

__all__ = [
    "ELEMENTWISE",
    "Batched",
    "OneByOne",
    "Problem",
    "Runs",
    "Scheduler",
    "engine_of",
    "side_by_side",
    "why_one_by_one",
]

ELEMENTWISE = frozenset(
    {"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""The optimizers of `torch.optim` that treat every number of a parameter by itself. Adagrad does too, but makes its
state before the first step, when the parameters are not stacked yet."""


def side_by_side(problem: Problem, seen: Tensor, *, starts: Tensor | None = None) -> Runs:
    """Return K runs, as one program where model, loss and optimizer allow it, else one by one.

    Args:
        problem: what to train.
        seen: of shape (K, n): which of user 0's examples each run learns from.
        starts: of shape (K, d): where each run starts; all at the model's parameters when None.

    Example:
        >>> from torch import nn
        >>> from coterie import User
        >>> users = [User(name, torch.randn(6, 2), torch.randn(6, 1)) for name in ("me", "a", "b")]
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> problem = Problem(model, nn.functional.mse_loss, users[0], tuple(users[1:]), sgd)
        >>> runs = side_by_side(problem, seen=torch.arange(6) % 2 == torch.tensor([[0], [1]]))
        >>> runs.advance(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        >>> type(runs).__name__, runs.x.shape, runs.grams().shape
        ('Batched', torch.Size([2, 3]), torch.Size([2, 3, 3]))
    """
    engine = engine_of(problem)
    if why_one_by_one(problem, engine) is None:
        return Batched(problem, engine, seen, starts)
    return OneByOne(problem, seen, starts)


def why_one_by_one(problem: Problem, engine: InProcess | None = None) -> str | None:
    """Say why runs cannot be one program, or None where they can."""
    engine = engine or engine_of(problem)
    if engine.capabilities.not_stacked:
        return engine.capabilities.not_stacked
    kind = type(problem.optimizer)
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element"
    return "the optimizer has taken steps before" if problem.optimizer.state else None


def engine_of(problem: Problem) -> InProcess:
    """Return where the gradients of a problem come from, in this process."""
    return InProcess(
        problem.model,
        problem.loss,
        problem.me,
        problem.peers,
        batch_size=problem.batch_size,
        seed=problem.seed,
    )
