"""Users with linear regressions of twenty features, in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

import coterie

TRUTH = torch.linspace(-1, 1, 20, dtype=torch.float64)


def regression(name: str, n: int, truth: Tensor, seed: int, noise: float = 1.0) -> coterie.User:
    """Return a user whose targets are a linear function with noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, len(truth), generator=generator, dtype=torch.float64)
    targets = inputs @ truth + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    return coterie.User(name, inputs, targets[:, None])


def users_with_validation() -> list[coterie.User]:
    """Return user 0, with 12 validation examples, and three peers alike."""
    users = [regression(f"u{k}", 30, TRUTH, k) for k in range(4)]
    inputs = torch.randn(12, 20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    held_out = (inputs, (inputs @ TRUTH)[:, None])
    mine = users[0].examples.take(torch.arange(30))
    return [coterie.User("u0", *mine, validation=held_out), *users[1:]]
