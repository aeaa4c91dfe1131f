"""Optimizers in captured steps.

What they count lies on the device, and step sizes that a schedule changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def why_not_capturable(optimizer: Optimizer) -> str | None:
    """Say why an optimizer's step cannot be captured, or None where it can."""
    official = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
    if not official or not (isinstance(optimizer, SGD) or "capturable" in optimizer.defaults):
        return f"{type(optimizer).__name__} is not known to be capturable"
    return None


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer count its steps on the device."""
    if device.type == "cuda" and not isinstance(optimizer, SGD):
        optimizer._warned_capturable_if_run_uncaptured = True  # single steps are meant too
        for group in optimizer.param_groups:
            group["capturable"] = True
        for parameter, state in optimizer.state.items():
            state.update(
                {k: v.to(parameter.device) for k, v in state.items() if isinstance(v, Tensor)}
            )


@contextlib.contextmanager
def at_rates(optimizer: Optimizer, rates: Sequence[float] | Sequence[Tensor]) -> Iterator[None]:
    """Let an optimizer use these step sizes inside, one for each group; none: its own."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
        if isinstance(rate, Tensor) and isinstance(optimizer, SGD):
            # which alone reads a step size on the device
            group["fused"], group["foreach"] = True, False
    yield
    for group, was in zip(optimizer.param_groups, before, strict=True):
        group.update(was)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer remembers."""
    return [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
    ]


def settings_of(optimizer: Optimizer, *, scheduled: bool) -> list[dict[str, Any]]:
    """Return the numbers that a captured step has in it.

    Not the step size where a schedule changes it.
    """
    return [
        {
            key: value
            for key, value in group.items()
            if key != "params" and not (key == "lr" and scheduled)
        }
        for group in optimizer.param_groups
    ]
