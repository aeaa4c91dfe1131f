"""Users whose targets are one linear function of six inputs, with noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie import User

D = 6
TRUTH = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0])


def user(name: str, n: int, truth: Tensor, noise: float = 1.0, **held_out: Any) -> User:
    """Return a user whose targets are linear in the inputs, with noise."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    inputs = torch.randn(n, D, generator=generator)
    return User(
        name,
        inputs,
        (inputs @ truth + noise * torch.randn(n, generator=generator))[:, None],
        **held_out,
    )


def alike(count: int, n: int = 60, noise: float = 1.0) -> list[User]:
    """Return users that all follow `TRUTH`."""
    return [user(f"alike {k}", n, TRUTH, noise) for k in range(count)]
