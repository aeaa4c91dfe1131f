"""Peers of a model so small that tests write its numbers down."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer

LOSS = nn.functional.cross_entropy
D = 12


def model() -> nn.Module:
    """Return a model of D parameters."""
    torch.manual_seed(3)
    return nn.Linear(3, 3, dtype=torch.float64)


def peer_of(user: coterie.User, *caps_and_log: Any, **settings: Any) -> Peer:
    """Return a peer with this user's examples."""
    return Peer(user, Passes(model(), LOSS), *caps_and_log, **settings)
