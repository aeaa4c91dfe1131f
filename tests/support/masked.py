"""Masked sums in this process: peers whose gradients are drawn, keys that are fixed."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.support import small_peers
from tests.support.small_peers import D
from torch import Tensor

import coterie
from coterie.engines.peer import Peer
from coterie.privacy.keys import Identity, Offer
from coterie.privacy.masks import Agreement, Masks

SLOW = bool(os.environ.get("COTERIE_SLOW"))
"""Whether there is time for all that masked sums are held to: 1,000 steps with 10 sites, 2,000 wrong messages."""


def users(n: int) -> list[coterie.User]:
    """Return user 0 and n peers."""
    random = torch.Generator().manual_seed(n)
    inputs = [
        torch.randn(12, 3, generator=random, dtype=torch.float64) + k / n for k in range(n + 1)
    ]
    return [
        coterie.User(f"peer {k}" if k else "me", each, torch.arange(12) % 3)
        for k, each in enumerate(inputs)
    ]


def tau_of(n: int) -> dict[str, float]:
    """Return an equal share for each of n peers."""
    return {f"peer {k}": 1 / n for k in range(1, n + 1)}


@functools.cache
def _table(name: str) -> Tensor:
    random = np.random.default_rng([*name.encode()])
    rows = random.normal(size=(1000, D)) * 10.0 ** random.integers(-3, 1, size=(1000, 1))
    return torch.from_numpy(rows).clamp(-16, 16)


def drawn(name: str, step: int) -> Tensor:
    """Return a gradient that is a function of a peer and a step."""
    return _table(name)[step]


def peer_of(user: coterie.User, **settings: Any) -> Peer:
    """Return a peer whose gradients are `drawn`."""
    peer = small_peers.peer_of(user, **settings)
    peer.identity = _identity(user.name)
    peer._gradients = lambda request, added=None: (drawn(user.name, request.step)[None], 4)  # type: ignore[method-assign]
    return peer


def fixed_private(n: int) -> list[X25519PrivateKey]:
    """Return n private keys, the same each time."""
    return [X25519PrivateKey.from_private_bytes(bytes([k + 1] * 32)) for k in range(n)]


def fixed_keys(
    n: int, largest: float = 16.0, weights: Sequence[float] | None = None
) -> tuple[Agreement, list[Masks]]:
    """Return an agreement of n sites with the same keys each time, and the masks of each."""
    private = {f"site {k}": key for k, key in enumerate(fixed_private(n))}
    offers = {site: _signed(site, key) for site, key in private.items()}
    agreed = Agreement(dict(zip(private, weights or [1 / n] * n, strict=True)), largest, offers)
    return agreed, [Masks(site, key, agreed) for site, key in private.items()]


def _signed(site: str, private: X25519PrivateKey) -> Offer:
    with mock.patch.object(X25519PrivateKey, "generate", return_value=private):
        return _identity(site).offer()[1]


def _identity(site: str) -> Identity:
    return Identity(site, site.encode().ljust(32))
