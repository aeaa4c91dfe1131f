"""What gradients cost each user: bytes over the network, seconds of waiting and of computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Cost:
    """What one user has spent since its engine was made.

    Args:
        sent: bytes it sent.
        received: bytes it received.
        waiting: seconds it waited for others.
        computing: seconds it computed gradients.
        rounding: the largest relative error that compression made in what it sent; 0 where nothing is compressed.

    Example:
        >>> Cost(sent=40, rounding=0.01) + Cost(sent=2, rounding=0.02)
        Cost(sent=42, received=0, waiting=0.0, computing=0.0, rounding=0.02)
    """

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    computing: float = 0.0
    rounding: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.sent + other.sent,
            self.received + other.received,
            self.waiting + other.waiting,
            self.computing + other.computing,
            max(self.rounding, other.rounding),
        )


def total(before: Mapping[str, Mapping[str, float]], now: Mapping[str, Cost]) -> dict[str, dict[str, float]]:
    """Return what each user has spent, as plain numbers for a record: in earlier sessions of a run and in this one.

    Example:
        >>> total({"a": {"sent": 40}}, {"a": Cost(sent=2)})["a"]["sent"]
        42
    """
    earlier = {name: Cost(**values) for name, values in before.items()}  # type: ignore[arg-type]  # bytes are whole
    return {name: asdict(earlier.get(name, Cost()) + now.get(name, Cost())) for name in {**earlier, **now}}
