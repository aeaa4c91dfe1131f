"""Passes through a model.

The gradient of a batch, of a weighted sum of batches, of each batch on its own.
"""

import functools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.engines.in_process.by_layer import ByLayer
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.engines.in_process.sampler import Batches, alike
from coterie.evaluation.losses import PerExample, as_loss, known_per_example
from coterie.gradients.parameters import Parameters
from coterie.users.trees import (
    Tree,
    as_arguments,
    called,
    each_row,
    has_rows,
    joined,
    mapped,
    split,
)
from coterie.users.user import Loss


@dataclass(frozen=True)
class Weights:
    """τ as tensors, in the order of the batches: of each user, and of each example."""

    users: Tensor
    examples: Tensor

    @classmethod
    def of(cls, tau: Sequence[float], batches: Sequence[Batches], like: Tensor) -> Self:
        """Return τ, given by position among the peers asked, for the users of these batches."""
        users = [tau[position] for batch in batches for position in batch.positions]
        examples = [
            tau[k] / batch.size
            for batch in batches
            for k in batch.positions
            for _ in range(batch.size)
        ]
        return cls(like.new_tensor(users), like.new_tensor(examples))

    def users_over(self, batches: Sequence[Batches], counts: Tensor) -> Tensor:
        """Return the weight of each example where examples count differently in their users' losses."""
        each = zip(
            batches, torch.split(counts.to(self.users), [batch.n for batch in batches]), strict=True
        )
        users = torch.split(self.users, [len(batch.positions) for batch in batches])
        shares = [
            tau.repeat_interleave(batch.size) * over_counts(batch, some)
            for tau, (batch, some) in zip(users, each, strict=True)
        ]
        return torch.cat(shares)

    def split(self, groups: Sequence[Sequence[Batches]]) -> list[Self]:
        """Return the weights of some batches after the other's."""
        users = torch.split(
            self.users, [sum(len(batch.positions) for batch in some) for some in groups]
        )
        examples = torch.split(self.examples, [sum(batch.n for batch in some) for some in groups])
        return [type(self)(*pair) for pair in zip(users, examples, strict=True)]


def over_counts(batch: Batches, counts: Tensor) -> Tensor:
    """Return for each example one over what all examples of its user count.

    0 where they count nothing.
    """
    totals = batch.by_user(counts).sum(1)
    return torch.where(totals == 0, 0.0, 1 / totals).repeat_interleave(batch.size)


MAX_LOOPED_BEFORE_LAYERS = 2
"""On a CPU up to so many users are taken one by one.

A pass by layer for them costs more than it saves.
"""
MAX_LOOPED_BEFORE_MAPPING = 8
"""On a CPU up to so many users are taken one by one where only a mapped pass could take them together."""
MAX_MAPPED_SIZE = 2**17
"""On a CPU users with longer rows are taken one by one instead of mapped: a loop is then faster."""


Buffers: TypeAlias = dict[str, Tensor] | None
"""The buffers of a pass by name, which become what it leaves in them; None for the model's own."""


class Passes:
    """The losses and gradients of one model at any flat vector x.

    The model's parameters are not changed.

    `memory` is how many bytes one pass for several users' rows may take; by default a share of what
    is free on a GPU, and on a CPU what stays in its cache.
    """

    def __init__(self, model: nn.Module, loss: Loss, memory: int | None = None) -> None:
        self.model, self.loss, self.parameters = model, as_loss(loss), Parameters(model)
        self.memory = memory or _memory(self.parameters.device)
        self._known = known_per_example(self.loss)
        # What `probe` learns about the model:
        # the loss of each example, where the loss is their mean
        self.per_example: PerExample | None = None
        self.vmap_loss = True  # whether the loss can be mapped over users
        # whether model and loss are mapped over users, the output having no rows to cut
        self.whole = False
        # whether mapping needs attention as plain products, which PyTorch can map
        self.plain_attention = False
        # whether only copies of the model can be mapped, a batch after the other
        self.batches_apart = False
        # finds out where each user's gradient can be had from one pass over all; see `by_layer`
        self.find_layers: Callable[[], ByLayer | None] = lambda: None
        self.set_forward_options(DEFAULT_FORWARD)
        self._memory = ReusedMemory()
        self._kept_order: tuple[tuple[int, ...], Tensor] | None = None

    def take_over(self, other: "Passes") -> None:
        """Take over what is known of a model and a loss like these."""
        self.per_example = other.per_example
        self.vmap_loss = other.vmap_loss
        self.whole = other.whole
        self.find_layers = lambda: (
            other.by_layer and ByLayer(self.model, self.parameters, other.by_layer.bytes_an_example)
        )

    @functools.cached_property
    def by_layer(self) -> ByLayer | None:
        """What gives each user's gradient from one pass over all, tried where rows are first wanted."""
        return self.find_layers()

    def set_forward_options(self, forward_options: ForwardOptions) -> None:
        """Use these options for every pass from now on."""
        self.forward_options, forward = forward_options, self.model
        plain = forward_options == DEFAULT_FORWARD
        self._through: Callable[..., Any] = operator.call if plain else forward_options.through
        self._forward: Callable[..., Any] = (
            torch.compile(forward, dynamic=False) if forward_options.compile else forward
        )

    @contextmanager
    def without_options(self) -> Iterator[None]:
        """Pass batches in full precision inside, whatever options are given."""
        through, self._through = self._through, operator.call
        try:
            yield
        finally:
            self._through = through

    def mappable(self) -> AbstractContextManager[None]:
        """Return a context in which `vmap` takes this model."""
        if not self.plain_attention:
            return nullcontext()
        plain: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
        return plain

    def tell_of_nothing(self, name: str, targets: Tree) -> None:
        """Warn of a user's batch in which the loss ignores everything."""
        known = self.per_example or self._known
        counts = None if known is None or known.weights is None else known.counts(targets)
        # a GPU would have to be waited for
        if counts is not None and not counts.is_cuda and not bool(counts.any()):
            warnings.warn(
                f"a batch of {name!r} has nothing to learn from: the loss ignores all its targets."
                " Its gradient is zero; leave out the examples without a target, or let batches be"
                " larger",
                stacklevel=2,
            )

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers, for a pass that may move them."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def output(self, x: Tensor, inputs: Tree, buffers: Buffers = None) -> Any:
        """Return the model's output at x; `buffers` becomes what the pass leaves in them."""
        return self._output(self._leaves(x), inputs, buffers)

    def single(
        self, x: Tensor, inputs: Tree, targets: Tree, buffers: Buffers = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient and the loss of one batch.

        `buffers` becomes what the pass leaves in them.
        """
        leaves = self._leaves(x)
        loss = self.loss(self._output(leaves, inputs, buffers), targets)
        return self._gradient(loss, leaves), loss.detach()

    def each_example(
        self, x: Tensor, inputs: Tree, targets: Tree, buffers: Buffers = None
    ) -> Tensor:
        """Return the gradient of each example as a batch of its own, one a row.

        By `vmap`, so that none can mix.

        All examples have the same random numbers, so that none draws what another would have drawn.
        """

        def loss(values: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
            one = (mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in (inputs, targets))
            return self.loss(self._called({**values, **(buffers or {})}, next(one)), next(one))

        gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="same")
        with self.mappable():
            by_name = gradients(self.parameters.unflatten(x.detach()), inputs, targets)
        return torch.cat([by_name[name].flatten(1) for name in self.parameters.named], 1)

    def average(self, x: Tensor, batches: Sequence[Batches], weights: Weights) -> Tensor:
        """Return the gradient of Σ τ_k loss_k in one pass over all users' batches.

        Where the loss is the mean over examples, an example of user k has the weight τ_k over the
        size of its batch, or over what the examples in it count. Any other loss is computed for
        each user on its cut of the output.
        """
        groups = alike(batches)
        if len(groups) > 1:  # as a data set made them, of unequal sizes
            parts = zip(groups, weights.split(groups), strict=True)
            return torch.stack([self.average(x, some, theirs) for some, theirs in parts]).sum(0)
        leaves = self._leaves(x)
        if self.whole:
            losses = torch.cat([self._mapped_losses(leaves, batch) for batch in batches])
            return self._gradient(weights.users @ losses, leaves)
        output = self._output(leaves, joined([batch.inputs for batch in batches]))
        if self.per_example is not None:
            losses, counts = self.per_example.parts(
                output, joined([batch.targets for batch in batches])
            )
            shares = weights.examples if counts is None else weights.users_over(batches, counts)
            return self._gradient(shares @ losses, leaves)
        cuts = zip(batches, split(output, [batch.n for batch in batches]), strict=True)
        losses = torch.cat([self._losses(batch, cut) for batch, cut in cuts])
        return self._gradient(weights.users @ losses, leaves)

    def rows(self, x: Tensor, batches: Sequence[Batches]) -> Tensor:
        """Return every user's gradient as a row, of as many users at a time as memory allows.

        x is one point for all users, or a row for each, in the order of the peers asked.
        """
        users = sum(len(batch.positions) for batch in batches)
        if users == 1:
            return self.single(x if x.ndim == 1 else x[0], batches[0].inputs, batches[0].targets)[
                0
            ].unsqueeze(0)
        rows, done = self._memory.empty((users, self.parameters.size), x), 0
        for some in self._parts(x, batches):
            theirs = slice(done, done := done + sum(len(batch.positions) for batch in some))
            self._write_rows(x, some, rows[theirs])
        if len(batches) == 1:
            return rows
        return torch.index_select(
            rows, 0, self._order(batches, x.device), out=self._memory.empty(rows.shape, x)
        )

    def _parts(self, x: Tensor, batches: Sequence[Batches]) -> Sequence[Sequence[Batches]]:
        """Return the batches of one pass after the other."""
        row = self.parameters.size * self.parameters.dtype.itemsize
        by_layer = self.by_layer if x.ndim == 1 else None
        each = 0 if by_layer is None else by_layer.bytes_an_example
        takes = [row + each * batch.size for batch in batches]
        if (
            by_layer
            and sum(t * len(b.positions) for t, b in zip(takes, batches, strict=True))
            <= self.memory
        ):
            return alike(batches)
        return [
            [part]
            for batch, taken in zip(batches, takes, strict=True)
            for part in batch.cut(max(1, self.memory // taken))
        ]

    def _write_rows(self, x: Tensor, batches: Sequence[Batches], rows: Tensor) -> None:
        """Write some users' gradients in the way that suits them, which goes by sizes alone."""
        users, d = rows.shape
        on_cpu = rows.device.type == "cpu"
        if (
            x.ndim == 1
            and self.by_layer is not None
            and users > (MAX_LOOPED_BEFORE_LAYERS if on_cpu else 1)
        ):
            self.write_by_layer(x, self.by_layer, batches, rows)
        elif users == 1 or (on_cpu and (users <= MAX_LOOPED_BEFORE_MAPPING or d > MAX_MAPPED_SIZE)):
            self._one_by_one(x, batches, rows)
        else:
            self.mapped(x, batches[0], rows)

    def write_by_layer(
        self, x: Tensor, layers: ByLayer, batches: Sequence[Batches], rows: Tensor
    ) -> int:
        """Write every user's gradient in one pass; see `ByLayer.backward`."""

        def loss() -> Tensor:
            output = self._output(
                self._leaves(x), joined([batch.inputs for batch in batches]), watched=True
            )
            lengths = [batch.n for batch in batches]
            if not has_rows(output, sum(lengths)):  # the loss has them
                return self._sum(batches, output)
            cuts = zip(batches, split(output, lengths), strict=True)
            return torch.stack([self._sum([batch], cut) for batch, cut in cuts]).sum()

        return layers.backward(loss, batches, rows)

    def _sum(self, batches: Sequence[Batches], output: Tree) -> Tensor:
        """Return the sum of some users' losses."""
        if self.per_example is None:
            return torch.cat([self._losses(batch, output) for batch in batches]).sum()
        losses, counts = self.per_example.parts(
            output, joined([batch.targets for batch in batches])
        )
        each = (
            None
            if counts is None
            else torch.split(counts.to(losses), [batch.n for batch in batches])
        )
        if each is None and len(batches) == 1:
            return losses.sum() / batches[0].size
        shares = [
            (
                losses.new_full((batch.n,), 1 / batch.size)
                if each is None
                else over_counts(batch, each[place])
            )
            for place, batch in enumerate(batches)
        ]
        return torch.cat(shares) @ losses

    def _one_by_one(self, x: Tensor, batches: Sequence[Batches], rows: Tensor) -> None:
        users = (
            (position, one)
            for b in batches
            for position, one in zip(b.positions, b.each(), strict=True)
        )
        for row, (position, one) in zip(rows, users, strict=True):
            row.copy_(self.single(x if x.ndim == 1 else x[position], *one)[0])

    def _mapped_losses(self, leaves: Mapping[str, Tensor], batch: Batches) -> Tensor:
        """Return the loss of each user by vmap of model and loss."""
        each = vmap(lambda inputs, targets: self.loss(self._called(dict(leaves), inputs), targets))
        with self.mappable():
            return each(batch.by_user(batch.inputs), batch.by_user(batch.targets))

    def mapped(self, x: Tensor, batch: Batches, rows: Tensor) -> None:
        """Write some users' gradients by vmap of grad, where the model and the loss can be mapped."""

        def loss(values: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
            return self.loss(self._called(values, inputs), targets)

        points = x if x.ndim == 1 else x[torch.tensor(batch.positions, device=x.device)]
        gradients = vmap(grad(loss), in_dims=(None if x.ndim == 1 else 0, 0, 0))
        pair = batch.by_user(batch.inputs), batch.by_user(batch.targets)
        with self.mappable():
            by_name = gradients(self.parameters.unflatten(points), *pair)
        for name, view in self.parameters.unflatten(rows).items():
            view.copy_(by_name[name])

    def _order(self, batches: Sequence[Batches], device: torch.device) -> Tensor:
        """Return where each peer asked stands among the users of these batches, kept from step to step."""
        positions = tuple(position for batch in batches for position in batch.positions)
        if self._kept_order is None or self._kept_order[0] != positions:
            self._kept_order = positions, torch.tensor(positions).argsort().to(device)
        return self._kept_order[1]

    def _losses(self, batch: Batches, output: Tree) -> Tensor:
        """Return the loss of each user from its cut of the output."""
        outputs, targets = batch.by_user(output), batch.by_user(batch.targets)
        if self.vmap_loss:
            return vmap(self.loss)(outputs, targets)
        users = len(batch.positions)
        pairs = zip(each_row(outputs, users), each_row(targets, users), strict=True)
        return torch.stack([self.loss(output, target) for output, target in pairs])

    def _leaves(self, x: Tensor) -> Mapping[str, Tensor]:
        """Return what to differentiate by: the model's own parameters where they are views of x."""
        if self.parameters.are_views_of(x):
            return self.parameters.named
        return {
            name: view.requires_grad_()
            for name, view in self.parameters.unflatten(x.detach()).items()
        }

    def _output(
        self,
        leaves: Mapping[str, Tensor],
        inputs: Tree,
        buffers: Buffers = None,
        *,
        watched: bool = False,
    ) -> Any:
        """Return the model's output.

        One whose layers are watched is not compiled, which would leave them out.
        """
        if leaves is self.parameters.named and not buffers:
            # This spares the tenth of a millisecond that `functional_call` takes.
            forward = self.model if watched else self._forward
            return self._through(lambda i: called(forward, i), inputs)
        values = {**leaves, **(buffers or {})}
        output = self._called(values, inputs)
        # a module may assign a buffer anew, which `functional_call` writes back to `values`
        if buffers:
            buffers.update({name: values[name].detach() for name in buffers})
        return output

    def _called(self, values: dict[str, Tensor], inputs: Tree) -> Any:
        """Return the model's output with these parameters and buffers in the place of its own."""
        model, values = self.model, self.parameters.with_tied(values)
        return self._through(
            lambda i: functional_call(model, values, *as_arguments(i), tie_weights=False), inputs
        )

    def _gradient(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
        # On a GPU autograd hands the backward pass to another thread, which costs more than a small
        # pass takes.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        return self.parameters.flatten(gradients)


def _memory(device: torch.device) -> int:
    """Return how many bytes a pass may take.

    A quarter of a GPU's free memory, on a CPU about its cache.
    """
    if device.type != "cuda":
        return 2**25
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + held) // 4


class ReusedMemory:
    """Give tensors in memory that nobody else holds, and reuse that memory later.

    The operating system takes large memory back when it is freed, and clears every page when it
    hands it out again. On a CPU that can cost as much as the writing itself. For a GPU, torch keeps
    the memory by itself.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor to be filled, of the dtype and device of another."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        self._kept = [kept for kept in self._kept if len(kept[0]) == size or kept[1]() is not None]
        free = next(
            (
                i
                for i, (memory, lent) in enumerate(self._kept)
                if len(memory) == size and lent() is None
            ),
            None,
        )
        memory = np.empty(size, np.uint8) if free is None else self._kept.pop(free)[0]
        lent = memory[:]  # the tensor and its views hold this, and nothing else does
        self._kept.append((memory, weakref.ref(lent)))
        return torch.from_numpy(lent).view(like.dtype).view(shape)
