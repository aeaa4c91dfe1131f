"""Clipped sums without a gradient for each example.

Norms from layers' inputs and the gradients of their outputs.

A layer's gradient for one example is a product of its input and the gradient of its output. The
norm of a product can often be had without the product. So one pass gives every example's norm; and
the products of all examples together, each multiplied by what clips it, give the sum. Where a layer
has fewer parameters than its products' factors have numbers, each example's gradient is computed,
and kept until it is known what clips it.

Only models that cannot mix examples are taken, as their classes show: sequences of layers that
treat each example on its own. A test on a batch would not do: what is promised must hold for every
batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from coterie.engines.in_process.layers import gradients_of
from coterie.engines.in_process.model_support import full_precision
from coterie.engines.in_process.passes import Passes
from coterie.errors import ModelError
from coterie.evaluation.losses import known_per_example
from coterie.users.trees import Tree, n_rows

MARGIN = 1e-3
"""By so much of itself a norm may be wrong, since the sum is in single precision.

It is clipped to so much less.
"""

LOST_DIGITS = 1e3
"""A product's terms may be so many times as long as what is left of them.

Others' last digits are lost in them.
"""

LEAST_FACTOR = 1e-30
"""A smaller number has too few digits in single precision to clip by."""

_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d)
_WITHOUT_PARAMETERS = (
    *_ACTIVATIONS,
    *_POOLS,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.Identity,
)
_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def takes(passes: Passes) -> bool:
    """Say whether the classes of a model and its loss show that examples cannot mix, and norms are known."""
    known = known_per_example(passes.loss)
    if known is None or not known.of_torch:
        return False
    modules = [module for _, module in passes.model.named_modules(remove_duplicate=False)]
    layers = [module for module in modules if _has_parameters(module)]
    parameters = [id(p) for layer in layers for p in layer.parameters()]
    # norms are sums in double precision of what is in single
    if passes.parameters.dtype != torch.float32:
        return False
    # none shared, none frozen
    alone = len(parameters) == len(set(parameters)) == len(passes.parameters.named)
    return alone and bool(layers) and all(_is_apart(module) for module in modules)


def clipped_sum_by_layer(
    passes: Passes, x: Tensor, inputs: Tree, targets: Tree, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of clipped gradients of a batch, each of an example alone, of a model that it `takes`.

    And of which examples it holds: not of one whose gradient is not finite, nor where terms cancel
    so far that rounding could let it add more than `clip`. User 0 chooses the point, so it may
    happen. The sum is of use where it holds of all; the others have to be passed by themselves.
    """
    parameters, total = passes.parameters, torch.empty_like(x)
    views = parameters.unflatten(total)
    with full_precision():
        calls, output = _called(passes.model, parameters.unflatten(x.detach()), inputs)
        losses = _losses(passes, output, targets, n_rows(inputs))
        # another thread costs more than a small pass takes
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(losses.sum(), [call.output for call in calls])
        each = list(zip(calls, gradients, strict=True))
        by_layer = [_NORMS[type(c.layer)](c.layer, c.inputs, gradient) for c, gradient in each]
        rows = [
            (call.names[kind], of_examples)
            for (call, _), layer in zip(each, by_layer, strict=True)
            for kind, of_examples in layer.rows.items()
        ]
        none = x.new_zeros(len(losses), 0)
        kept = torch.cat([none, *(of_examples.flatten(1) for _, of_examples in rows)], dim=1)
        known = [layer.norm for layer in by_layer if layer.norm is not None]
        norms = torch.stack([_norm(kept), *known]).norm(dim=0)
        factors = clip / (norms * (1 + MARGIN)).clamp(min=clip)
        known = [layer.terms for layer in by_layer if layer.terms is not None]
        terms = torch.stack(known or [norms])
        holds = (factors * terms <= LOST_DIGITS * clip).all(0) & (factors >= LEAST_FACTOR)
        factors = factors.to(x.dtype)
        into = [views[name].view(-1) for name, _ in rows]
        if rows:
            torch._foreach_copy_(into, torch.split(kept.T @ factors, [len(view) for view in into]))
        for (call, gradient), layer in zip(each, by_layer, strict=True):
            rest = {k: views[name][None] for k, name in call.names.items() if k not in layer.rows}
            if rest:
                scaled = gradient * factors.view(-1, *[1] * (gradient.ndim - 1))
                gradients_of(call.layer, call.inputs[None], scaled[None], rest)
    return total, holds


@dataclass(frozen=True, eq=False)
class _Norms:
    """What a layer adds to the norms of examples' gradients.

    `rows` are gradients of each example, by the name of the parameter. Where that by the weight is
    not among them, `norm` is its norm, in double precision, and `terms` bounds the sum of the norms
    of the products that it is the sum of.
    """

    rows: Mapping[str, Tensor]
    norm: Tensor | None = None
    terms: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """What went into a layer and came out, and what its parameters are called in the model, by kind."""

    layer: nn.Module
    names: Mapping[str, str]
    inputs: Tensor
    output: Tensor


def _called(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tree
) -> tuple[list[_Call], Tensor]:
    """Return the calls of the layers with parameters, and the output.

    Layers are known, so no module is asked.
    """
    calls: list[_Call] = []
    flowing = cast("Tensor", inputs)
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if type(layer) is nn.Sequential:
            continue
        if not _has_parameters(layer):
            flowing = layer(flowing)
            continue
        if isinstance(layer, nn.Conv2d) and flowing.ndim != 4:
            raise ModelError(
                f"{layer} takes the examples for channels; give it inputs of 4 dimensions"
            )
        kinds = [kind for kind, _ in layer.named_parameters(recurse=False)]
        names = {kind: f"{prefix}.{kind}".lstrip(".") for kind in kinds}
        values = {kind: parameters[name] for kind, name in names.items()}
        output: Tensor = functional_call(layer, values, (flowing,))
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
    if (
        known is None
        or not isinstance(targets, Tensor)
        or targets.shape != wanted
        or len(output) != n
    ):
        raise ModelError("the model's output and the targets are not one row an example alike")
    return known.by_example(output, targets)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_apart(module: nn.Module) -> bool:
    """Say whether a module of this class treats each example on its own, not in place, and nobody looks on."""
    hooks = [getattr(module, f"_{way}_hooks") for way in _HOOKS]
    if getattr(module, "inplace", False) or any(hooks):
        return False
    if type(module) is nn.Flatten:
        return module.start_dim >= 1
    if isinstance(module, nn.Conv2d):
        return (
            type(module) is nn.Conv2d
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
        )
    return type(module) in (nn.Sequential, *_WITHOUT_PARAMETERS, *_NORMS)


def _linear(layer: Any, inputs: Tensor, gradient: Tensor) -> _Norms:
    inputs, gradient = (each.reshape(len(each), -1, each.shape[-1]) for each in (inputs, gradient))
    if inputs.shape[1] == 1:
        terms = _terms(inputs, gradient)
        return _with_bias(layer, gradient.squeeze(1), _Norms({}, terms, terms))
    return _with_bias(layer, gradient.sum(1), _of_product(inputs, gradient))


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> _Norms:
    n, places, groups = len(inputs), gradient[0, 0].numel(), layer.groups
    options = {name: getattr(layer, name) for name in ("dilation", "padding", "stride")}
    long, wide = layer.out_channels // groups, layer.weight[0].numel()
    if not inputs.is_cuda and not _by_pairs(places, wide, long):
        norms = _Norms({"weight": _each_weight(layer, inputs, gradient)})
    else:
        patches = functional.unfold(inputs, layer.kernel_size, **options)
        norms = _of_product(
            *(each.reshape(n * groups, -1, places).mT for each in (patches, gradient))
        )
        rows = {name: each.reshape(n, *layer.weight.shape) for name, each in norms.rows.items()}
        over = [
            None if each is None else each.view(n, groups).norm(dim=1)
            for each in (norms.norm, norms.terms)
        ]
        norms = _Norms(rows, *over)
    return _with_bias(layer, gradient.flatten(2).sum(2), norms)


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


def _with_bias(layer: Any, bias: Tensor, norms: _Norms) -> _Norms:
    """Return the same with the gradients by the bias, where there is one."""
    if layer.bias is None:
        return norms
    return replace(norms, rows={**norms.rows, "bias": bias})


def _by_pairs(places: int, wide: int, long: int) -> bool:
    """Say whether the products of all pairs of places take fewer operations than each example's gradient."""
    return places * (wide + long) <= wide * long


def _of_product(inputs: Tensor, gradient: Tensor) -> _Norms:
    """Return ‖Σ_t g_t a_tᵀ‖ for each example, from (n, T, i) and (n, T, o), and the sum where it was computed."""
    if not _by_pairs(inputs.shape[1], inputs.shape[2], gradient.shape[2]):
        return _Norms({"weight": gradient.mT @ inputs})
    # terms may cancel
    terms, inputs, gradient = _terms(inputs, gradient), inputs.double(), gradient.double()
    return _Norms(
        {}, ((inputs @ inputs.mT) * (gradient @ gradient.mT)).sum((1, 2)).clamp(min=0).sqrt(), terms
    )


def _by_formula(layer: Any, inputs: Tensor, gradient: Tensor) -> _Norms:
    """Return those of a layer of few parameters, by its gradients themselves."""
    rows = {name: gradient.new_empty(len(inputs), *p.shape) for name, p in layer.named_parameters()}
    gradients_of(layer, inputs.unsqueeze(1), gradient.unsqueeze(1), rows)
    return _Norms(rows)


def _norm(rows: Tensor) -> Tensor:
    """Return the norm of each row; squares of small numbers are zero in single precision."""
    norms: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64)
    return norms


def _terms(inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return a bound on Σ_t ‖g_t‖‖a_t‖.

    A gradient may be so small that it has no digits to be multiplied by.
    """
    return _norm(inputs) * (_norm(gradient) + LEAST_FACTOR)


_NORMS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], _Norms]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _by_formula,
    nn.LayerNorm: _by_formula,
}
