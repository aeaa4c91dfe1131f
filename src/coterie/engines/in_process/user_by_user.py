"""Users taken one after the other, each as in a process of its own.

Its random numbers, and the model's buffers.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from coterie.engines.engine import LocalWork
from coterie.engines.in_process.model_support import ModelSupport
from coterie.engines.in_process.passes import Passes
from coterie.engines.in_process.sampler import BatchSampler
from coterie.engines.peer import Peer
from coterie.engines.requests import Request
from coterie.errors import KnobError
from coterie.gradients.gradients import is_finite
from coterie.users.sampling import seeded
from coterie.users.trees import Tree


class UserByUser:
    """The gradients and losses of one user at a time.

    A random model draws what belongs to (seed, user, step). Every pass begins with the model's
    buffers, and what it leaves in them is returned; only `keep_buffers` moves the model's.
    """

    def __init__(self, passes: Passes, sampler: BatchSampler, support: ModelSupport) -> None:
        self.passes, self.sampler, self.support = passes, sampler, support
        self._peers: dict[str, Peer] = {}

    def with_sampler(self, sampler: BatchSampler) -> Self:
        """Return the same with other batches."""
        other = copy.copy(self)
        other.sampler = sampler
        return other

    def gradient(
        self, name: str, x: Tensor, step: int, batch: tuple[Tree, Tree]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return a user's gradient and loss, and the buffers as its batch leaves them."""
        buffers = self.passes.buffers() if self.support.moves_buffers else {}
        with self._seeded(name, step, x.device):
            gradient, loss = self.passes.single(x, *batch, buffers)
        return gradient, loss, buffers

    def loss(self, name: str, x: Tensor, step: int) -> Tensor:
        """Return a user's loss on its batch of a step."""
        inputs, targets = self.sampler.one(name, step)
        buffers = self.passes.buffers() if self.support.moves_buffers else None
        with torch.no_grad(), self._seeded(name, step, x.device):
            return self.passes.loss(self.passes.output(x, inputs, buffers), targets)

    def answer(self, name: str, x: Tensor, step: int, work: LocalWork | None = None) -> Tensor:
        """Return a peer's gradient at x, as it would answer in a process of its own."""
        if name not in self._peers:
            self._peers[name] = Peer(self.sampler.users[name], self.passes, support=self.support)
        request = Request(x[None], step, self.sampler.seed, self.sampler.batch_size, work=work)
        reply = self._peers[name].answer(request)
        if reply.gradients is None:
            raise KnobError(f"{name!r} gives no gradient: {reply.refused}")
        return reply.gradients[0]

    def keep_buffers(self, own: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Let the model's buffers be what user 0's batch left, unless its gradient is of no use."""
        if self.support.moves_buffers and is_finite(own):
            for name, buffer in self.passes.model.named_buffers():
                buffer.copy_(buffers[name])

    def _seeded(self, name: str, step: int, device: torch.device) -> AbstractContextManager[None]:
        return (
            seeded(self.sampler.seed, name, step, device) if self.support.random else nullcontext()
        )
