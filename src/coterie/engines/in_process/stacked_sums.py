"""The one operator of users in this process.

Gradients of weighted sums of users' losses at many points.

A column is a user, or a part of one's examples, with its batch of every step; a row is a point with
a weight for each column. What `sums` gives at a point is Σ w_u ∇f_u: a user's own gradient where
one column has weight, the peers' weighted sum where they have. Points that need nearly the same
batches share them, columns of weight zero are not passed over, and points go through the model in
as few passes as memory allows (`Copies`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.passes import ReusedMemory
from coterie.users.examples import InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, joined, mapped
from coterie.users.user import User

T = TypeVar("T")

MAX_EXTRA_EXAMPLES = 1.25
"""Points share a group where that passes at most this many times the examples that one needs.

The rest weigh 0.
"""
A_PASS = 512
"""To pass over so many more examples takes about as long as to begin another pass."""
MAX_LAYOUTS = 8
"""For how many matrices of weights it is kept which points go together."""


class ExamplePool:
    """The examples of many users, alike and in memory, in one place.

    What several users share is kept once.
    """

    def __init__(self, users: Iterable[User], device: torch.device) -> None:
        self._first: dict[int, int] = {}
        known: dict[str, int] = {}
        held: list[InMemory] = []
        total = 0
        for user in users:
            if id(user.examples) in self._first or not isinstance(user.examples, InMemory):
                continue
            mark = user.fingerprint()
            if mark not in known:
                known[mark] = total
                held.append(user.examples)
                total += len(user)
            self._first[id(user.examples)] = known[mark]
        inputs, targets = (
            joined(each) for each in zip(*((e.inputs, e.targets) for e in held), strict=True)
        )
        self.examples = InMemory(inputs, targets).to(device)
        # where each of the examples that streams count stands in the pool
        self.places = torch.arange(total)

    def stream(
        self, user: User, batch_size: int, seed: int, part: Tensor | None = None
    ) -> BatchStream:
        """Return a user's batches under a seed, those of `User.batch`.

        Or those of a user with a part only.

        `part`, of shape (n,), says which of the examples it has.
        """
        key, first, n = random_key(seed, user.name), self._first[id(user.examples)], len(user)
        if part is not None and not bool(part.all()):
            kept = part.cpu().nonzero().flatten() + first
            first, n = len(self.places), len(kept)
            self.places = torch.cat([self.places, kept])
        return BatchStream(key, n, min(batch_size, n), first)


@dataclass(frozen=True, eq=False)
class _Pass:
    """Points that go through the model together, in G groups of M that share their batches."""

    outputs: Tensor  # of shape (G M,): which rows of weights they are
    rows: Tensor  # of shape (G, R): which of the step's examples each group passes over
    there: Tensor  # of shape (G, R): which of these are no filling


@dataclass(frozen=True, eq=False)
class _Layout:
    """How points with these weights are passed."""

    asked: Tensor  # the weights asked for
    version: int  # of them, since they may be changed in place
    own: tuple[int, ...]
    weights: Tensor  # of all columns
    passes: list[_Pass]
    shares: list[Tensor]  # of shape (G, M, R) for each pass: what each example weighs


class StackedSums:
    """Gradients of weighted sums over columns of batches, at many points of one model.

    Args:
        copies: the model in many copies.
        pool: everybody's examples.
        streams: the columns.

    Example:
        >>> from coterie import InProcess
        >>> users = [User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
        >>> engine = InProcess(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, users[0], users[1:])
        >>> pool = ExamplePool(users, torch.device("cpu"))
        >>> stacked = StackedSums(engine.copies(), pool, [pool.stream(user, 4, seed=0) for user in users])
        >>> weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
        >>> sums, losses = stacked.sums(torch.zeros(2, 3), weights, stacked.drawn(step=0))
        >>> torch.allclose(sums[0], engine.with_batch_size(4).gradients(torch.zeros(3), 0, {}).own)
        True
    """

    def __init__(self, copies: Copies, pool: ExamplePool, streams: Sequence[BatchStream]) -> None:
        self.copies, self.pool, self.streams = copies, pool, list(streams)
        self.like = next(iter(copies.parameters.named.values())).detach().new_empty(0)
        device = self.like.device
        self._size_of = [stream.size for stream in streams]
        sizes = torch.tensor(self._size_of)
        self._table = IndexTable(self.streams, max_entries=2**20)
        self._begins = (sizes.cumsum(0) - sizes).tolist()
        self._whose = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
        self._sizes = sizes.to(self.like)
        self._places = pool.places.to(device)
        self._layouts: list[_Layout] = []
        # a captured graph reads these where they are, so they stay
        self._captured: dict[int, _Layout] = {}
        self._each: dict[tuple[int, tuple[int, ...]], _Layout] = {}  # of `rows`
        self._own: dict[tuple[int, ...], Tensor] = {}
        self._memory = ReusedMemory()

    def drawn(self, step: int) -> Tensor:
        """Return the examples of a step."""
        return self._table.row(step, self.like.device)

    def block(self, step: int) -> Tensor:
        """Return the examples of this step and of some after it, a row for each."""
        return self._table.block(step)

    def sums(
        self,
        points: Tensor,
        weights: Tensor,
        drawn: Tensor,
        own: tuple[int, ...] = (),
        *,
        origins: Tensor | None = None,
        asked: Tensor | None = None,
        layout: _Layout | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return Σ w_u ∇f_u, (Q, d), and Σ w_u f_u, (Q,), for each row of weights (Q, U) on the examples drawn.

        Args:
            points: of shape (P, d).
            weights: what each column weighs; where there are fewer, they are those of the last.
            drawn: the examples of a step.
            own: the columns of further rows, each of which has weight 1 in one.
            origins: the point of each row of weights, (Q,); the one in its place when None.
            asked: which columns are passed over, (Q, U), for weights that change while a captured
                step goes on; those of weights that are not zero when None. How they are passed is
                kept for good.
            layout: how they are passed, where that is known.
            into: where the sums are written, where given.
        """
        if layout is None:
            layout = self._layout(weights, own) if asked is None else self._kept_layout(asked)
        shares = layout.shares
        if asked is not None:
            shares = [self._shares(each, weights) for each in layout.passes]
        shape, large = (len(layout.weights), self.copies.parameters.size), self.copies.one_by_one
        # of a large model gradients are in memory that was used so before
        if into is not None:
            out = into
        else:
            out = self._memory.empty(shape, self.like) if large else self.like.new_empty(shape)
        losses = self.like.new_empty(shape[0])
        for each, plain in zip(layout.passes, shares, strict=True):
            copies = plain.shape[1]
            inputs, targets = self._batches(each, drawn)
            counts = self.copies.counts(targets) if self.copies.weighs else None
            share = plain if counts is None else self._counted(plain, each, counts)
            at = each.outputs if origins is None else origins.index_select(0, each.outputs)
            alone = len(at) == 1 and not at.is_cuda  # then nothing is copied
            x = points[int(at)][None] if alone else points.index_select(0, at)
            x = x.view(-1, copies, points.shape[1])
            there = out[int(each.outputs)].view(1, 1, -1) if alone else None
            gradients, sums = self.copies.gradients(x, share, inputs, targets, there)
            if counts is not None:  # not a number where the loss ignores the whole batch
                sums = torch.where(share.any(2), sums, torch.nan)
            if there is None:
                out.index_copy_(0, each.outputs, gradients.flatten(0, 1))
            losses.index_copy_(0, each.outputs, sums.flatten())
        return out, losses

    def rows(self, points: Tensor, columns: Sequence[int], drawn: Tensor) -> Tensor:
        """Return the gradient of each of these columns at each point, of shape (P, columns, d)."""
        key, count = (len(points), tuple(columns)), len(columns)
        if key not in self._each:
            passes = self._cut(
                [([p * count + i for p in range(len(points))], [u]) for i, u in enumerate(columns)]
            )
            shares = [
                (one.there / self._sizes[self._whose[one.rows]])[:, None].expand(
                    -1, len(one.outputs) // len(one.rows), -1
                )
                for one in passes
            ]
            of = torch.arange(len(points), device=self.like.device).repeat_interleave(count)
            self._each[key] = _Layout(of, of._version, (), of, passes, shares)
        layout = self._each[key]
        of = layout.asked  # the point of each row
        rows, _ = self.sums(points, of, drawn, origins=of, layout=layout)
        return rows.view(len(points), count, -1)

    def _batches(self, each: _Pass, drawn: Tensor) -> tuple[Tree, Tree]:
        """Return inputs and targets of a pass, of shape (G, R, …)."""
        groups, rows = each.rows.shape
        taken = self.pool.examples.take(self._places[drawn[each.rows.flatten()]])
        inputs, targets = (
            t.view(groups, rows, *t.shape[1:])
            if isinstance(t, Tensor)
            else mapped(lambda leaf: leaf.view(groups, rows, *leaf.shape[1:]), t)
            for t in taken
        )
        return inputs, targets

    def _shares(self, each: _Pass, weights: Tensor) -> Tensor:
        """Return what each example weighs at each point, (G, M, R).

        Its column's weight over the batch's size.
        """
        whose = self._whose[each.rows]
        mine = weights.index_select(0, each.outputs).view(len(whose), -1, weights.shape[1])
        over = each.there / self._sizes[whose]
        return mine.gather(2, whose[:, None].expand(-1, mine.shape[1], -1)) * over[:, None]

    def _counted(self, shares: Tensor, each: _Pass, counts: Tensor) -> Tensor:
        """Return shares where examples count (G, R) differently in the mean over their column's batch."""
        whose, counts = self._whose[each.rows], counts.to(shares) * each.there
        totals = (
            counts.new_zeros(len(counts), len(self.streams))
            .scatter_add_(1, whose, counts)
            .gather(1, whose)
        )
        return shares * torch.where(totals == 0, 0.0, self._sizes[whose] / totals)[:, None]

    def joined(self, weights: Tensor, own: tuple[int, ...]) -> Tensor:
        """Return weights of the last columns as weights of all, and below them rows of one column each."""
        if own not in self._own:
            self._own[own] = torch.eye(len(self.streams))[list(own)].to(weights)
        before = len(self.streams) - weights.shape[1]
        return torch.cat([nn.functional.pad(weights, (before, 0)), self._own[own]])

    def _layout(self, asked: Tensor, own: tuple[int, ...] = ()) -> _Layout:
        """Return how points with such weights are passed, found out once for weights that stay the same."""
        for layout in self._layouts:
            if layout.asked is asked and layout.version == asked._version and layout.own == own:
                return layout
        whole = asked.shape[1] == len(self.streams) and not own
        weights = asked if whole else self.joined(asked, own)
        passes = self._passes((weights != 0).cpu())
        shares = [self._shares(each, weights) for each in passes]
        fresh = _Layout(asked, asked._version, own, weights, passes, shares)
        others = (each for each in self._layouts if each.asked is not asked or each.own != own)
        self._layouts = [fresh, *others][:MAX_LAYOUTS]
        return fresh

    def _kept_layout(self, asked: Tensor) -> _Layout:
        """Return how points are passed at which these columns are asked, the same for good."""
        if id(asked) not in self._captured:
            self._captured[id(asked)] = self._layout(asked)
        return self._captured[id(asked)]

    def _passes(self, asked: Tensor) -> list[_Pass]:
        """Return passes that give every point what it needs, by the columns that are asked there (Q, U).

        Points that need nearly the same share a group; groups of about one size go together.
        """
        needs = [tuple(row.nonzero().flatten().tolist()) for row in asked]
        return self._cut(self._groups(needs))

    def _cut(self, groups: Iterable[tuple[list[int], list[int]]]) -> list[_Pass]:
        """Return passes of groups of points, each with all columns that they need."""
        cut: list[tuple[Sequence[int], list[int]]] = []
        for points, columns in groups:
            most = self._most(self._rows(columns))
            cut += [(some, columns) for some in _evenly(points, most)]
        cut.sort(key=lambda group: (len(group[0]), self._rows(group[1])))
        passes: list[_Pass] = []
        for copies, same in groupby(cut, key=lambda group: len(group[0])):
            for alike in self._of_about_one_size(list(same)):
                most = max(1, self._most(self._rows(alike[-1][1])) // copies)
                passes += [self._pass(some) for some in _evenly(alike, most)]
        return passes

    def _most(self, rows: int) -> int:
        return self.copies.max_copies(self.pool.examples.inputs, max(1, rows))

    def _rows(self, columns: Iterable[int]) -> int:
        return sum(map(self._size_of.__getitem__, columns))

    def _groups(self, needs: Sequence[tuple[int, ...]]) -> list[tuple[list[int], list[int]]]:
        """Return points that need nearly the same columns, and all that they need."""
        groups: list[tuple[list[int], dict[int, None], int]] = []
        known: dict[tuple[int, ...], int] = {}
        holders: dict[int, dict[int, None]] = {}  # the groups that need a column
        for point, wanted in enumerate(needs):
            if wanted not in known:
                rows = self._rows(wanted)
                for place in sorted({place for u in wanted for place in holders.get(u, ())}):
                    _, there, least = groups[place]
                    union = self._rows(there.keys() | set(wanted))
                    if union <= MAX_EXTRA_EXAMPLES * min(rows, least):
                        groups[place] = (
                            groups[place][0],
                            there | dict.fromkeys(wanted),
                            min(rows, least),
                        )
                        known[wanted] = place
                        break
                else:
                    known[wanted] = len(groups)
                    groups.append(([], dict.fromkeys(wanted), rows))
                for u in wanted:
                    holders.setdefault(u, {})[known[wanted]] = None
            groups[known[wanted]][0].append(point)
        return [(points, list(there)) for points, there, _ in groups]

    def _of_about_one_size(
        self, groups: Sequence[tuple[Sequence[int], list[int]]]
    ) -> list[list[tuple[Sequence[int], list[int]]]]:
        """Return groups, the shortest first, in parts whose filling is less work than another pass."""
        parts: list[list[tuple[Sequence[int], list[int]]]] = []
        filled = 0
        for group in groups:
            longer = self._rows(group[1]) - self._rows(parts[-1][-1][1]) if parts else 0
            filled += longer * (len(parts[-1]) if parts else 0) * len(group[0])
            if not parts or filled >= A_PASS:
                parts.append([])
                filled = 0
            parts[-1].append(group)
        return parts

    def _pass(self, groups: Sequence[tuple[Sequence[int], list[int]]]) -> _Pass:
        """Return groups of as many points each as one pass.

        Short ones are filled with an example that weighs 0.
        """
        each = [
            [
                row
                for u in columns
                for row in range(self._begins[u], self._begins[u] + self.streams[u].size)
            ]
            for _, columns in groups
        ]
        widest, device = max(1, *map(len, each)), self.like.device
        rows = torch.tensor([row + [row[0] if row else 0] * (widest - len(row)) for row in each])
        there = torch.arange(widest) < torch.tensor([len(row) for row in each])[:, None]
        outputs = torch.tensor([point for points, _ in groups for point in points])
        return _Pass(outputs.to(device), rows.to(device), there.to(device))


def _evenly(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return values in parts of about one size, which is at most that."""
    parts = -(-len(values) // most)
    ends = [len(values) * part // parts for part in range(parts + 1)]
    return [values[first:last] for first, last in pairwise(ends)]
