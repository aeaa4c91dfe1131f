"""The batches of one step, of user 0 and the peers asked, drawn together."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from coterie.errors import DataError
from coterie.users.examples import Examples, InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key
from coterie.users.trees import Tree, each_row, form, joined, mapped, n_rows, split
from coterie.users.user import User

MAX_KEPT_SELECTIONS = 4
"""For how many selections of peers indices are kept.

A method may ask all users and user 0 alone in turn.
"""


@dataclass(frozen=True)
class Batches:
    """Batches of one size and form, one after the other.

    Inputs and targets of shape (users × size, …).
    """

    positions: Sequence[int]  # where their users stand among the peers asked
    inputs: Tree
    targets: Tree

    @property
    def n(self) -> int:
        """Examples of all users."""
        return n_rows(self.inputs)

    @property
    def size(self) -> int:
        """Examples of each user."""
        return self.n // len(self.positions)

    def by_user(self, tree: Tree) -> Tree:
        """Return tensors of one row an example as (users, size, …)."""
        return mapped(lambda leaf: leaf.reshape(len(self.positions), -1, *leaf.shape[1:]), tree)

    def each(self) -> Iterator[tuple[Tree, Tree]]:
        """Return one user's inputs and targets after the other's."""
        users = len(self.positions)
        inputs, targets = (
            each_row(self.by_user(tree), users) for tree in (self.inputs, self.targets)
        )
        return zip(inputs, targets, strict=True)

    def cut(self, users: int) -> list[Self]:
        """Return the batches of as many users at a time."""
        positions = [
            self.positions[start : start + users] for start in range(0, len(self.positions), users)
        ]
        lengths = [len(some) * self.size for some in positions]
        cuts = zip(
            positions, split(self.inputs, lengths), split(self.targets, lengths), strict=True
        )
        return [replace(self, positions=some, inputs=i, targets=t) for some, i, t in cuts]


def alike(batches: Sequence[Batches]) -> list[list[Batches]]:
    """Return those that can be joined, one such group after the other."""
    if len(batches) == 1:
        return [list(batches)]
    return [
        list(some) for _, some in groupby(batches, key=lambda b: (form(b.inputs), form(b.targets)))
    ]


def with_own(own: tuple[Tree, Tree], batches: Sequence[Batches]) -> list[Batches]:
    """Return user 0's batch at position 0, joined with those of its size, and the peers' at positions after it."""
    mine = Batches([0], *own)
    after = [
        replace(batch, positions=[position + 1 for position in batch.positions])
        for batch in batches
    ]
    same = [mine, *(batch for batch in after if batch.size == mine.size)]
    inputs, targets = (
        joined(trees) for trees in zip(*((b.inputs, b.targets) for b in same), strict=True)
    )
    whole = Batches([position for batch in same for position in batch.positions], inputs, targets)
    return [whole, *(batch for batch in after if batch.size != mine.size)]


Drawn: TypeAlias = tuple[tuple[Tree, Tree], list[Batches]]
"""User 0's batch, and those of the peers asked, grouped by size and form."""


@dataclass(frozen=True)
class _Group:
    """Users whose batches have one size."""

    positions: list[int]
    users: list[User]
    size: int


class BatchSampler:
    """Draw everybody's batches: of users in memory by one look-up in a pool of all examples.

    Each batch is the one that `User.batch` gives. The peers' examples must have the shape and dtype
    of user 0's.
    """

    def __init__(
        self, me: User, peers: Sequence[User], *, batch_size: int, seed: int, device: torch.device
    ) -> None:
        check_alike(me, me.validation, "the validation set")
        check_alike(me, me.test, "the test set")
        for peer in peers:
            check_alike(me, peer.examples, f"peer {peer.name!r}")
        self._given = {user.name: user for user in (me, *peers)}
        self.users = {user.name: user.to(device) for user in (me, *peers)}
        self.me = self.users[me.name]
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self._pool: InMemory | None = None
        self._offsets: dict[str, int] = {}
        self._groups: dict[tuple[str, ...], list[_Group]] = {}
        self._tables: dict[tuple[str, ...], IndexTable] = {}
        held = [
            user.examples for user in self.users.values() if isinstance(user.examples, InMemory)
        ]
        self.in_memory = len(held) == len(self.users)  # all examples are held in memory
        if self.in_memory:
            self._pool = InMemory(
                joined([each.inputs for each in held]), joined([each.targets for each in held])
            )
            ends = torch.tensor([len(e) for e in held]).cumsum(0).tolist()
            for user, end in zip(self.users.values(), ends, strict=True):
                cut = slice(end - len(user), end)
                self._offsets[user.name] = cut.start
                user.examples = self._pool.cut(cut)  # not held twice

    def with_batch_size(self, size: int) -> Self:
        """Return the same users, on the same memory, with batches of another size."""
        other = copy.copy(self)
        other.batch_size, other._groups, other._tables = size, {}, {}
        return other

    def of(self, me: User, peers: Sequence[User]) -> Self | None:
        """Return the batches of another user 0 and its peers on the same memory; None where one is new."""
        everybody = (me, *peers)
        if any(self._given.get(user.name) is not user for user in everybody):
            return None
        check_alike(me, me.validation, "the validation set")
        check_alike(me, me.test, "the test set")
        other = copy.copy(self)
        other.users = {user.name: self.users[user.name] for user in everybody}
        other.me, other._groups, other._tables = other.users[me.name], {}, {}
        return other

    def one(self, name: str, step: int) -> tuple[Tree, Tree]:
        """Return one user's batch at a step."""
        return self.users[name].batch(self.batch_size, seed=self.seed, step=step)

    def draw(self, names: tuple[str, ...], step: int) -> Drawn:
        """Return user 0's batch at a step, and those of these peers, grouped by size."""
        if self._pool is None:
            read = [
                batches for group in self._grouped(names)[1:] for batches in self._read(group, step)
            ]
            return self.one(self.me.name, step), read
        return self.at(names, self._table(names).row(step, self.device))

    def indices(self, names: tuple[str, ...], step: int) -> Tensor:
        """Return the examples that user 0 and these peers draw in the next steps, a row for each step."""
        return self._table(names).block(step)

    def at(self, names: tuple[str, ...], indices: Tensor) -> Drawn:
        """Return user 0's batch, and those of these peers, from a row of `indices`."""
        if self._pool is None:
            raise AssertionError("indices are of examples in memory")
        groups = self._grouped(names)
        inputs, targets = self._pool.take(indices)
        lengths = [group.size * len(group.users) for group in groups]
        own, *others = zip(split(inputs, lengths), split(targets, lengths), strict=True)
        return own, [
            Batches(g.positions, *batch) for g, batch in zip(groups[1:], others, strict=True)
        ]

    def _grouped(self, names: tuple[str, ...]) -> list[_Group]:
        """Return user 0 as a group of its own, then the peers by the size of their batches."""
        if names in self._groups:
            return self._groups[names]
        by_size: dict[int, list[int]] = {}
        for position, name in enumerate(names):
            by_size.setdefault(min(self.batch_size, len(self.users[name])), []).append(position)
        peers = [_Group(p, [self.users[names[i]] for i in p], size) for size, p in by_size.items()]
        self._groups[names] = [_Group([0], [self.me], min(self.batch_size, len(self.me))), *peers]
        return self._groups[names]

    def _table(self, names: tuple[str, ...]) -> IndexTable:
        """Return the rows of the pool that user 0 and these peers draw."""
        if names not in self._tables:
            if len(self._tables) >= MAX_KEPT_SELECTIONS:
                self._tables.clear()
                self._groups.clear()
            users = [(user, group.size) for group in self._grouped(names) for user in group.users]
            streams = [
                BatchStream(
                    random_key(self.seed, user.name), len(user), size, self._offsets[user.name]
                )
                for user, size in users
            ]
            self._tables[names] = IndexTable(streams)
        return self._tables[names]

    def _read(self, group: _Group, step: int) -> list[Batches]:
        """Return the users' batches as they are read.

        Those that a data set made of another form apart.
        """
        alike: dict[Any, list[tuple[int, tuple[Tree, Tree]]]] = {}
        for position, user in zip(group.positions, group.users, strict=True):
            batch = self.one(user.name, step)
            alike.setdefault(form(batch), []).append((position, batch))
        return [
            Batches(
                [k for k, _ in some], *map(joined, zip(*(pair for _, pair in some), strict=True))
            )
            for some in alike.values()
        ]


def check_alike(me: User, others: Examples | None, whose: str) -> None:
    """Refuse examples that could not be passed through user 0's model."""
    if not isinstance(me.examples, InMemory) or not isinstance(others, InMemory):
        return
    for what in ("inputs", "targets"):
        ours, other = getattr(me.examples, what), getattr(others, what)
        if form(ours) != form(other):
            raise DataError(
                f"the {what} of {whose} ({_form(other)}) are not like those of {me.name!r}"
                f" ({_form(ours)}); prepare both in the same way"
            )


def _form(tree: Tree) -> str:
    """Return shape and dtype of an example, for a message."""
    one = mapped(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype), tree)
    return f"{one[0]}, {one[1]}" if isinstance(tree, Tensor) else str(one)
