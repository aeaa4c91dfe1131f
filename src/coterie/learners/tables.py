"""Batches that runs share: everybody's examples in one pool, and the rows of it that each step takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from coterie.engines.in_process.sampler import MAX_STEPS_AHEAD
from coterie.users.examples import InMemory
from coterie.users.sampling import draw, random_key
from coterie.users.user import User


@dataclass(frozen=True)
class Draws:
    """One user's batches under one seed.

    Args:
        key: of the random stream, from `random_key`.
        first: where the user's examples begin in the pool.
        n: how many they are.
        size: how many of them a batch has.
    """

    key: int
    first: int
    n: int
    size: int


class Pool:
    """The examples of many users, those that are the same kept once.

    Args:
        users: whose examples are in memory, and alike.
        device: where they are wanted.

    Example:
        >>> users = [User(name, [[1.0], [2.0]], [0, 1]) for name in ("a", "b")]
        >>> pool = Pool(users, torch.device("cpu"))
        >>> len(pool.examples), pool.draws(users[1], batch_size=32, seed=0).size
        (2, 2)
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
        self.examples = InMemory(torch.cat([e.inputs for e in held]), torch.cat([e.targets for e in held])).to(
            device
        )

    def draws(self, user: User, batch_size: int, seed: int) -> Draws:
        """Return a user's batches under a seed, those of `User.batch`."""
        key, first = random_key(seed, user.name), self._first[id(user.examples)]
        return Draws(key, first, len(user), min(batch_size, len(user)))


class Table:
    """The batches of G groups of users, as rows of a pool, R for each group; short ones are filled up.

    Args:
        examples: the pool.
        groups: the users of each group.
    """

    def __init__(self, examples: InMemory, groups: Sequence[Sequence[Draws]]) -> None:
        self.examples, self.groups = examples, groups
        self.rows = max(sum(draws.size for draws in group) for group in groups)
        self._whole = all(draws.size == draws.n for group in groups for draws in group)
        self._block: tuple[int, Tensor] | None = None
        self._kept: tuple[Tensor, Tensor] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step, each of shape (G, R, …)."""
        if self._kept is not None:
            return self._kept
        found = self.examples.take(self._indices(step))
        inputs, targets = (tensor.view(len(self.groups), self.rows, *tensor.shape[1:]) for tensor in found)
        if self._whole:  # every batch is all there is
            self._kept = inputs, targets
        return inputs, targets

    def shares(self, weights: Sequence[Sequence[dict[Draws, float]]]) -> Tensor:
        """Return what each example weighs, of shape (G, M, R); nothing where a group is filled up.

        Args:
            weights: for each group and each run in it, the weight of a user's mean loss.
        """
        found = torch.zeros(len(self.groups), len(weights[0]), self.rows, dtype=torch.float64)
        for group, runs, shares in zip(self.groups, weights, found, strict=True):
            sizes = torch.tensor([draws.size for draws in group])
            each = found.new_tensor([[run.get(draws, 0.0) / draws.size for draws in group] for run in runs])
            shares[:, : int(sizes.sum())] = each.repeat_interleave(sizes, dim=1)
        return found

    def _indices(self, step: int) -> Tensor:
        """Return the rows of the pool that a step takes, from a block computed ahead."""
        first, block = self._block or (step, None)
        if block is None or not first <= step < first + len(block):
            total = len(self.groups) * self.rows
            steps = range(step, step + max(1, min(MAX_STEPS_AHEAD, 2**20 // total)))
            block = self._drawn(steps).to(self.examples.inputs.device)
            first, self._block = step, (step, block)
        return block[step - first]

    def _drawn(self, steps: range) -> Tensor:
        found = torch.empty(len(steps), len(self.groups), self.rows, dtype=torch.int64)
        found[:] = torch.tensor([group[0].first for group in self.groups])[:, None]
        places = [
            (draws, g * self.rows + sum(before.size for before in group[:i]))
            for g, group in enumerate(self.groups)
            for i, draws in enumerate(group)
        ]
        flat = found.flatten(1)
        for size, same in groupby(sorted(places, key=lambda place: place[0].size), key=lambda place: place[0].size):
            several, at = zip(*same, strict=True)
            drawn = draw([d.key for d in several], [d.n for d in several], size, steps)
            drawn += torch.tensor([d.first for d in several])[:, None]
            flat[:, (torch.tensor(at)[:, None] + torch.arange(size)).flatten()] = drawn.flatten(1)
        return flat
