"""Bias correction in one CUDA kernel: every number is read once and written once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

CORRECTED_STEP = """
template <typename T> void corrected(T own, T peers, T c, T alpha, T beta, T w, T& direction, T& following) {
    direction = own + alpha * (peers - w * c - own);
    following = c + beta * (peers - own - c);
}
"""


def fits(own: Tensor, *knobs: object) -> bool:
    """Say whether the kernel can be used: gradients and knobs are on the device."""
    return own.is_cuda and all(isinstance(knob, Tensor) for knob in knobs)


def corrected_step(
    own: Tensor, peers: Tensor, c: Tensor, *, alpha: object, beta: object, correction: float
) -> tuple[Tensor, Tensor]:
    """Return (1 − α) g_0 + α (g_avg − w c) and (1 − β) c + β (g_avg − g_0)."""
    direction, following = _kernel()(own, peers, c, alpha, beta, w=correction)
    return direction, following


@functools.cache
def _kernel() -> Callable[..., Any]:
    make: Callable[..., Any] = torch.cuda.jiterator._create_multi_output_jit_fn
    return cast("Callable[..., Any]", make(CORRECTED_STEP, num_outputs=2, w=1.0))
