"""K runs in a plain loop: the readable twin of `Batched`, for any model, loss and optimizer."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Subset

from coterie.evaluation.evaluate import example_losses
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Costs
from coterie.rules import Alone, WeightedAveraging
from coterie.users.examples import FromDataset, InMemory
from coterie.users.user import User


class OneByOne:
    """K runs in a plain loop: the readable twin of `Batched`, for any model, loss and optimizer."""

    def __init__(self, spec: RunSpec, seen: Tensor, starts: Tensor | None = None) -> None:
        self._runs = [_One(spec, kept, None if starts is None else starts[q]) for q, kept in enumerate(seen)]

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return torch.stack([run.learner.x for run in self._runs])

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

    def __init__(self, spec: RunSpec, seen: Tensor, start: Tensor | None) -> None:
        model, optimizer = copy.deepcopy((spec.model, spec.made_optimizer))
        self.spec = replace(spec, model=model, optimizer=optimizer, me=_part(spec.me, seen))
        self.engine = self.spec.in_process()
        costs = Costs(dict.fromkeys([spec.me.name, *self.engine.names], spec.batch_size))
        self.learner = Learner(self.spec, Alone(), self.engine, costs)
        if start is not None:
            self.learner.x.copy_(start)
        self.seen = seen
        self.held_out = None if bool(seen.all()) else _part(spec.me, ~seen).to(self.learner.x.device)

    def advance(self, own: float, peers: list[float]) -> None:
        alpha, x = sum(peers), self.learner.x
        tau = {name: weight / alpha for name, weight in zip(self.engine.names, peers, strict=True) if weight}
        rule = WeightedAveraging(min(1.0, max(0.0, 1 - own)), tau or None)
        g = self.engine.gradients(x, self.learner.step, tau)
        self.learner.follow(rule(g, rule.init(x))[0] if tau else g.own)

    def gram(self) -> Tensor:
        n = 1 + len(self.engine.names)
        if self.held_out is None:
            return torch.full((n, n), torch.nan, dtype=torch.float64)
        x, step, spec = self.learner.x, self.learner.step, self.spec
        other = _named(self.held_out, f"{spec.me.name}/held out")
        held_out = self.engine.gradient_on(x, other.batch(spec.batch_size, seed=spec.seed, step=step))
        return self.engine.gram(x, step, held_out).cpu()

    def held_out_losses(self) -> Tensor:
        by_example = torch.full((len(self.seen),), torch.nan, dtype=torch.float64)
        if self.held_out is not None:
            by_example[~self.seen] = example_losses(self.spec.model, self.spec.loss, self.held_out.examples)
        return by_example


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
