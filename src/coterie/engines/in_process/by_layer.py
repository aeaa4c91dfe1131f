"""Every user's gradient from one pass over everybody's batches, layer by layer as the backward pass goes.

A layer's weight gradient is a product of its input and the gradient of its output, summed over
examples. One pass over all users' examples has both; summed over each user's examples apart, they
give each user's own gradient. So one forward and one backward pass serve all users, and the
backward pass leaves out the weights' joint gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from coterie.engines.in_process.layers import gradients_of, is_known
from coterie.engines.in_process.sampler import Batches
from coterie.gradients.parameters import Parameters


class ByLayer:
    """Each user's gradients by the parameters of the layers known here, from one joint pass.

    A layer may be called any number of times, and layers may share parameters: gradients add up. A
    model may also use its parameters outside its layers, which is not visible here; `probe`
    compares with a plain loop first.
    """

    def __init__(self, model: nn.Module, parameters: Parameters, bytes_an_example: int = 0) -> None:
        self.bytes_an_example = bytes_an_example  # that a pass takes
        self._parameters, names = parameters, {id(p): name for name, p in parameters.named.items()}
        self._layers: dict[nn.Module, dict[str, str]] = {}
        for module in model.modules():
            held = module.named_parameters(recurse=False)
            if trainable := {kind: names[id(p)] for kind, p in held if id(p) in names}:
                self._layers[module] = trainable

    @property
    def unknown_layer(self) -> str | None:
        """The class name of a layer with trainable parameters whose formula is not known, if there is one."""
        return next(
            (type(module).__name__ for module in self._layers if not is_known(module)), None
        )

    def backward(self, loss: Callable[[], Tensor], batches: Sequence[Batches], rows: Tensor) -> int:
        """Write every user's gradient into its row, and return how many bytes an example the layers' inputs took.

        `loss` runs the model on these batches, one after the other, and returns the sum of the
        users' losses.
        """
        writer, calls = _Writer(batches, self._parameters.unflatten(rows)), list[_Call]()
        begin: list[GradientEdge] = []

        def catch(layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            call = _Call(layer, self._layers[layer], arguments[0].detach())
            calls.append(call)
            output.register_hook(lambda gradient: write(call, gradient))  # type: ignore[no-untyped-call]
            if not arguments[0].requires_grad:
                begin.append(get_gradient_edge(output))

        def write(call: "_Call", gradient: Tensor) -> None:
            inputs, call.inputs = call.inputs, None
            if inputs is not None:
                writer.add(call, inputs, gradient)

        handles = [layer.register_forward_hook(catch, prepend=True) for layer in self._layers]
        try:
            total = loss()
        finally:
            for handle in handles:
                handle.remove()
        held = sum(call.inputs.nbytes for call in calls if call.inputs is not None)
        # On the way back to layers whose input came from no other lie all outputs; no weight is
        # asked for.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(total, begin, allow_unused=True)
        for name in writer.views.keys() - writer.written:
            writer.views[name].zero_()
        return held // sum(batch.n for batch in batches)


@dataclass
class _Call:
    """One call of a layer; its input is freed once it has been used."""

    layer: nn.Module
    names: dict[str, str]
    inputs: Tensor | None


class _Writer:
    """Writes every user's gradients into views of the rows, one for each parameter."""

    def __init__(self, batches: Sequence[Batches], views: Mapping[str, Tensor]) -> None:
        self.batches, self.views = batches, views
        self.written: set[str] = set()

    def add(self, call: _Call, inputs: Tensor, gradient: Tensor) -> None:
        """Write, or add to what is written, every user's gradients of one call of a layer."""
        inputs = inputs.to(gradient.dtype) if inputs.is_floating_point() else inputs
        views = {kind: self.views[name] for kind, name in call.names.items()}
        first = {kind: name not in self.written for kind, name in call.names.items()}
        dtype = gradient.dtype
        into = {
            kind: (
                view if first[kind] and view.dtype == dtype else torch.empty_like(view, dtype=dtype)
            )
            for kind, view in views.items()
        }
        self._write(call.layer, inputs, gradient, into)
        for kind, view in views.items():
            if into[kind] is not view:
                view.copy_(into[kind]) if first[kind] else view.add_(into[kind])
        self.written.update(call.names.values())

    def _write(
        self, layer: nn.Module, inputs: Tensor, gradient: Tensor, into: dict[str, Tensor]
    ) -> None:
        examples = [batch.n for batch in self.batches]
        # a layer may see an example in parts
        lengths = [n * len(gradient) // sum(examples) for n in examples]
        start = 0
        for batch, part, its_gradient in zip(
            self.batches, torch.split(inputs, lengths), torch.split(gradient, lengths), strict=True
        ):
            users = slice(start, start := start + len(batch.positions))
            theirs = {kind: tensor[users] for kind, tensor in into.items()}
            gradients_of(layer, batch.by_user(part), batch.by_user(its_gradient), theirs)
