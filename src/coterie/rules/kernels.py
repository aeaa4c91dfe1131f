"""Bias correction in one kernel, for captured steps on a GPU: every number is read and written once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

CORRECTED = """
template <typename T> void corrected(T own, T peers, T c, T alpha, T beta, T w, T& direction, T& following) {
    direction = own + alpha * (peers - w * c - own);
    following = c + beta * (peers - own - c);
}
"""


def corrected(
    own: Tensor, peers: Tensor, c: Tensor, knobs: tuple[Tensor, Tensor], correction: float
) -> tuple[Tensor, Tensor]:
    """Return (1 − α) g_0 + α (g_avg − w c) and (1 − β) c + β (g_avg − g_0), for α and β on the device."""
    direction, following = _kernel()(own, peers, c, *knobs, w=correction)
    return direction, following


@functools.cache
def _kernel() -> Callable[..., Any]:
    make: Callable[..., Any] = torch.cuda.jiterator._create_multi_output_jit_fn
    return cast("Callable[..., Any]", make(CORRECTED, num_outputs=2, w=1.0))
