"""Passes through a model: the gradient of a batch, of a weighted sum of batches, of each batch on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.engines.batches import Batches
from coterie.parameters import Parameters
from coterie.users import Loss


@dataclass(frozen=True)
class Weights:
    """τ as tensors, in the order of the batches: of each user, and of each example."""

    users: Tensor
    examples: Tensor

    @classmethod
    def of(cls, tau: Sequence[float], batches: Sequence[Batches], like: Tensor) -> Weights:
        """Return the weights of the users of these batches.

        Args:
            tau: by position among the peers asked.
            batches: theirs.
            like: a tensor of the dtype and device wanted.
        """
        users = [tau[position] for batch in batches for position in batch.positions]
        sizes = [len(batch.inputs) // len(batch.positions) for batch in batches for _ in batch.positions]
        examples = [weight / size for weight, size in zip(users, sizes, strict=True) for _ in range(size)]
        return cls(like.new_tensor(users), like.new_tensor(examples))


class Passes:
    """The losses and gradients of one model at any flat vector x.

    Args:
        model: any module; its parameters are not changed.
        loss: the mean loss of a batch from (output, target).
        memory: how many bytes of gradients one chunk of the rows pass may hold.
    """

    def __init__(self, model: nn.Module, loss: Loss, memory: int = 2**28) -> None:
        self.model = model
        self.loss = loss
        self.parameters = Parameters(model)
        self.chunk = max(1, memory // (self.parameters.size * self.parameters.dtype.itemsize))
        self.per_example: Loss | None = None  # the loss of each example, where the loss is their mean
        self.vmap_loss = True  # whether the loss can be mapped over users; `probe` finds out

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers, for a pass that may move them."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def output(self, x: Tensor, inputs: Tensor, buffers: dict[str, Tensor] | None = None) -> Any:
        """Return the model's output at x; `buffers` becomes what the pass leaves in them."""
        return self._output(self._leaves(x), inputs, buffers)

    def single(
        self, x: Tensor, inputs: Tensor, targets: Tensor, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient and the loss of one batch; `buffers` becomes what the pass leaves in them."""
        leaves = self._leaves(x)
        loss = self.loss(self._output(leaves, inputs, buffers), targets)
        return self._gradient(loss, leaves), loss.detach()

    def average(self, x: Tensor, batches: Sequence[Batches], weights: Weights) -> Tensor:
        """Return the gradient of Σ τ_k loss_k in one pass over all users' batches.

        Where the loss is the mean over examples, an example of user k has the weight τ_k over the size of its
        batch. Any other loss is computed for each user on its cut of the output.
        """
        leaves = self._leaves(x)
        inputs = batches[0].inputs if len(batches) == 1 else torch.cat([b.inputs for b in batches])
        output = self._output(leaves, inputs)
        if self.per_example is not None:
            targets = batches[0].targets if len(batches) == 1 else torch.cat([b.targets for b in batches])
            losses = self.per_example(output, targets)
            return self._gradient(weights.examples @ mean_of_each(losses), leaves)
        cuts = zip(batches, torch.split(output, [len(b.inputs) for b in batches]), strict=True)
        losses = torch.cat([self._losses(b.by_user(cut), b.by_user(b.targets)) for b, cut in cuts])
        return self._gradient(weights.users @ losses, leaves)

    def rows(self, x: Tensor, batches: Sequence[Batches]) -> Tensor:
        """Return every user's gradient as a row, by vmap of grad in chunks that bound memory.

        Args:
            x: one point for all users, or a row for each, in the order of the peers asked.
            batches: theirs.
        """

        def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss(functional_call(self.model, values, (inputs,)), targets)

        gradients = vmap(grad(loss), in_dims=(None if x.ndim == 1 else 0, 0, 0))
        values = self.parameters.unflatten(x)
        rows = x.new_empty(sum(len(batch.positions) for batch in batches), self.parameters.size)
        done = 0
        for batch in batches:
            cut = zip(
                torch.split(torch.tensor(batch.positions), self.chunk),
                torch.split(batch.by_user(batch.inputs), self.chunk),
                torch.split(batch.by_user(batch.targets), self.chunk),
                strict=True,
            )
            for positions, inputs, targets in cut:
                if x.ndim == 2:
                    values = self.parameters.unflatten(x[positions.to(x.device)])
                found = gradients(values, inputs, targets)
                pieces = torch.split(rows[done : done + len(inputs)], self.parameters.lengths, dim=1)
                for name, piece in zip(values, pieces, strict=True):
                    piece.copy_(found[name].flatten(1))
                done += len(inputs)
        if len(batches) == 1:
            return rows
        order = torch.tensor([position for batch in batches for position in batch.positions]).argsort()
        return rows.index_select(0, order.to(x.device))

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each user from outputs and targets of shape (users, size, …)."""
        if self.vmap_loss:
            return vmap(self.loss)(outputs, targets)
        return torch.stack([self.loss(o, t) for o, t in zip(outputs, targets, strict=True)])

    def _leaves(self, x: Tensor) -> Mapping[str, Tensor]:
        """Return what to differentiate by: the model's own parameters where they are views of x."""
        if self.parameters.are_views_of(x):
            return self.parameters.named
        return {name: view.requires_grad_() for name, view in self.parameters.unflatten(x.detach()).items()}

    def _output(
        self, leaves: Mapping[str, Tensor], inputs: Tensor, buffers: dict[str, Tensor] | None = None
    ) -> Any:
        if leaves is self.parameters.named and not buffers:
            return self.model(inputs)  # spares the tenth of a millisecond that `functional_call` takes
        values = {**leaves, **(buffers or {})}
        output = functional_call(self.model, values, (inputs,))
        if buffers:  # a module may assign a buffer anew, which `functional_call` writes back to `values`
            buffers.update({name: values[name].detach() for name in buffers})
        return output

    def _gradient(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
        # On a GPU autograd hands the backward pass to another thread, which costs more than a small pass takes.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found = zip(gradients, leaves.values(), strict=True)
        return self.parameters.flatten(torch.zeros_like(p) if g is None else g for g, p in found)


def mean_of_each(losses: Tensor) -> Tensor:
    """Return one number an example, where a loss has one for each part of a target."""
    return losses if losses.ndim == 1 else losses.flatten(1).mean(1)
