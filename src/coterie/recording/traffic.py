"""What travels between users: bytes over the network, seconds of waiting and of computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Traffic:
    """What one user has sent, received and waited for since its engine was made.

    Args:
        sent: bytes it sent.
        received: bytes it received.
        waiting: seconds it waited for others.
        computing: seconds it computed gradients.
        rounding: the largest relative error that compression made in what it sent; 0 where nothing is compressed.

    Example:
        >>> Traffic(sent=40, rounding=0.01) + Traffic(sent=2, rounding=0.02)
        Traffic(sent=42, received=0, waiting=0.0, computing=0.0, rounding=0.02)
    """

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    computing: float = 0.0
    rounding: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.waiting + other.waiting,
            self.computing + other.computing,
            max(self.rounding, other.rounding),
        )


def total(before: Mapping[str, Mapping[str, float]], now: Mapping[str, Traffic]) -> dict[str, dict[str, float]]:
    """Return everybody's traffic as plain numbers for a record: in earlier sessions of a run and in this one.

    Example:
        >>> total({"a": {"sent": 40}}, {"a": Traffic(sent=2)})["a"]["sent"]
        42
    """
    earlier = {name: Traffic(**values) for name, values in before.items()}  # type: ignore[arg-type]  # bytes are whole
    return {name: asdict(earlier.get(name, Traffic()) + now.get(name, Traffic())) for name in {**earlier, **now}}
