"""What travels between users: bytes over the network, seconds of waiting and of computing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass
class Traffic:
    """What one user has sent, received and waited for since its engine was made.

    Example:
        >>> both = Traffic(bytes_sent=40, rounding=0.01) + Traffic(bytes_sent=2, rounding=0.02)
        >>> both.bytes_sent, both.rounding
        (42, 0.02)
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0  # for others
    seconds_computing: float = 0.0  # gradients
    rounding: float = 0.0  # the largest relative error of compression in what it sent; 0 where there is none
    messages: int = 0  # sent: questions, or answers to them

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.seconds_waiting + other.seconds_waiting,
            self.seconds_computing + other.seconds_computing,
            max(self.rounding, other.rounding),
            self.messages + other.messages,
        )


def total(before: Mapping[str, Traffic], now: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Return everybody's traffic in earlier sessions of a run and in this one."""
    return {name: before.get(name, Traffic()) + now.get(name, Traffic()) for name in {**before, **now}}
