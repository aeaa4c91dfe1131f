"""Local steps: the plain gradient steps that users take between two exchanges."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.methods.clients import Clients
from coterie.rules.knobs import check_count


def local_steps(
    users: Clients, points: Tensor, step: int, count: int, *, lr: float, add: Tensor | None = None
) -> Tensor:
    """Let every user take plain gradient steps from its point, x_k ← x_k − η (g_k(x_k) + a_k).

    Args:
        users: the users.
        points: the starting points, a row for each user; one row moves user 0 alone.
        step: the step of the first batch.
        count: the number of steps.
        lr: η.
        add: a_k, added to every gradient: a row for each user, or one vector for all; nothing when None.
    """
    for k in range(count):
        gradients = users.gradients(points, step + k)
        points = torch.sub(points, gradients if add is None else gradients.add_(add), alpha=lr)
    return points


def check_local_steps(count: int) -> None:
    """Check a number of local steps."""
    check_count("local_steps", count)
