"""Each user's gradients by the parameters of one layer, from its input and the gradient of its output.

Tensors are of shape (users, examples, …); what is written is of shape (users, *the parameter's*).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.engines.in_process.side_stream import side_stream

N_SIDE_STREAMS = 8
"""On a GPU so many users' convolutions run at the same time: one user's alone does not fill it."""


def is_known(layer: nn.Module) -> bool:
    """Return whether the formula of this layer is known; that of a subclass is not."""
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm or layer.scale_grad_by_freq or layer.sparse
    ):
        return False
    return type(layer) in _FORMULAS


def gradients_of(
    layer: nn.Module, inputs: Tensor, gradient: Tensor, into: Mapping[str, Tensor]
) -> None:
    """Write each user's gradients by the parameters wanted (`weight`, `bias`) of a layer that `is_known`.

    `gradient` is that of the layer's output.
    """
    _FORMULAS[type(layer)](layer, inputs, gradient, into.get("weight"), into.get("bias"))


def _linear(
    layer: Any, inputs: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    inputs, gradient = inputs.flatten(1, -2), gradient.flatten(1, -2)
    if weight is not None:
        torch.bmm(gradient.mT, inputs, out=weight)
    if bias is not None:
        torch.sum(gradient, 1, out=bias)


def _convolution(
    layer: Any, inputs: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    if bias is not None:
        torch.sum(gradient, (1, *range(3, gradient.ndim)), out=bias)
    if weight is None:
        return
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = functional.pad(
            inputs.flatten(0, 1), layer._reversed_padding_repeated_twice, mode=mode
        )
        inputs = padded.reshape(*inputs.shape[:2], *padded.shape[1:])
        padding = (0,) * len(layer.stride)
    # One user at a time: of what was tried (users as groups, unfolded inputs), nothing was faster.
    n_streams = N_SIDE_STREAMS if inputs.is_cuda else 1
    joins = []
    for first in range(n_streams):
        with side_stream(inputs.device) as join:
            for each, its_gradient, its_weight in zip(
                inputs[first::n_streams],
                gradient[first::n_streams],
                weight[first::n_streams],
                strict=True,
            ):
                its_weight.copy_(
                    torch.ops.aten.convolution_backward(
                        *(
                            its_gradient,
                            each,
                            layer.weight.detach(),
                            None,
                            layer.stride,
                            padding,
                            layer.dilation,
                        ),
                        *(False, [0] * len(layer.stride), layer.groups, [False, True, False]),
                    )[1]
                )
        joins.append(join)
    for join in joins:
        join()


def _group_norm(
    layer: Any, inputs: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    over = (1, *range(3, gradient.ndim))
    if weight is not None:
        normalised = functional.group_norm(inputs.flatten(0, 1), layer.num_groups, eps=layer.eps)
        torch.sum(normalised.reshape(gradient.shape).mul_(gradient), over, out=weight)
    if bias is not None:
        torch.sum(gradient, over, out=bias)


def _layer_norm(
    layer: Any, inputs: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    over = tuple(range(1, gradient.ndim - len(layer.normalized_shape)))
    if weight is not None:
        normalised = functional.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
        torch.sum(normalised.mul_(gradient), over, out=weight)
    if bias is not None:
        torch.sum(gradient, over, out=bias)


def _embedding(
    layer: Any, inputs: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    if weight is None:
        return
    users, entries = weight.shape[:2]
    # where each user's entries begin
    own = torch.arange(0, users * entries, entries, device=inputs.device)
    places = inputs.flatten(1) + own[:, None]
    backward = torch.ops.aten.embedding_dense_backward
    each = backward(gradient.flatten(1, -2), places, users * entries, -1, False)  # noqa: FBT003
    weight.copy_(each.view_as(weight))
    if layer.padding_idx is not None:
        weight[:, layer.padding_idx] = 0


_FORMULAS: dict[
    type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor | None, Tensor | None], None]
] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}
