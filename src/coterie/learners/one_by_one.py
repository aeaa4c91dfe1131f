"""K runs in a plain loop: the readable twin of `Batched`, for any model, loss and optimizer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils.data import Subset

from coterie.engines.in_process.engine import InProcess
from coterie.evaluation.evaluate import losses
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import Problem, scheduler_of
from coterie.rules import WeightedAveraging
from coterie.users.examples import FromDataset, InMemory
from coterie.users.user import User


class OneByOne:
    """K runs in a plain loop: the readable twin of `Batched`, for any model, loss and optimizer."""

    def __init__(self, problem: Problem, seen: Tensor, starts: Tensor | None = None) -> None:
        self._runs = [_One(problem, kept, None if starts is None else starts[q]) for q, kept in enumerate(seen)]

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return torch.stack([run.x for run in self._runs])

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run; see `Runs.advance`."""
        for run, (own, *peers) in zip(self._runs, weights.tolist(), strict=True):
            run.advance(own, peers)

    def grams(self) -> Tensor:
        """Return the Gram matrices of what each gradient lacks; see `Runs.grams`."""
        return torch.stack([run.gram() for run in self._runs])

    def held_out_losses(self) -> Tensor:
        """Return the loss of each example that a run is blind to; see `Runs.held_out_losses`."""
        return torch.stack([run.held_out_losses() for run in self._runs])


class _One:
    """One run of `OneByOne`: its own copy of model and optimizer, its own view of user 0's examples."""

    def __init__(self, problem: Problem, seen: Tensor, start: Tensor | None) -> None:
        self.model, self.optimizer = copy.deepcopy((problem.model, problem.optimizer))
        self.scheduler = scheduler_of(problem.scheduler, self.optimizer)
        self.parameters = Parameters(self.model)
        self.x = self.parameters.share()
        if start is not None:
            self.x.copy_(start)
        self.me = _part(problem.me, seen)
        self.engine = InProcess(
            self.model, problem.loss, self.me, problem.peers, batch_size=problem.batch_size, seed=problem.seed
        )
        self.seen, self.loss, self.step = seen, problem.loss, 0
        self.held_out = None if bool(seen.all()) else _part(problem.me, ~seen).to(self.parameters.device)
        self.batch_size, self.seed = problem.batch_size, problem.seed

    def advance(self, own: float, peers: list[float]) -> None:
        alpha = sum(peers)
        tau = {name: weight / alpha for name, weight in zip(self.engine.names, peers, strict=True) if weight}
        rule = WeightedAveraging(min(1.0, max(0.0, 1 - own)), tau or None)
        g = self.engine.gradients(self.x, self.step, tau)
        direction = rule(g, rule.init(self.x))[0] if tau else g.own
        self.parameters.set_gradient(direction)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1

    def gram(self) -> Tensor:
        n = 1 + len(self.engine.names)
        if self.held_out is None:
            return torch.full((n, n), torch.nan, dtype=torch.float64)
        batch = _named(self.held_out, f"{self.me.name}/held out").batch(
            self.batch_size, seed=self.seed, step=self.step
        )
        held_out = self.engine.gradient_on(self.x, batch)
        return self.engine.gram(self.x, self.step, held_out).cpu()

    def held_out_losses(self) -> Tensor:
        found = torch.full((len(self.seen),), torch.nan, dtype=torch.float64)
        if self.held_out is not None:
            found[~self.seen] = losses(self.model, self.loss, self.held_out.examples)
        return found


def _part(user: User, kept: Tensor) -> User:
    """Return a user with some of its examples only, and the same name."""
    indices, part = kept.cpu().nonzero().flatten(), copy.copy(user)
    if isinstance(user.examples, FromDataset):
        part.examples = FromDataset(Subset(user.examples.dataset, indices.tolist()), user.examples.device)
    elif isinstance(user.examples, InMemory):
        part.examples = InMemory(*user.examples.take(indices))
    return part


def _named(user: User, name: str) -> User:
    """Return a user under another name, and so with other batches."""
    other = copy.copy(user)
    other.name = name
    return other
