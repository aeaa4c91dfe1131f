"""Clipped sums without a gradient for each example: norms from layers' inputs and the gradients of their outputs.

A layer's gradient for one example is a product of its input and the gradient of its output. The norm of a product
can often be had without the product. So one pass gives every example's norm; and the products of all examples
together, each multiplied by what clips it, give the sum. Where a layer has fewer parameters than its products'
factors have numbers, each example's gradient is computed, and kept until it is known what clips it.

Only models that cannot mix examples are taken, as their classes show: sequences of layers that treat each example
on its own. A test on a batch would not do: what is promised must hold for every batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.engines.in_process.layers import gradients_of
from coterie.engines.in_process.model_support import full_precision
from coterie.engines.in_process.passes import Passes
from coterie.errors import ModelError
from coterie.evaluation.losses import known_per_example
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


def clipped_sum_by_layer(passes: Passes, x: Tensor, inputs: Tree, targets: Tree, clip: float) -> Tensor | None:
    """Return the sum of clipped gradients of a batch, each of an example alone, of a model that it `takes`.

    It is None where an example's gradient is not finite.
    """
    parameters, total = passes.parameters, torch.empty_like(x)
    views = parameters.unflatten(total)
    with full_precision():
        calls, output = _called(passes.model, parameters.unflatten(x.detach()), inputs)
        losses = _losses(passes, output, targets, n_rows(inputs))
        with torch.autograd.set_multithreading_enabled(False):  # another thread costs more than a small pass takes
            gradients = torch.autograd.grad(losses.sum(), [call.output for call in calls])
        each = list(zip(calls, gradients, strict=True))
        found = [_NORMS[type(call.layer)](call.layer, call.inputs, gradient) for call, gradient in each]
        norms = torch.stack([part for parts, _ in found for part in parts]).norm(dim=0)
        factors = clip / (norms * (1 + MARGIN)).clamp(min=clip)
        for (call, gradient), (_, rows) in zip(each, found, strict=True):
            into = {kind: views[name] for kind, name in call.names.items()}
            for kind, theirs in rows.items():
                torch.mv(theirs.flatten(1).T, factors, out=into.pop(kind).view(-1))
            if into:
                scaled = gradient * factors.view(-1, *[1] * (gradient.ndim - 1))
                rest = {kind: view[None] for kind, view in into.items()}
                gradients_of(call.layer, call.inputs[None], scaled[None], rest)
    return total if math.isfinite(norms.sum()) else None  # asked last: on a GPU it waits for all of the above


Norms: TypeAlias = tuple[Sequence[Tensor], Mapping[str, Tensor]]
"""The norms of examples' gradients by parts of a layer's parameters, and the gradients that it took, by name."""


@dataclass(frozen=True, eq=False)
class _Call:
    """What went into a layer and came out, and what its parameters are called in the model, by kind."""

    layer: nn.Module
    names: Mapping[str, str]
    inputs: Tensor
    output: Tensor


def _called(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tree) -> tuple[list[_Call], Tensor]:
    """Return the calls of the layers with parameters, and the output; layers are known, so no module is asked."""
    calls: list[_Call] = []
    flowing = cast("Tensor", inputs)
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if type(layer) is nn.Sequential:
            continue
        if not _has_parameters(layer):
            flowing = layer(flowing)
            continue
        if isinstance(layer, nn.Conv2d) and flowing.ndim != 4:
            raise ModelError(f"{layer} takes the examples for channels; give it inputs of 4 dimensions")
        names = {kind: f"{prefix}.{kind}".lstrip(".") for kind, _ in layer.named_parameters(recurse=False)}
        given = {kind: parameters[name] for kind, name in names.items()}
        output = _APPLIED[type(layer)](layer, flowing, given)
        if not output.requires_grad:
            output.requires_grad_()
        calls.append(_Call(layer, names, flowing.detach(), output))
        flowing = output
    return calls, flowing


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
    """Say whether a module of this class treats each example on its own, not in place, and nobody looks on."""
    if getattr(module, "inplace", False) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) is nn.Flatten:
        return module.start_dim >= 1
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    return type(module) in (nn.Sequential, *_WITHOUT_PARAMETERS, *_NORMS)


def _linear(layer: Any, inputs: Tensor, gradient: Tensor) -> Norms:
    inputs, gradient = (each.reshape(len(each), -1, each.shape[-1]) for each in (inputs, gradient))
    if inputs.shape[1] == 1:
        norms, rows = inputs.norm(dim=(1, 2)) * gradient.norm(dim=(1, 2)), dict[str, Tensor]()
        bias = gradient.squeeze(1)
    else:
        norms, rows = _of_product(inputs, gradient)
        bias = gradient.sum(1)
    return _with_bias(layer, bias, norms, rows)


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> Norms:
    n, places, groups = len(inputs), gradient[0, 0].numel(), layer.groups
    options = {name: getattr(layer, name) for name in ("dilation", "padding", "stride")}
    long, wide = layer.out_channels // groups, layer.weight[0].numel()
    if not inputs.is_cuda and not _by_pairs(places, wide, long):
        rows = {"weight": _each_weight(layer, inputs, gradient)}
        norms = rows["weight"].flatten(1).norm(dim=1)
    else:
        patches = functional.unfold(inputs, layer.kernel_size, **options)
        parts = (each.reshape(n * groups, -1, places).mT for each in (patches, gradient))
        norms, rows = _of_product(*parts)
        norms = norms if groups == 1 else norms.view(n, groups).norm(dim=1)
        rows = {name: each.reshape(n, *layer.weight.shape) for name, each in rows.items()}
    return _with_bias(layer, gradient.flatten(2).sum(2), norms, rows)


def _each_weight(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return each example's gradient by the weight, as that of one example with n times as many groups."""
    n, shape = len(inputs), layer.weight.shape
    weight = gradient.new_empty(n * shape[0], *shape[1:])  # its shape alone counts
    one = (each.reshape(1, -1, *each.shape[2:]) for each in (gradient, inputs))
    rows: Tensor = torch.ops.aten.convolution_backward(
        *(*one, weight, None, layer.stride, layer.padding, layer.dilation),
        *(False, [0, 0], n * layer.groups, [False, True, False]),
    )[1]
    return rows.view(n, *shape)


def _with_bias(layer: Any, bias: Tensor, norms: Tensor, rows: Mapping[str, Tensor]) -> Norms:
    """Return the same with the gradients by the bias, where there is one."""
    if layer.bias is None:
        return [norms], rows
    return [norms, bias.norm(dim=1)], {**rows, "bias": bias}


def _by_pairs(places: int, wide: int, long: int) -> bool:
    """Say whether the products of all pairs of places take fewer operations than each example's gradient."""
    return places * (wide + long) <= wide * long


def _of_product(inputs: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ‖Σ_t g_t a_tᵀ‖ for each example, from (n, T, i) and (n, T, o), and the sum where it was computed."""
    if _by_pairs(inputs.shape[1], inputs.shape[2], gradient.shape[2]):
        return ((inputs @ inputs.mT) * (gradient @ gradient.mT)).sum((1, 2)).clamp(min=0).sqrt(), {}
    product = gradient.mT @ inputs
    return product.flatten(1).norm(dim=1), {"weight": product}


def _by_formula(layer: Any, inputs: Tensor, gradient: Tensor) -> Norms:
    """Return those of a layer of few parameters, by its gradients themselves."""
    rows = {name: gradient.new_empty(len(inputs), *p.shape) for name, p in layer.named_parameters()}
    gradients_of(layer, inputs.unsqueeze(1), gradient.unsqueeze(1), rows)
    return [part.flatten(1).norm(dim=1) for part in rows.values()], rows


_NORMS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Norms]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _by_formula,
    nn.LayerNorm: _by_formula,
}

_APPLIED: dict[type[nn.Module], Callable[[Any, Tensor, Mapping[str, Tensor]], Tensor]] = {
    nn.Linear: lambda layer, x, p: functional.linear(x, p["weight"], p.get("bias")),
    nn.Conv2d: lambda layer, x, p: functional.conv2d(
        x, p["weight"], p.get("bias"), layer.stride, layer.padding, layer.dilation, layer.groups
    ),
    nn.GroupNorm: lambda layer, x, p: functional.group_norm(
        x, layer.num_groups, p.get("weight"), p.get("bias"), layer.eps
    ),
    nn.LayerNorm: lambda layer, x, p: functional.layer_norm(
        x, layer.normalized_shape, p.get("weight"), p.get("bias"), layer.eps
    ),
}
"""What a layer does, with parameters that are given."""
