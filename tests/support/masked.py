"""Masked sums in this process: peers whose gradients are drawn, keys that are fixed, a ring without a network."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.support import small_peers
from tests.support.small_peers import D, model
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is there

import coterie
from coterie.engines.engine import Question
from coterie.engines.peer import Peer
from coterie.engines.requests import Request
from coterie.engines.torch_distributed.group import Group
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.secure_sums import MaskedPart, SecureSums
from coterie.engines.torch_distributed.wire import Notes, Wire
from coterie.gradients.gradients import Gradients
from coterie.privacy.keys import Identity, Offer
from coterie.privacy.masked_sums import MaskedSums
from coterie.privacy.masks import Agreement, Masks
from coterie.privacy.sums import SumsOnly

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
    peer._gradients = lambda request, added=None: (drawn(user.name, request.step)[None], 4)  # type: ignore[assignment]
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


class Ring:
    """User 0 and n peers under torch.distributed, with all code but the transport.

    What user 0's message says to a peer can be changed on the way, in `told`; `passed` is what
    ranks pass on.
    """

    def __init__(self, n: int, sums: SumsOnly | None = None, **settings: Any) -> None:
        self.people, store = users(n), HashStore()
        self.names = [user.name for user in self.people[1:]]
        self.wire = Wire(model(), n, None, moves_buffers=False, backend="gloo")
        self.wire.send_request = self._deliver  # type: ignore[method-assign]
        groups = [Group(store, rank, n + 1, 1.0) for rank in range(n + 1)]
        peers = [peer_of(user, **settings) for user in self.people[1:]]
        self.parts = [
            MaskedPart(p, sums or SumsOnly(), g, {"batch_size": 4}, {}, masked_only=True)
            for p, g in zip(peers, groups[1:], strict=True)
        ]
        self.lead = SecureSums(MaskedSums(misses=2), groups[0], self.wire, self.names)
        self.told: dict[str, Tensor] = {}
        self.passed: list[Tensor] = []

    def _deliver(self) -> Any:
        ask, number, _ = self.wire.request.read()
        for part in self.parts:
            part.agree(ask, number)
        return mock.Mock()

    def step(self, x: Tensor, step: int, weights: Mapping[str, float]) -> Gradients:
        """Return what user 0 gets."""
        mine = Gradients(own=torch.zeros_like(x))
        if not self.lead.agree(weights, step):
            return self.lead.sums.with_sum(mine, None, {}, weights)
        asked = torch.tensor(
            [[weights.get(name, torch.nan) for name in self.names]], dtype=torch.float64
        )
        self.wire.request.fill(Ask.PART, Question(x[None], step, asked))
        request, body = Request(x[None], step, 5, 4), self.wire.request.body
        sent = []
        for position, part in enumerate(self.parts):
            words, outcome = part.of(request, self.told.get(self.names[position], body))
            sent.append(self.wire.part(position, words, outcome, (0.0, 0.0)))
        self.passed = [functools.reduce(torch.add, sent[: k + 1]) for k in range(len(sent))]
        notes: list[Notes] = self.wire.notes(Ask.PART, self.passed[-1])
        return self.lead.with_sum(
            mine, self.passed[-1], dict(zip(self.names, notes, strict=True)), weights, step
        )
