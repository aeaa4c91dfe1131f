"""The peers' batches of one step, drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import DataError
from coterie.users import InMemory, User, draw, stream


@dataclass(frozen=True)
class Batches:
    """Batches of one size, one after the other.

    Args:
        positions: where their users stand among the peers asked.
        inputs: of shape (users × size, …).
        targets: of shape (users × size, …).
    """

    positions: Sequence[int]
    inputs: Tensor
    targets: Tensor

    def by_user(self, tensor: Tensor) -> Tensor:
        """Return a tensor of one row an example as (users, size, …)."""
        return tensor.reshape(len(self.positions), -1, *tensor.shape[1:])


@dataclass(frozen=True)
class _Group:
    """Users whose batches have one size, and what their indices are drawn from."""

    positions: list[int]
    users: list[User]
    size: int
    streams: list[int]
    lengths: list[int]
    offsets: Tensor


class PeerBatches:
    """Draw the batches of many peers: those in memory by one look-up in one pool of everybody's examples.

    Each batch is the one that `User.batch` gives.

    Args:
        me: user 0, whose examples the peers' must resemble in shape and dtype.
        peers: the peers, on one device.
        batch_size: examples a user; all of them where it has fewer.
        seed: what batches are drawn from, with the user's name and the step.
    """

    def __init__(self, me: User, peers: Sequence[User], batch_size: int, seed: int) -> None:
        self.peers = {peer.name: peer for peer in peers}
        self.batch_size, self.seed = batch_size, seed
        self._groups: dict[tuple[str, ...], list[_Group]] = {}
        memory = [peer.examples for peer in peers if isinstance(peer.examples, InMemory)]
        self._pool: InMemory | None = None
        self._offsets: dict[str, int] = {}
        for peer in peers:
            _check_alike(me, peer)
        if memory and len(memory) == len(peers):
            self._pool = InMemory(torch.cat([e.inputs for e in memory]), torch.cat([e.targets for e in memory]))
            starts = torch.tensor([0, *(len(e) for e in memory)]).cumsum(0).tolist()
            self._offsets = dict(zip(self.peers, starts, strict=False))

    def draw(self, names: tuple[str, ...], step: int) -> list[Batches]:
        """Return the batches of these peers at a step, grouped by size."""
        if names not in self._groups:
            self._groups[names] = self._group(names)
        return [self._take(group, step) for group in self._groups[names]]

    def one(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        """Return one peer's batch at a step."""
        return self.peers[name].batch(self.batch_size, seed=self.seed, step=step)

    def _take(self, group: _Group, step: int) -> Batches:
        if self._pool is not None:
            indices = draw(group.streams, group.lengths, group.size, step) + group.offsets
            inputs, targets = self._pool.take(indices.flatten().to(self._pool.inputs.device))
        else:
            drawn = [user.batch(group.size, seed=self.seed, step=step) for user in group.users]
            inputs, targets = (torch.cat(column) for column in zip(*drawn, strict=True))
        return Batches(group.positions, inputs, targets)

    def _group(self, names: tuple[str, ...]) -> list[_Group]:
        by_size: dict[int, list[int]] = {}
        for position, name in enumerate(names):
            by_size.setdefault(min(self.batch_size, len(self.peers[name])), []).append(position)
        groups = []
        for size, positions in by_size.items():
            users = [self.peers[names[position]] for position in positions]
            streams = [stream(self.seed, user.name) for user in users]
            offsets = torch.tensor([self._offsets.get(user.name, 0) for user in users])[:, None]
            groups.append(_Group(positions, users, size, streams, [len(user) for user in users], offsets))
        return groups


def _check_alike(me: User, peer: User) -> None:
    """Say early where a peer's examples could not be passed through user 0's model."""
    mine, theirs = me.examples, peer.examples
    if not isinstance(mine, InMemory) or not isinstance(theirs, InMemory):
        return
    for what in ("inputs", "targets"):
        ours, other = getattr(mine, what), getattr(theirs, what)
        if ours.shape[1:] != other.shape[1:] or ours.dtype != other.dtype:
            raise DataError(
                f"the {what} of peer {peer.name!r} ({tuple(other.shape[1:])}, {other.dtype}) are not like "
                f"those of {me.name!r} ({tuple(ours.shape[1:])}, {ours.dtype}); prepare both in the same way"
            )
