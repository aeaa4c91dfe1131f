"""The formula of Alone, weighted averaging and bias correction, written once.

    d_t     = (1 − α) g_0 + α (g_avg − w c_t)
    c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

α = 0 is `Alone`, w = 0 weighted averaging (Algorithm 2), w = 1 bias correction (Algorithm 3). λ =
α(1 − w) is the weight that the peers' objective keeps in what is minimised in the end, (1 − λ) f_0
+ λ f_avg.

Gradients are vectors of shape (d,), or matrices of shape (R, d) with a row for each run. α and β
are numbers, tensors without dimensions, or columns of shape (R, 1).
"""

import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
"""A knob's value: a number, or a tensor that the device reads."""


def combined(
    own: Tensor, peers: Tensor, alpha: Number, c: Tensor | None = None, correction: float = 0.0
) -> Tensor:
    """Return d = (1 − α) g_0 + α (g_avg − w c)."""
    if c is None or not correction:
        return torch.lerp(own, peers, alpha)
    corrected = torch.sub(peers, c, alpha=correction)
    return torch.lerp(own, corrected, alpha, out=corrected)


def followed(c: Tensor, own: Tensor, peers: Tensor, beta: Number, answered: float = 1.0) -> Tensor:
    """Return (1 − β) c + β (g_avg − g_0).

    C stands for the bias of the share that did not answer.
    """
    bias = peers - own
    if answered < 1:
        bias.add_(c, alpha=1 - answered)
    return torch.lerp(c, bias, beta, out=bias)


def corrected_step(
    own: Tensor,
    peers: Tensor,
    c: Tensor,
    *,
    alpha: Number,
    beta: Number,
    correction: float,
    answered: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return both lines, with a·c for the bias of the share a that answered.

    On a GPU by one kernel where it can.

    `peers` is g_avg, with g_0 in the place of what did not answer.
    """
    if own.is_cuda and isinstance(alpha, Tensor) and isinstance(beta, Tensor) and answered == 1:
        direction, following = _kernel()(own, peers, c, alpha, beta, w=correction)
        return direction, following
    direction = combined(own, peers, alpha, c, correction * answered)
    return direction, followed(c, own, peers, beta, answered)


@functools.cache
def _kernel() -> Any:
    """Return both lines as one CUDA kernel: every number is read once and written once."""
    code = """
template <typename T> void corrected(T own, T peers, T c, T alpha, T beta, T w, T& direction, T& following) {
    direction = own + alpha * (peers - w * c - own);
    following = c + beta * (peers - own - c);
}
"""
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, num_outputs=2, w=1.0)
