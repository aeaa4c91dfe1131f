"""K runs as one program: the parameters stacked, the gradient mapped over them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.engines.in_process.copies import MAX_ACTIVATION_BYTES
from coterie.engines.in_process.engine import InProcess
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.users.sampling import BatchStream, IndexTable, random_key


class Batched:
    """K runs as one program: the parameters stacked, the gradient mapped over them."""

    def __init__(self, spec: RunSpec, engine: InProcess, seen: Tensor, starts: Tensor | None = None) -> None:
        self._copies, self._engine, self._step = engine.copies(), engine, 0
        self._me = engine.users[spec.me.name]
        self._names = engine.names
        parameters = engine.parameters
        x = parameters.vector().expand(len(seen), -1) if starts is None else starts.to(parameters.device)
        self._stack = Stack(x.clone(), [(spec, len(seen))])
        name, seed = spec.me.name, spec.seed
        self._seen = seen.to(parameters.device)
        self._own = _Draws(seen, spec.batch_size, random_key(seed, name), x)
        self._held_out = _Draws(~seen, spec.batch_size, random_key(seed, f"{name}/held out"), x)

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return self._stack.x

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run; see `Runs.advance`."""
        weights = weights.to(self._own.like)
        indices, own = self._own.at(self._step)
        inputs, targets = ([part] for part in self._me.examples.take(indices))
        shares = [weights[:, :1] * own]
        for batch in self._engine.draw(self._names, self._step)[1]:
            size = len(batch.inputs) // len(batch.positions)
            theirs = weights[:, [1 + position for position in batch.positions]] / size
            shares.append(theirs.repeat_interleave(size, dim=1))
            inputs.append(batch.inputs)
            targets.append(batch.targets)
        everything = torch.cat(shares, dim=1), torch.cat(inputs), torch.cat(targets)
        self._stack.direction.copy_(self._gradients(*everything, slice(None)))
        self._stack.step()
        self._step += 1

    def grams(self) -> Tensor:
        """Return the Gram matrices of what each gradient lacks; see `Runs.grams`."""
        n_rows = 1 + len(self._names)
        bytes_a_run = n_rows * self.x.shape[1] * self.x.element_size()
        most = max(1, 16 * MAX_ACTIVATION_BYTES.get(self.x.device.type, 2**28) // bytes_a_run)
        runs = torch.split(torch.arange(len(self._seen)), most)
        return torch.cat([self._grams(slice(int(some[0]), int(some[-1]) + 1)) for some in runs])

    def held_out_losses(self) -> Tensor:
        """Return the loss of each example that a run is blind to; see `Runs.held_out_losses`."""
        inputs, targets = self._me.examples.take(torch.arange(self._seen.shape[1]))
        chunks = torch.split(self.x, self._copies.max_copies(inputs, len(inputs)))
        by_run = torch.cat([self._copies.losses(x[None], inputs[None], targets[None])[0] for x in chunks])
        return by_run.double().masked_fill(self._seen, torch.nan)

    def _grams(self, runs: slice) -> Tensor:
        """Return the Gram matrices of some runs."""
        x = self.x[runs]
        own, held_out = (
            self._gradients(draws.at(self._step)[1][runs], *self._take(draws), runs)
            for draws in (self._own, self._held_out)
        )
        batches, rows = self._engine.draw(self._names, self._step)[1], [own]
        for batch in batches:
            inputs, targets = batch.by_user(batch.inputs), batch.by_user(batch.targets)
            mean = x.new_tensor(1 / inputs.shape[1]).expand(len(inputs), len(x), inputs.shape[1])
            rows += self._copies.gradients(x.expand(len(inputs), *x.shape), mean, inputs, targets)[0]
        order = [0, *(1 + position for batch in batches for position in batch.positions)]
        lacking = torch.stack([rows[place] for place in np.argsort(order)], dim=1) - held_out.unsqueeze(1)
        return (lacking @ lacking.mT).double().cpu()

    def _take(self, draws: _Draws) -> tuple[Tensor, Tensor]:
        return self._me.examples.take(draws.at(self._step)[0])

    def _gradients(self, shares: Tensor, inputs: Tensor, targets: Tensor, runs: slice) -> Tensor:
        """Return the gradient of each run's weighted sum of the examples' losses, of shape (runs, d)."""
        most = self._copies.max_copies(inputs, len(inputs))
        chunks = zip(torch.split(self.x[runs], most), torch.split(shares, most), strict=True)
        batch = inputs[None], targets[None]
        return torch.cat([self._copies.gradients(x[None], some[None], *batch)[0][0] for x, some in chunks])


class _Draws:
    """User 0's batches in all runs at once: which examples any run draws, and their weights in each.

    Run q draws from its part of the examples as a user with those examples alone would.
    """

    def __init__(self, part: Tensor, batch_size: int, key: int, like: Tensor) -> None:
        masks, self.which = torch.unique(part.cpu(), dim=0, return_inverse=True)
        self.parts = [mask.nonzero().flatten() for mask in masks]
        self.n, self.like = part.shape[1], like[:1, :1]
        self.streams = [BatchStream(key, len(part), min(batch_size, len(part))) for part in self.parts]
        self.table = IndexTable(self.streams)
        self.whole = all(stream.size == stream.n for stream in self.streams)
        self.kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the indices drawn by any run, and the weight of each in every run."""
        if self.kept is None or (self.kept[0] != step and not self.whole):
            shares = torch.zeros(len(self.parts), self.n, dtype=torch.float64)
            drawn = torch.split(self.table.row(step), [stream.size for stream in self.streams])
            for row, part, places in zip(shares, self.parts, drawn, strict=True):
                if len(places):
                    row.index_put_((part[places],), row.new_tensor(1 / len(places)), accumulate=True)
            used = shares.any(0).nonzero().flatten()
            self.kept = step, (used.to(self.like.device), shares[:, used][self.which].to(self.like))
        return self.kept[1]
