"""Gradients and losses at several points in one pass: one model in many copies, over users in this process."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from coterie.engines.capabilities import Stackable
from coterie.engines.in_process.reused_memory import ReusedMemory
from coterie.engines.in_process.sampler import Batches
from coterie.gradients.gradients import finite_rows, is_finite
from coterie.learners.points import Own, Points, Sums, combined
from coterie.learners.spec import RunSpec
from coterie.users.examples import Examples, InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, mapped, n_rows, split, together

MAX_ROW_BYTES = {"cpu": 2**25, "cuda": 2**30}
"""About how many bytes of peers' gradients are held at once where each is wanted by itself."""


class PointsTogether(Points):
    """The same as `Points`, to rounding, in one pass each for user 0 and for the peers."""

    def __init__(self, spec: RunSpec, engine: Stackable, parts: Tensor) -> None:
        super().__init__(spec, engine, parts)
        self._stackable, self._copies = engine, engine.copies()
        self._me = engine.users[spec.me.name]
        self._held: dict[int, InMemory] = {}
        self._memory = defaultdict[str, ReusedMemory](ReusedMemory)
        like = self.start()
        self._shares = (parts / parts.sum(1, keepdim=True)).to(like)
        self._draws = _Draws(parts, spec.batch_size, random_key(spec.seed, spec.me.name), like)
        self._columns: dict[tuple[int, ...], Tensor] = {}

    def _carried_buffers(self) -> list[str]:
        return []  # a model that moves any is not stackable

    def own(self, points: Tensor, step: int, parts: Sequence[int]) -> Own:
        """Return user 0's gradient at each point; see `Points.own`. Here `parts` are all parts, once or more."""
        if list(parts) != [*range(len(self.parts))] * (len(points) // len(self.parts)):
            raise AssertionError("points are those of copies that see all parts")
        return self.own_of(points, self._draws.row(step))

    def own_of(self, points: Tensor, drawn: Tensor) -> Own:
        """Return user 0's gradients at points, whose parts are all parts once or more, on the examples drawn."""
        groups, size = self._draws.shares.shape
        inputs, targets = (
            mapped(lambda leaf: leaf.view(groups, size, *leaf.shape[1:]), tree)
            for tree in self._me.examples.take(drawn)
        )
        x = points[:, : self.d].view(-1, groups, self.d).transpose(0, 1)  # copies of one part share its batch
        counted = self._counted(self._draws.shares, targets)
        shares = counted.unsqueeze(1).expand(groups, x.shape[1], size)
        most = max(1, self._copies.max_copies(mapped(itemgetter(0), inputs), size) // x.shape[1])
        lengths = [len(some) for some in torch.split(x, most)]
        gradients = self._empty("own", (len(points), self.d))
        into = gradients.view(-1, groups, self.d).transpose(0, 1)
        cut = zip(*(split(tree, lengths) for tree in (x, shares, inputs, targets, into)), strict=True)
        losses = [self._copies.gradients(*some)[1] for some in cut]
        loss = losses[0][0, 0]
        if self._copies.weighs:  # not a number where the loss ignores the whole batch
            loss = torch.where(counted[0].any(), loss, torch.nan)
        return Own(gradients, loss, points[:, self.d :])

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples that user 0's parts and the peers draw in the next steps, a row for each step."""
        return [self._draws.block(step), self._stackable.indices(self.names, step)]

    def on_all(self, points: Tensor, step: int, parts: Sequence[int]) -> Tensor:
        """Return user 0's gradient at each point, on all examples of its part."""
        everything, shares = self._me.examples.take(torch.arange(self.parts.shape[1])), self._shares[list(parts)]
        return self._gradients(points, self._counted(shares, mapped(_alone, everything[1])), *everything)[0]

    def sums(self, points: Tensor, step: int, weights: Tensor) -> Sums:
        """Return the peers' weighted sums; see `Points.sums`."""
        sums = self._sums(points, self._drawn(step), weights)
        if is_finite(sums.sums):
            return sums
        rows, left_out = self.rows(points, step, weights > 0)
        return combined(rows, weights, left_out)

    def sums_of(self, points: Tensor, drawn: Tensor, weights: Tensor) -> Sums:
        """Return the peers' weighted sums on the examples drawn, finite or not."""
        return self._sums(points, self._stackable.at(self.names, drawn)[1], weights)

    def _sums(self, points: Tensor, batches: Sequence[Batches], weights: Tensor) -> Sums:
        shares = [
            self._of_some(weights, batch.positions).repeat_interleave(batch.size, dim=1)
            * self._mean(batch).flatten()
            if self._copies.weighs
            else (self._of_some(weights, batch.positions) / batch.size).repeat_interleave(batch.size, dim=1)
            for batch in batches
        ]
        inputs, targets = (
            together(torch.cat, each) for each in zip(*((b.inputs, b.targets) for b in batches), strict=True)
        )
        sums = self._gradients(points, torch.cat(shares, dim=1), inputs, targets)[0]
        return Sums(sums, weights.sum(1))

    def _of_some(self, weights: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the columns of some peers."""
        which = tuple(positions)
        if which not in self._columns:
            self._columns[which] = torch.tensor(which, device=weights.device)
        return weights.index_select(1, self._columns[which])

    def rows(self, points: Tensor, step: int, asked: Tensor) -> tuple[Tensor, dict[str, str]]:
        """Return each peer's gradient at each point; see `Points.rows`."""
        batches, usable, done = self._drawn(step), finite_rows(points), 0
        rows = self._empty("rows", (len(points), len(self.names), self.d))
        for part in self._cut(batches, len(points)):
            theirs = slice(done, done := done + len(part.positions))
            self._write_rows(points, part, rows[:, theirs])
        if len(batches) > 1:
            order = [position for batch in batches for position in batch.positions]
            rows = rows[:, torch.tensor(order).argsort().to(rows.device)]
        lost = (asked & ~finite_rows(rows))[usable].any(0).tolist()
        rows[~usable] = torch.nan
        return rows, {name: "not finite" for name, one in zip(self.names, lost, strict=True) if one}

    def losses(self, points: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each example at each point; see `Points.losses`."""
        if not isinstance(examples, InMemory):
            return super().losses(points, examples)
        held = self._held.setdefault(id(examples), examples.to(points.device))
        batch = mapped(_alone, held.inputs), mapped(_alone, held.targets)
        chunks = torch.split(points, self._copies.max_copies(held.inputs, len(held)))
        each = [self._copies.losses(x[None], *batch)[0] for x in chunks]
        return torch.cat(each).double().cpu()

    def _empty(self, use: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor to be filled; for a large model in memory that was used so before."""
        if not self._copies.one_by_one:
            return self._shares.new_empty(shape)
        return self._memory[use].empty(shape, self._shares)

    def _drawn(self, step: int) -> list[Batches]:
        return self._stackable.draw(self.names, step)[1]

    def _cut(self, batches: Sequence[Batches], copies: int) -> Iterator[Batches]:
        """Return batches in parts of as many peers as can be held."""
        for batch in batches:
            held = MAX_ROW_BYTES.get(self._shares.device.type, 2**28)
            yield from batch.cut(max(1, held // (copies * self.d * self._shares.element_size())))

    def _write_rows(self, points: Tensor, batch: Batches, rows: Tensor) -> None:
        """Write the gradients of some peers at all points, of shape (R, peers, d)."""
        inputs, targets = batch.by_user(batch.inputs), batch.by_user(batch.targets)
        x = points[:, : self.d]
        peers = len(batch.positions)
        mean = self._mean(batch).unsqueeze(1).expand(peers, len(x), batch.size)
        self._copies.gradients(x.expand(peers, *x.shape), mean, inputs, targets, rows.transpose(0, 1))

    def _mean(self, batch: Batches) -> Tensor:
        """Return what each example weighs in its peer's loss, (peers, size): 1 over all that those count."""
        counts = self._copies.counts(batch.by_user(batch.targets))
        if counts is None:
            return self._shares.new_tensor(1 / batch.size).expand(len(batch.positions), batch.size)
        totals = counts.sum(1, keepdim=True).to(self._shares)
        return torch.where(totals == 0, 0.0, 1 / totals).expand_as(counts)

    def _counted(self, shares: Tensor, targets: Tree) -> Tensor:
        """Return user 0's shares, each row over what its examples count; the targets of each row, or of all."""
        counts = self._copies.counts(targets)
        if counts is None:
            return shares
        totals = (shares * counts).sum(1, keepdim=True).to(shares)
        return torch.where(totals == 0, 0.0, shares / totals)

    def _gradients(self, points: Tensor, shares: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """Return the gradient of each copy's weighted sum of the examples' losses, and that sum."""
        one_by_one = self._copies.one_by_one
        most = len(points) if one_by_one else self._copies.max_copies(inputs, n_rows(inputs))
        batch = mapped(_alone, inputs), mapped(_alone, targets)
        gradients = self._empty("sums", (len(points), self.d))
        chunks = zip(*(torch.split(each, most) for each in (points[:, : self.d], shares, gradients)), strict=True)
        sums = [self._copies.gradients(x[None], some[None], *batch, into[None])[1] for x, some, into in chunks]
        return gradients, torch.cat([some[0] for some in sums])


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor as that of the only group."""
    return tensor[None]


class _Draws:
    """User 0's batches from several parts of its examples, those of users with these examples alone.

    Batches of parts that are smaller than others are filled up with examples that weigh nothing.
    """

    def __init__(self, parts: Tensor, batch_size: int, key: int, like: Tensor) -> None:
        kept = [part.nonzero().flatten() for part in parts.cpu()]
        self.places, begins = torch.cat(kept), [0, *itertools.accumulate(map(len, kept))][:-1]
        sizes = [min(batch_size, len(part)) for part in kept]
        widest = max(sizes)
        streams = [BatchStream(key, len(part), *at) for part, *at in zip(kept, sizes, begins, strict=True)]
        filled = torch.tensor(begins).repeat_interleave(widest)
        self._table = IndexTable(streams, range(0, len(filled), widest), filled)
        columns = torch.arange(widest, device=like.device)
        self.shares = torch.stack([(columns < size) / like.new_tensor(size) for size in sizes])
        self._there = self.places.to(like.device)

    def block(self, step: int) -> Tensor:
        """Return the examples of the next steps, a row for each step with one part's batch after the other."""
        return self.places[self._table.block(step)]

    def row(self, step: int) -> Tensor:
        """Return the examples of a step."""
        return self._there[self._table.row(step, self._there.device)]
