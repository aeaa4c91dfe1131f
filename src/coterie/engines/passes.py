"""Passes through a model: the gradient of a batch, of a weighted sum of batches, of each batch on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.engines.batches import Batches
from coterie.parameters import Parameters
from coterie.users import Loss


class Passes:
    """The losses and gradients of one model at any flat vector x.

    Args:
        model: any module; its own parameters are not touched.
        loss: the mean loss of a batch from (output, target).
        memory: how many bytes of gradients one chunk of the rows pass may hold.
    """

    def __init__(self, model: nn.Module, loss: Loss, memory: int = 2**28) -> None:
        self.model = model
        self.loss = loss
        self.parameters = Parameters(model)
        self.vmap_loss = True
        self.chunk = max(1, memory // (self.parameters.size * self.parameters.dtype.itemsize))

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers, for a pass that may move them."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def output(self, values: dict[str, Tensor], inputs: Tensor) -> Any:
        """Return the model's output with these parameters (and buffers)."""
        return functional_call(self.model, values, (inputs,))

    def single(
        self, x: Tensor, inputs: Tensor, targets: Tensor, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient and the loss of one batch; `buffers` are moved in place."""
        leaves = self._leaves(x)
        loss = self.loss(self.output({**leaves, **(buffers or {})}, inputs), targets)
        return self._gradient(loss, leaves), loss.detach()

    def average(self, x: Tensor, batches: Sequence[Batches], weights: Tensor) -> Tensor:
        """Return the gradient of Σ τ_k loss_k in one pass over all users' batches.

        The output of a model without batch-dependent layers is cut by user, and each cut has its own loss:
        an example of user k has the weight τ_k over the size of its batch, whatever the loss.
        """
        leaves = self._leaves(x)
        inputs = batches[0].inputs if len(batches) == 1 else torch.cat([b.inputs for b in batches])
        outputs = self.output(dict(leaves), inputs).split([len(b.inputs) for b in batches])
        total = weights.new_zeros(())
        for batch, output in zip(batches, outputs, strict=True):
            losses = self._losses(batch.by_user(output), batch.by_user(batch.targets))
            total = total + (weights[batch.positions] * losses).sum()
        return self._gradient(total, leaves)

    def rows(self, x: Tensor, batches: Sequence[Batches]) -> Tensor:
        """Return every user's gradient as a row, by vmap of grad in chunks that bound memory."""

        def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss(self.output(values, inputs), targets)

        gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=self.chunk)
        values = self.parameters.unflatten(x)
        rows = x.new_empty(sum(len(b.positions) for b in batches), self.parameters.size)
        for batch in batches:
            found = gradients(values, batch.by_user(batch.inputs), batch.by_user(batch.targets))
            rows[batch.positions] = torch.cat([found[name].flatten(1) for name in values], dim=1)
        return rows

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each user from outputs and targets of shape (users, size, …)."""
        if self.vmap_loss and len(outputs) > 1:
            return vmap(self.loss)(outputs, targets)
        return torch.stack([self.loss(o, t) for o, t in zip(outputs, targets, strict=True)])

    def _leaves(self, x: Tensor) -> dict[str, Tensor]:
        return {name: view.requires_grad_() for name, view in self.parameters.unflatten(x.detach()).items()}

    def _gradient(self, loss: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return self.parameters.flatten(gradients)
