"""Every user's gradient from one pass over everybody's batches, layer by layer as the backward pass goes.

A layer's weight gradient is a product of its input and the gradient of its output, summed over examples. One pass
over all users' examples has both; summed over each user's examples apart, they give each user's own gradient. So
one forward and one backward pass serve all users, and the backward pass leaves out the weights' joint gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

    A layer may be called any number of times, and layers may share parameters: gradients add up. A model may also
    use its parameters outside its layers, which is not visible here; `probe` compares with a plain loop first.
    """

    def __init__(self, model: nn.Module, parameters: Parameters) -> None:
        names = {id(p): name for name, p in parameters.named.items()}
        self._layers: dict[nn.Module, dict[str, str]] = {}
        for module in model.modules():
            held = module.named_parameters(recurse=False)
            if trainable := {kind: names[id(p)] for kind, p in held if id(p) in names}:
                self._layers[module] = trainable

    @property
    def unknown_layer(self) -> str | None:
        """The class name of a layer with trainable parameters whose formula is not known, if there is one."""
        return next((type(module).__name__ for module in self._layers if not is_known(module)), None)

    def backward(self, loss: Callable[[], Tensor], batches: Sequence[Batches], to: "Rows") -> int:
        """Write every user's gradients, and return how many bytes an example the layers' inputs took.

        `loss` runs the model on these batches, one after the other, and returns the sum of the users' losses.
        """
        calls: list[_Call] = []
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
                written.add(call, inputs, gradient)

        handles = [layer.register_forward_hook(catch, prepend=True) for layer in self._layers]
        try:
            total = loss()
        finally:
            for handle in handles:
                handle.remove()
        held = sum(call.inputs.nbytes for call in calls if call.inputs is not None)
        written = _Written(batches, to, Counter(name for call in calls for name in call.names.values()))
        # On the way back to layers whose input came from no other lie all outputs; no weight is asked for.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(total, begin, allow_unused=True)
        written.close(name for names in self._layers.values() for name in names.values())
        return held // sum(len(batch.inputs) for batch in batches)


class Rows:
    """All users' gradients as the rows of a matrix.

    Args:
        parameters: the layout of a row.
        rows: the matrix, of shape (users, d).
    """

    def __init__(self, parameters: Parameters, rows: Tensor) -> None:
        self._views = parameters.unflatten(rows)

    def memory_for(self, name: str) -> Tensor:
        """Return the columns of a parameter."""
        return self._views[name]

    def complete(self, name: str) -> None:
        """Do nothing: the rows are complete as written."""


@dataclass
class _Call:
    """One call of a layer; its input is freed once it has been used."""

    layer: nn.Module
    names: dict[str, str]
    inputs: Tensor | None


class _Written:
    """What has been written for each parameter, and what is still to come."""

    def __init__(self, batches: Sequence[Batches], to: Rows, calls: Counter[str]) -> None:
        self.batches, self.to, self.to_come = batches, to, calls
        self.memory: dict[str, Tensor] = {}
        self.done: set[str] = set()

    def add(self, call: _Call, inputs: Tensor, gradient: Tensor) -> None:
        """Write, or add to what is written, every user's gradients of one call of a layer."""
        inputs = inputs.to(gradient.dtype) if inputs.is_floating_point() else inputs
        first = {kind: name not in self.memory for kind, name in call.names.items()}
        memory = {kind: self._memory_for(name) for kind, name in call.names.items()}
        into = {
            kind: target
            if first[kind] and target.dtype == gradient.dtype
            else torch.empty_like(target, dtype=gradient.dtype)
            for kind, target in memory.items()
        }
        self._write(call.layer, inputs, gradient, into)
        for kind, name in call.names.items():
            if into[kind] is not memory[kind]:
                memory[kind].copy_(into[kind]) if first[kind] else memory[kind].add_(into[kind])
            self.to_come[name] -= 1
            if not self.to_come[name]:
                self._complete(name)

    def close(self, names: Iterable[str]) -> None:
        """Complete what some call did not add to, and write zeros where none did."""
        for name in [name for name in dict.fromkeys(names) if name not in self.done]:
            if name not in self.memory:
                self._memory_for(name).zero_()
            self._complete(name)

    def _write(self, layer: nn.Module, inputs: Tensor, gradient: Tensor, into: dict[str, Tensor]) -> None:
        examples = [len(batch.inputs) for batch in self.batches]
        lengths = [n * len(gradient) // sum(examples) for n in examples]  # a layer may see an example in parts
        start = 0
        for batch, part, its_gradient in zip(
            self.batches, torch.split(inputs, lengths), torch.split(gradient, lengths), strict=True
        ):
            users = slice(start, start := start + len(batch.positions))
            theirs = {kind: tensor[users] for kind, tensor in into.items()}
            gradients_of(layer, batch.by_user(part), batch.by_user(its_gradient), theirs)

    def _memory_for(self, name: str) -> Tensor:
        if name not in self.memory:
            self.memory[name] = self.to.memory_for(name)
        return self.memory[name]

    def _complete(self, name: str) -> None:
        self.done.add(name)
        del self.memory[name]
        self.to.complete(name)
