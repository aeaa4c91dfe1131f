"""Engines: where the users are. Each gives all users' gradients at one point; rules need not know more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from coterie.gradients.gradients import Gradients
from coterie.recording.traffic import Traffic
from coterie.users.user import Loss, User


class Engine(Protocol):
    """What computes gradients, wherever the users are."""

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that can be asked."""

    @property
    def gives_rows(self) -> bool:
        """Whether every peer's gradient can be had, or their weighted sum alone."""

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return everybody's gradients at x; a peer that the run cannot do without and that is gone is `PeerLost`.

        Args:
            x: the point, a flat vector.
            step: the step, from which every user draws its batch.
            weights: τ, the weight of each peer to ask; nobody is asked when empty.
            rows: whether every peer's gradient is wanted, or their weighted sum is enough.
        """

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed.

        It is part of what a resumed run must have in common with the one it goes on with. An engine whose peers
        are elsewhere also says who they are (`peers`: their names and numbers of examples).
        """

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, and the time it took, by user; empty where nothing travels."""

    def close(self) -> None:
        """Let the peers go: no more gradients will be asked for."""


class MakeEngine(Protocol):
    """What makes an engine over the users of a run: `InProcess`, or a function with settings of its own."""

    def __call__(
        self, model: nn.Module, loss: Loss, me: User, peers: Sequence[User], *, batch_size: int, seed: int
    ) -> Engine:
        """Return an engine; `model` is the one that is trained, whose buffers user 0's batches move."""
