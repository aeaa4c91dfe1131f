"""What a run costs each user: gradients, examples, and numbers sent and received."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
    # the largest relative error of compression in what it sent; 0 where there is none
    rounding: float = 0.0
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
    return {
        name: before.get(name, Traffic()) + now.get(name, Traffic()) for name in {**before, **now}
    }


@dataclass
class Cost:
    """What the steps of a run have cost one user.

    What is measured before the first is not counted.
    """

    gradients: int = 0  # how many it computed; of a peer those that it gave
    examples: int = 0  # over how many examples, counted every time
    numbers_sent: int = 0
    numbers_received: int = 0


class Costs:
    """Counts by user, so that methods can be compared at equal gradients or at equal communication.

    User 0 is the one that the others talk to: what it sends to each peer, each peer receives.

    Args:
        batches: for each user, user 0 first, how many examples make a gradient.

    Example:
        >>> costs = Costs({"me": 8, "a": 32, "b": 32})
        >>> costs.compute(["me", "a", "b"])
        >>> costs.exchange(["a", "b"], down=10, up=10)
        >>> costs.by_user()["a"]
        Cost(gradients=1, examples=32, numbers_sent=10, numbers_received=10)
        >>> costs.by_user()["me"]
        Cost(gradients=1, examples=8, numbers_sent=20, numbers_received=20)
    """

    def __init__(self, batches: Mapping[str, int]) -> None:
        self.batches = dict(batches)
        self.me = next(iter(batches))
        self._by_user = {name: Cost() for name in batches}
        self._computed: Counter[tuple[tuple[str, ...], int | None]] = Counter()
        self._exchanged: Counter[tuple[tuple[str, ...], int, int]] = Counter()

    def compute(self, names: Sequence[str], examples: int | None = None, *, times: int = 1) -> None:
        """Count a gradient of each of these users, over a batch where nothing else is said, so many times."""
        self._computed[tuple(names), examples] += times

    def exchange(self, peers: Sequence[str], down: int, up: int, *, times: int = 1) -> None:
        """Count numbers that user 0 sends to each of these peers, and that each sends back, so many times."""
        self._exchanged[tuple(peers), down, up] += times

    def by_user(self) -> dict[str, Cost]:
        """Return what each user has computed, sent and received."""
        # Added up only when asked for: at every step it would be most of the time that 1,000 peers
        # add to a step.
        for (names, examples), times in self._computed.items():
            for name in names:
                cost = self._by_user[name]
                cost.gradients += times
                cost.examples += times * (self.batches[name] if examples is None else examples)
        mine = self._by_user[self.me]
        for (peers, down, up), times in self._exchanged.items():
            for name in peers:
                self._by_user[name].numbers_received += times * down
                self._by_user[name].numbers_sent += times * up
            mine.numbers_sent += times * down * len(peers)
            mine.numbers_received += times * up * len(peers)
        self._computed.clear()
        self._exchanged.clear()
        return self._by_user

    def load(self, before: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from the counts of an earlier session, given as plain data."""
        self.by_user().update({name: Cost(**each) for name, each in before.items()})
