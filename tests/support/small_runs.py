"""A small network, and its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a network for users of three inputs and three classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state."""
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Say whether two states have the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
