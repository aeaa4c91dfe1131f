"""Clipped sums without a gradient for each example: norms from layers' inputs and the gradients of their outputs.

A layer's gradient for one example is a product of its input and the gradient of its output. The norm of a product
can be had without the product. So one pass gives every example's norm; and the products of all examples together,
each multiplied by what clips it, give the sum.

Only models that cannot mix examples are taken, as their classes show: sequences of layers that treat each example
on its own. A test on a batch would not do: what is promised must hold for every batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from coterie.engines.in_process.layers import gradients_of
from coterie.engines.in_process.model_support import full_precision
from coterie.engines.in_process.passes import Passes
from coterie.errors import ModelError
from coterie.evaluation.losses import known_per_example
from coterie.privacy.clipping import clip_factors
from coterie.users.trees import Tree, n_rows

MARGIN = 1e-3
"""By so much of itself a norm may be wrong, since it and the sum are in the model's precision."""

_WITHOUT_PARAMETERS = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)


def takes(passes: Passes) -> bool:
    """Say whether the classes of a model and its loss show that examples cannot mix, and norms are known."""
    known = known_per_example(passes.loss)
    if known is None or not known.of_torch:
        return False
    modules = [module for _, module in passes.model.named_modules(remove_duplicate=False)]
    layers = [module for module in modules if _has_parameters(module)]
    parameters = [id(p) for layer in layers for p in layer.parameters()]
    alone = len(parameters) == len(set(parameters)) == len(passes.parameters.named)  # none shared, none frozen
    return alone and bool(layers) and all(_is_apart(module) for module in modules)


def clipped_sum_by_layer(passes: Passes, x: Tensor, inputs: Tree, targets: Tree, clip: float) -> Tensor:
    """Return the sum of clipped gradients of a batch, each of an example alone, of a model that it `takes`.

    It may not be finite where an example's gradient is not.
    """
    parameters, total = passes.parameters, torch.empty_like(x)
    leaves = {name: view.requires_grad_() for name, view in parameters.unflatten(x.detach()).items()}
    views = {
        id(p): view for p, view in zip(parameters.named.values(), parameters.unflatten(total).values(), strict=True)
    }
    with full_precision():
        calls, output = _watched(passes.model, leaves, inputs)
        losses = _losses(passes, output, targets, n_rows(inputs))
        gradients = torch.autograd.grad(losses.sum(), [call.output for call in calls])
        each = list(zip(calls, gradients, strict=True))
        squares = [_SQUARES[type(call.layer)](call.layer, call.inputs, gradient) for call, gradient in each]
        factors = clip_factors(torch.stack(squares).sum(0).sqrt() * (1 + MARGIN), clip)
        for call, gradient in each:
            scaled = gradient * factors.view(-1, *[1] * (gradient.ndim - 1))
            into = {kind: views[id(p)][None] for kind, p in call.layer.named_parameters(recurse=False)}
            gradients_of(call.layer, call.inputs[None], scaled[None], into)
    return total.double()


@dataclass(frozen=True, eq=False)
class _Call:
    """What went into a layer and came out."""

    layer: nn.Module
    inputs: Tensor
    output: Tensor


def _watched(model: nn.Module, leaves: Mapping[str, Tensor], inputs: Tree) -> tuple[list[_Call], Tensor]:
    """Return the calls of the layers with parameters, and the output."""
    calls: list[_Call] = []

    def note(layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(layer, nn.Conv2d) and arguments[0].ndim != 4:
            raise ModelError(f"{layer} takes the examples for channels; give it inputs of 4 dimensions")
        calls.append(_Call(layer, arguments[0].detach(), output))

    handles = [layer.register_forward_hook(note) for layer in model.modules() if _has_parameters(layer)]
    try:
        return calls, functional_call(model, dict(leaves), (inputs,))
    finally:
        for handle in handles:
            handle.remove()


def _losses(passes: Passes, output: Tensor, targets: Tree, n: int) -> Tensor:
    """Return the loss of each example alone, where the shapes show that no example meets another's target."""
    known = known_per_example(passes.loss)
    by_class = isinstance(targets, Tensor) and not targets.is_floating_point()
    wanted = (n, *output.shape[2:]) if by_class else output.shape
    if known is None or not isinstance(targets, Tensor) or targets.shape != wanted or len(output) != n:
        raise ModelError("the model's output and the targets are not one row an example alike")
    return known.by_example(output, targets)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_apart(module: nn.Module) -> bool:
    """Say whether a module of this class treats each example on its own, and does not work in place."""
    if getattr(module, "inplace", False):
        return False
    if type(module) is nn.Flatten:
        return module.start_dim >= 1
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    return type(module) in (nn.Sequential, *_WITHOUT_PARAMETERS, *_SQUARES)


def _linear(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    bias = layer.bias is not None
    inputs, gradient = (each.reshape(len(each), -1, each.shape[-1]) for each in (inputs, gradient))
    return _of_product(inputs, gradient, bias=bias)


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    options = {name: getattr(layer, name) for name in ("dilation", "padding", "stride")}
    patches, gradient = functional.unfold(inputs, layer.kernel_size, **options), gradient.flatten(2)
    if layer.groups == 1:
        return _of_product(patches.mT, gradient.mT, bias=layer.bias is not None)
    n, groups = len(inputs), layer.groups
    parts = (each.reshape(n * groups, -1, each.shape[-1]).mT for each in (patches, gradient))
    return _of_product(*parts, bias=layer.bias is not None).view(n, groups).sum(1)


def _of_product(inputs: Tensor, gradient: Tensor, *, bias: bool) -> Tensor:
    """Return ‖Σ_t g_t a_tᵀ‖² for each example, from (n, T, i) and (n, T, o), and with a bias also ‖Σ_t g_t‖²."""
    added = gradient.sum(1).square().sum(1) if bias else 0.0
    places, wide, long = inputs.shape[1], inputs.shape[2], gradient.shape[2]
    if places == 1:
        return inputs.square().sum((1, 2)) * gradient.square().sum((1, 2)) + added
    if places * places * (wide + long) <= places * wide * long:  # which takes fewer operations
        return ((inputs @ inputs.mT) * (gradient @ gradient.mT)).sum((1, 2)).clamp(min=0) + added
    return (gradient.mT @ inputs).square().sum((1, 2)) + added


def _by_formula(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the squared norms of a layer of few parameters, by its gradients themselves."""
    n = len(inputs)
    into = {name: gradient.new_empty(n, *p.shape) for name, p in layer.named_parameters()}
    gradients_of(layer, inputs.unsqueeze(1), gradient.unsqueeze(1), into)
    return torch.stack([part.flatten(1).square().sum(1) for part in into.values()]).sum(0)


_SQUARES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _by_formula,
    nn.LayerNorm: _by_formula,
}
"""The squared norm of every example's gradient by a layer's parameters, from its input and that of its output."""
