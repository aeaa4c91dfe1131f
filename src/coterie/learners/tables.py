"""Batches that runs share: everybody's examples in one pool, and the rows of it that each step takes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from coterie.users.examples import InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, joined, mapped
from coterie.users.user import User


class ExamplePool:
    """The examples of many users, alike and in memory, in one place; what several users share is kept once."""

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
        inputs, targets = (joined(each) for each in zip(*((e.inputs, e.targets) for e in held), strict=True))
        self.examples = InMemory(inputs, targets).to(device)

    def stream(self, user: User, batch_size: int, seed: int) -> BatchStream:
        """Return a user's batches under a seed, those of `User.batch`."""
        key, first = random_key(seed, user.name), self._first[id(user.examples)]
        return BatchStream(key, len(user), min(batch_size, len(user)), first)


class Table:
    """The batches of G groups of users: R rows of a pool each, short groups filled up with their first row."""

    def __init__(self, examples: InMemory, groups: Sequence[Sequence[BatchStream]]) -> None:
        self.examples, self.groups = examples, groups
        self.rows = max(sum(stream.size for stream in group) for group in groups)
        streams = [stream for group in groups for stream in group]
        places = [
            g * self.rows + sum(before.size for before in group[:i])
            for g, group in enumerate(groups)
            for i in range(len(group))
        ]
        filled = torch.tensor([group[0].first for group in groups]).repeat_interleave(self.rows)
        self._indices = IndexTable(streams, places, filled, max_entries=2**20)
        self._whole = all(stream.size == stream.n for stream in streams)
        self._kept: tuple[Tree, Tree] | None = None

    def at(self, step: int) -> tuple[Tree, Tree]:
        """Return the inputs and targets of a step, each of shape (G, R, …)."""
        if self._kept is not None:
            return self._kept
        batches = self.of(self._indices.row(step, self.examples.device))
        if self._whole:  # every batch is all there is
            self._kept = batches
        return batches

    def block(self, step: int) -> Tensor:
        """Return the rows of the pool that this step and some after it take."""
        return self._indices.block(step)

    def of(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Return the inputs and targets of one row of a block."""
        inputs, targets = (mapped(self._by_group, tree) for tree in self.examples.take(indices))
        return inputs, targets

    def counted(self, shares: Tensor, counts: Tensor) -> Tensor:
        """Return shares (G, M, R) where examples count (G, R) differently in the mean over their user's batch."""
        counts = counts.to(shares)
        factors = torch.ones_like(counts)
        for row, group, into in zip(counts, self.groups, factors, strict=True):
            sizes = [stream.size for stream in group]
            for some, to in zip(
                torch.split(row[: sum(sizes)], sizes), torch.split(into[: sum(sizes)], sizes), strict=True
            ):
                total = some.sum()
                to.copy_(torch.where(total == 0, 0.0, len(some) / total))
        return shares * factors.unsqueeze(1)

    def _by_group(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(self.groups), self.rows, *tensor.shape[1:])

    def shares(self, weights: Sequence[Sequence[dict[BatchStream, float]]]) -> Tensor:
        """Return what each example weighs, (G, M, R), by each user's weight for a group's runs; 0 where filled."""
        by_group = torch.zeros(len(self.groups), len(weights[0]), self.rows, dtype=torch.float64)
        for group, runs, shares in zip(self.groups, weights, by_group, strict=True):
            sizes = torch.tensor([stream.size for stream in group])
            each = by_group.new_tensor([[run.get(stream, 0.0) / stream.size for stream in group] for run in runs])
            shares[:, : int(sizes.sum())] = each.repeat_interleave(sizes, dim=1)
        return by_group
