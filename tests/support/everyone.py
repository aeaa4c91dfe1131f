"""Users who all want a model: like in what they measure, unlike in what they make of it."""

from __future__ import annotations

import torch

import coterie


def everyone(n: int = 4, examples: int = 12, seed: int = 0) -> list[coterie.User]:
    """Return users with three inputs and three classes, each with its own validation and test examples."""
    draws = torch.Generator().manual_seed(seed)
    users = []
    for k in range(n):
        inputs = torch.randn(examples + 24, 3, generator=draws, dtype=torch.float64)
        turn = (
            torch.eye(3, dtype=torch.float64)
            + 0.4 * (k % 2) * torch.randn(3, 3, generator=draws).double()
        )
        targets = (inputs @ turn).argmax(1)
        targets[:3] = torch.arange(3)
        parts = [
            (inputs[a:b], targets[a:b]) for a, b in ((0, examples), (examples, -12), (-12, None))
        ]
        users.append(coterie.User(f"user {k}", *parts[0], validation=parts[1], test=parts[2]))
    return users
