"""Engines: where the users are. Each gives all users' gradients at one point; rules need not know more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from coterie.engines.in_process import InProcess
from coterie.gradients import Gradients

__all__ = ["Engine", "InProcess"]


class Engine(Protocol):
    """What computes gradients, wherever the users are."""

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that can be asked."""

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return everybody's gradients at x.

        Args:
            x: the point, a flat vector.
            step: the step, from which every user draws its batch.
            weights: τ, the weight of each peer to ask; nobody is asked when empty.
            rows: whether every peer's gradient is wanted, or their weighted sum is enough.
        """

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
