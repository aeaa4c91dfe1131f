"""What travels between users: bytes over the network, seconds of waiting and of computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RENAMED = {
    "sent": "bytes_sent",
    "received": "bytes_received",
    "waiting": "seconds_waiting",
    "computing": "seconds_computing",
}  # in earlier versions


@dataclass
class Traffic:
    """What one user has sent, received and waited for since its engine was made.

    Args:
        bytes_sent: how many bytes it sent.
        bytes_received: how many it received.
        seconds_waiting: how long it waited for others.
        seconds_computing: how long it computed gradients.
        rounding: the largest relative error that compression made in what it sent; 0 where nothing is compressed.

    Example:
        >>> both = Traffic(bytes_sent=40, rounding=0.01) + Traffic(bytes_sent=2, rounding=0.02)
        >>> both.bytes_sent, both.rounding
        (42, 0.02)
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    seconds_computing: float = 0.0
    rounding: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.seconds_waiting + other.seconds_waiting,
            self.seconds_computing + other.seconds_computing,
            max(self.rounding, other.rounding),
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Traffic:
        """Return the traffic that `dataclasses.asdict` gave, now or in an earlier version."""
        return cls(**{_RENAMED.get(name, name): value for name, value in plain.items()})


def total(before: Mapping[str, Traffic], now: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Return everybody's traffic in earlier sessions of a run and in this one.

    Example:
        >>> total({"a": Traffic(bytes_sent=40)}, {"a": Traffic(bytes_sent=2)})["a"].bytes_sent
        42
    """
    return {name: before.get(name, Traffic()) + now.get(name, Traffic()) for name in {**before, **now}}
