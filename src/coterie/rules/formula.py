"""The formula of Alone, weighted averaging and bias correction, written once.

    d_t     = (1 − α) g_0 + α (g_avg − w c_t)
    c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

α = 0 is `Alone`, w = 0 weighted averaging (Algorithm 2), w = 1 bias correction (Algorithm 3). λ = α(1 − w) is the
weight that the peers' objective keeps in what is minimised in the end, (1 − λ) f_0 + λ f_avg.

Gradients are vectors of shape (d,), or matrices of shape (R, d) with a row for each run. α and β are numbers,
tensors without dimensions, or columns of shape (R, 1).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from coterie.rules import kernels

Number: TypeAlias = float | Tensor
"""A knob's value: a number, or a tensor that the device reads."""


def combined(own: Tensor, peers: Tensor, alpha: Number, c: Tensor | None = None, correction: float = 0.0) -> Tensor:
    """Return d = (1 − α) g_0 + α (g_avg − w c).

    Example:
        >>> combined(torch.tensor([4.0]), torch.tensor([0.0]), 0.25)
        tensor([3.])
        >>> combined(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[0.25], [0.5]]))
        tensor([[0.2500],
                [0.5000]])
    """
    if c is None or not correction:
        return torch.lerp(own, peers, alpha)
    corrected = torch.sub(peers, c, alpha=correction)
    return torch.lerp(own, corrected, alpha, out=corrected)


def followed(c: Tensor, own: Tensor, peers: Tensor, beta: Number, answered: float = 1.0) -> Tensor:
    """Return (1 − β) c + β (g_avg − g_0); c stands for the bias of the share that did not answer.

    Example:
        >>> followed(torch.tensor([2.0]), own=torch.tensor([1.0]), peers=torch.tensor([5.0]), beta=0.5)
        tensor([3.])
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
    correction: float = 1.0,
    answered: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return both lines, with a·c for the bias of the share a that answered; on a GPU by one kernel where it can.

    Args:
        own: g_0.
        peers: g_avg, with g_0 in the place of what did not answer.
        c: c_t.
        alpha: α.
        beta: β.
        correction: w.
        answered: a.

    Example:
        >>> one, five, c = torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([4.0])
        >>> corrected_step(one, five, c, alpha=0.5, beta=0.1)
        (tensor([1.]), tensor([4.]))
    """
    if kernels.fits(own, alpha, beta) and answered == 1:
        return kernels.corrected_step(own, peers, c, alpha=alpha, beta=beta, correction=correction)
    direction = combined(own, peers, alpha, c, correction * answered)
    return direction, followed(c, own, peers, beta, answered)
