"""K runs as one program: the parameters stacked, the gradient mapped over them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.optim import Optimizer

from coterie.draws import draw, random_key
from coterie.engines.in_process import InProcess
from coterie.engines.passes import mean_of_each
from coterie.evaluation import evaluation_mode
from coterie.many.problem import Problem, scheduler_of

MEMORY = {"cpu": 2**25, "cuda": 2**30}
"""About how many bytes of activations the runs that share a pass may hold: on a CPU, no more than its caches."""


class Batched:
    """K runs as one program: the parameters stacked, the gradient mapped over them."""

    def __init__(self, problem: Problem, engine: InProcess, seen: Tensor, starts: Tensor | None = None) -> None:
        self._passes, self._everyone, self._step = engine.passes, engine.everyone, 0
        self._names = engine.names
        parameters = self._passes.parameters
        self._memory = MEMORY.get(parameters.device.type, 2**28)
        x = parameters.vector().expand(len(seen), -1) if starts is None else starts.to(parameters.device)
        pieces = zip(parameters.named, torch.split(x, parameters.lengths, dim=1), parameters.shapes, strict=True)
        self._x = {name: piece.reshape(len(x), *shape).clone() for name, piece, shape in pieces}
        self._optimizer = _moved(problem, self._x)
        self._scheduler = scheduler_of(problem.scheduler, self._optimizer)
        name, seed = problem.me.name, problem.seed
        self._seen = seen.to(parameters.device)
        self._own = _Draws(seen, problem.batch_size, random_key(seed, name), x)
        self._held_out = _Draws(~seen, problem.batch_size, random_key(seed, f"{name}/held out"), x)

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return torch.cat([value.flatten(1) for value in self._x.values()], dim=1)

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run; see `Runs.advance`."""
        weights = weights.to(self._own.like)
        indices, own = self._own.at(self._step)
        inputs, targets = ([part] for part in self._everyone.me.examples.take(indices))
        shares = [weights[:, :1] * own]
        for batch in self._everyone.draw(self._names, self._step)[1]:
            size = len(batch.inputs) // len(batch.positions)
            theirs = weights[:, [1 + position for position in batch.positions]] / size
            shares.append(theirs.repeat_interleave(size, dim=1))
            inputs.append(batch.inputs)
            targets.append(batch.targets)
        found = self._gradients(torch.cat(shares, dim=1), torch.cat(inputs), torch.cat(targets), slice(None))
        for name, value in self._x.items():
            value.grad = found[name]
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._step += 1

    def grams(self) -> Tensor:
        """Return the Gram matrices of what each gradient lacks; see `Runs.grams`."""
        n_rows = 1 + len(self._names)
        bytes_a_run = n_rows * self._passes.parameters.size * self._own.like.element_size()
        runs = torch.split(torch.arange(len(self._seen)), max(1, 8 * self._memory // bytes_a_run))
        return torch.cat([self._grams(slice(int(some[0]), int(some[-1]) + 1)) for some in runs])

    def held_out_losses(self) -> Tensor:
        """Return the loss of each example that a run is blind to; see `Runs.held_out_losses`."""
        inputs, targets = self._everyone.me.examples.take(torch.arange(self._seen.shape[1]).to(self._seen.device))

        def losses(values: dict[str, Tensor]) -> Tensor:
            return self._losses(values, inputs, targets)

        with torch.no_grad(), evaluation_mode(self._passes.model):
            found: Tensor = vmap(losses, chunk_size=self._chunk(inputs))(self._x)
        return found.double().masked_fill(self._seen, torch.nan)

    def _grams(self, runs: slice) -> Tensor:
        """Return the Gram matrices of some runs, added up layer by layer."""
        values = {name: value[runs] for name, value in self._x.items()}
        own, held_out = (
            self._gradients(draws.at(self._step)[1][runs], *self._take(draws), runs)
            for draws in (self._own, self._held_out)
        )

        def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self._passes.loss(functional_call(self._passes.model, values, (inputs,)), targets)

        rows = vmap(vmap(grad(loss), in_dims=(None, 0, 0)), in_dims=(0, None, None))
        batches = self._everyone.draw(self._names, self._step)[1]
        theirs = [rows(values, b.by_user(b.inputs), b.by_user(b.targets)) for b in batches]
        grams: Tensor | float = 0.0
        for name in values:
            lacking = torch.cat([own[name].unsqueeze(1), *(found[name] for found in theirs)], dim=1).flatten(2)
            lacking -= held_out[name].flatten(1).unsqueeze(1)
            grams = grams + (lacking @ lacking.mT).double()
        order = [0, *(1 + position for batch in batches for position in batch.positions)]
        back = torch.tensor(order).argsort()
        return torch.as_tensor(grams)[:, back][:, :, back].cpu()

    def _take(self, draws: _Draws) -> tuple[Tensor, Tensor]:
        return self._everyone.me.examples.take(draws.at(self._step)[0])

    def _gradients(self, shares: Tensor, inputs: Tensor, targets: Tensor, runs: slice) -> dict[str, Tensor]:
        """Return the gradient of each run's weighted sum of the examples' losses."""

        def loss(values: dict[str, Tensor], shares: Tensor) -> Tensor:
            return shares @ self._losses(values, inputs, targets)

        values = {name: value[runs] for name, value in self._x.items()}
        found: dict[str, Tensor] = vmap(grad(loss), chunk_size=self._chunk(inputs))(values, shares)
        return found

    def _losses(self, values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        each = self._passes.per_example
        if each is None:
            raise AssertionError("`why_one_by_one` keeps losses that are no means over examples away")
        return mean_of_each(each(functional_call(self._passes.model, values, (inputs,)), targets))

    def _chunk(self, inputs: Tensor) -> int:
        """Return how many runs may share a pass, guessing that activations are a few times the inputs."""
        numbers = 2 * self._passes.parameters.size + 8 * inputs.numel()
        return max(1, self._memory // (numbers * self._own.like.element_size()))


class _Draws:
    """User 0's batches in all runs at once: which examples any run draws, and their weights in each.

    Run q draws from its part of the examples as a user with those examples alone would.
    """

    def __init__(self, part: Tensor, batch_size: int, key: int, like: Tensor) -> None:
        masks, self.which = torch.unique(part.cpu(), dim=0, return_inverse=True)
        self.parts = [mask.nonzero().flatten() for mask in masks]
        self.n, self.batch_size, self.key, self.like = part.shape[1], batch_size, key, like[:1, :1]
        self.whole = all(len(part) <= batch_size for part in self.parts)
        self.kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the indices drawn by any run, and the weight of each in every run."""
        if self.kept is None or (self.kept[0] != step and not self.whole):
            shares = torch.zeros(len(self.parts), self.n, dtype=torch.float64)
            for row, part in zip(shares, self.parts, strict=True):
                size = min(self.batch_size, len(part))
                if size:
                    drawn = part[draw([self.key], [len(part)], size, [step])[0, 0]]
                    row.index_put_((drawn,), row.new_tensor(1 / size), accumulate=True)
            used = shares.any(0).nonzero().flatten()
            found = used.to(self.like.device), shares[:, used][self.which].to(self.like)
            self.kept = step, found
        return self.kept[1]


def _moved(problem: Problem, stacked: Mapping[str, Tensor]) -> Optimizer:
    """Return a copy of the optimizer that holds the stacked parameters in the place of the model's."""
    model, optimizer = copy.deepcopy((problem.model, problem.optimizer))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        held = [names[id(p)] for p in group["params"]]
        group["params"] = [stacked[name] for name in held if name in stacked]
    return optimizer
