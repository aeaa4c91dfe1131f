"""The passes of everybody's steps: own gradients at everybody's points, and sums over batches that all share."""

import itertools
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.learners.spec import RunSpec
from coterie.learners.tables import ExamplePool, Table
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, mapped, split


class SharedPasses:
    """Gradients at the points of many users, on batches that are drawn once for all.

    Runs are prepared, of one model, loss, batch size and seed; their examples are in memory. A user's batch as a
    peer is the same for all others, so that one pass over all batches serves all points.
    """

    def __init__(self, copies: Copies, specs: Sequence[RunSpec]) -> None:
        self.copies, self.users = copies, [spec.me for spec in specs]
        self.like = copies.parameters.vector()
        self._batch_size, self._seed = specs[0].batch_size, specs[0].seed
        self.pool = ExamplePool(self.users, self.like.device)
        streams = [self.pool.stream(user, self._batch_size, self._seed) for user in self.users]
        self._table = Table(self.pool.examples, [streams])
        sizes = torch.tensor([stream.size for stream in streams])
        self._whose = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.like.device)
        self._over = (1 / sizes.double()).repeat_interleave(sizes).to(self.like)
        self._batches: tuple[int, tuple[Tree, Tree]] | None = None

    def own(self, parts: Sequence[Tensor], places: Sequence[int]) -> "OwnBatches":
        """Return what users, by their places, draw for themselves from parts (P, n) of their examples."""
        kept, keys = [], []
        for some, place in zip(parts, places, strict=True):
            user = self.users[place]
            first, key = self.pool.stream(user, 1, 0).first, random_key(self._seed, user.name)
            kept += [part.cpu().nonzero().flatten() + first for part in some]
            keys += [key] * len(some)
        return OwnBatches(self, kept, keys, self._batch_size)

    def sums(self, points: Tensor, step: int, weights: Tensor) -> Tensor:
        """Return the users' weighted sums at points (P, d), by weights (P, N)."""
        if self._batches is None or self._batches[0] != step:
            self._batches = step, self._table.at(step)
        inputs, targets = self._batches[1]
        shares = (weights.index_select(1, self._whose) * self._over).unsqueeze(0)
        counts = self.copies.counts(targets)
        shares = shares if counts is None else self._table.counted(shares, counts)
        most = self.copies.max_copies(mapped(itemgetter(0), inputs), shares.shape[2])
        found = [
            self.copies.gradients(x[None], some, inputs, targets)[0][0]
            for x, some in zip(torch.split(points, most), torch.split(shares, most, dim=1), strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


class OwnBatches:
    """Batches that users draw from parts of their own examples, as users with these examples alone would.

    There is a group for each part of each user. Batches that are smaller than others are filled up with examples
    that weigh nothing.
    """

    def __init__(self, passes: SharedPasses, kept: Sequence[Tensor], keys: Sequence[int], batch_size: int) -> None:
        self._passes, self._places = passes, torch.cat(list(kept))
        begins = [0, *itertools.accumulate(map(len, kept))][:-1]
        sizes = [min(batch_size, len(part)) for part in kept]
        self._widest = max(sizes)
        drawn = zip(keys, kept, sizes, begins, strict=True)
        streams = [BatchStream(key, len(part), size, begin) for key, part, size, begin in drawn]
        filled = torch.tensor(begins).repeat_interleave(self._widest)
        self._table = IndexTable(streams, range(0, len(filled), self._widest), filled)
        like = passes.like
        columns = torch.arange(self._widest, device=like.device)
        self._shares = torch.stack([(columns < size) / like.new_tensor(size) for size in sizes])
        self._there = self._places.to(like.device)

    def gradients(self, points: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return gradients at points (G, M, d), on the batch of each group, and the losses (G, M)."""
        passes, (groups, copies) = self._passes, points.shape[:2]
        rows = self._there[self._table.row(step, self._there.device)]
        inputs, targets = (
            mapped(lambda leaf: leaf.view(groups, self._widest, *leaf.shape[1:]), tree)
            for tree in passes.pool.examples.take(rows)
        )
        shares = self._shares
        if (counts := passes.copies.counts(targets)) is not None:
            totals = (shares * counts).sum(1, keepdim=True).to(shares)
            shares = torch.where(totals == 0, 0.0, shares / totals)
        weights = shares.unsqueeze(1).expand(groups, copies, self._widest)
        most = max(1, passes.copies.max_copies(mapped(itemgetter(0), inputs), self._widest) // copies)
        lengths = [len(some) for some in torch.split(points, most)]
        cut = zip(*(split(tree, lengths) for tree in (points, weights, inputs, targets)), strict=True)
        gradients, losses = zip(*(passes.copies.gradients(*some) for some in cut), strict=True)
        found = torch.cat(losses)
        if counts is not None:  # not a number where the loss ignores the whole batch
            found = torch.where(shares.any(1, keepdim=True), found, torch.nan)
        return torch.cat(gradients), found
