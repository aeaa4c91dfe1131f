"""The passes of everybody's steps: own gradients at everybody's points, and sums over batches that all share."""

import itertools
from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.learners.spec import RunSpec
from coterie.learners.tables import ExamplePool, Table
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, mapped, split

NEARLY_ALL = 0.8
"""The share of all examples from which on a point passes over all of them."""
A_PASS = 512
"""To pass over so many more examples takes about as long as to begin another pass."""


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

    def sums(self, weights: Tensor) -> "WeightedSums":
        """Return what gives the users' sums at P points by weights (P, N), in as many steps as these stay."""
        return WeightedSums(self, weights)

    def batches(self, step: int) -> tuple[Tree, Tree]:
        """Return everybody's batches of a step, one after the other, in one group."""
        if self._batches is None or self._batches[0] != step:
            self._batches = step, self._table.at(step)
        return self._batches[1]

    def shares(self, weights: Tensor) -> Tensor:
        """Return what each example weighs, of shape (P, R), by the weights of its user at P points."""
        return weights.index_select(1, self._whose) * self._over

    def counted(self, shares: Tensor, targets: Tree) -> Tensor:
        """Return shares where examples count differently in the mean over their user's batch."""
        counts = self.copies.counts(targets)
        return shares if counts is None else self._table.counted(shares[None], counts)[0]


class WeightedSums:
    """The users' sums at P points, by weights (P, N) that stay the same for some steps.

    Fitted weights are zero for many. So a point passes over the batches of those who weigh something there,
    together with points where about as many do; points where nearly all do share one batch.
    """

    def __init__(self, passes: SharedPasses, weights: Tensor) -> None:
        self._passes, self._shares = passes, passes.shares(weights)
        self._alike = _alike(self._shares != 0)
        self._parts: list[tuple[Tensor, Tensor]] = []  # of one pass each

    def at(self, points: Tensor, step: int) -> Tensor:
        """Return the sums at points (P, d)."""
        copies, (inputs, targets) = self._passes.copies, self._passes.batches(step)
        for places, rows in () if self._parts else self._alike:
            most = copies.max_copies(mapped(itemgetter(0), inputs), rows.shape[1])
            self._parts += zip(torch.split(places, most), torch.split(rows, most), strict=True)
        shares, sums = self._passes.counted(self._shares, targets), torch.empty_like(points)
        for places, rows in self._parts:
            x, weighs = points.index_select(0, places), shares.index_select(0, places)
            if rows.shape[1] == shares.shape[1]:
                gradients = copies.gradients(x[None], weighs[None], inputs, targets)[0][0]
            else:
                batches = (mapped(partial(_rows_of, rows), tree) for tree in (inputs, targets))
                gradients = copies.gradients(x.unsqueeze(1), weighs.gather(1, rows).unsqueeze(1), *batches)[
                    0
                ].squeeze(1)
            sums.index_copy_(0, places, gradients)
        return sums


def _alike(heard: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return points (P, R) that hear about as many examples together, each with the examples that it passes over.

    Rows of a part are of one length, filled up with examples that are not heard.
    """
    numbers, examples = heard.sum(1), heard.shape[1]
    lengths = torch.where(numbers > NEARLY_ALL * examples, examples, numbers.clamp(min=1)).cpu()
    first_heard = heard.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    parts: list[list[int]] = []
    filled = 0
    for point in lengths.argsort(stable=True).tolist():
        longer = int(lengths[point] - lengths[parts[-1][-1]]) * len(parts[-1]) if parts else A_PASS
        filled += longer
        if filled >= A_PASS:
            parts.append([])
            filled = 0
        parts[-1].append(point)
    ends = [int(lengths[part[-1]]) for part in parts]
    places = [torch.tensor(part, device=heard.device) for part in parts]
    return [(some, first_heard[some, :end]) for some, end in zip(places, ends, strict=True)]


def _rows_of(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return rows (G, r) of the only group of a batch (1, R, …)."""
    return leaf[0].index_select(0, rows.flatten()).view(*rows.shape, *leaf.shape[2:])


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
        by_copy = torch.cat(losses)
        if counts is not None:  # not a number where the loss ignores the whole batch
            by_copy = torch.where(shares.any(1, keepdim=True), by_copy, torch.nan)
        return torch.cat(gradients), by_copy
