"""What a run costs each user: gradients, examples, and numbers sent and received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class Costs:
    """Counts by user, so that methods can be compared at equal gradients or at equal communication.

    User 0 is the one that the others talk to: what it sends to each peer, each peer receives.

    Args:
        batches: for each user, user 0 first, how many examples make a gradient.

    Example:
        >>> costs = Costs({"me": 8, "a": 32, "b": 32})
        >>> costs.compute(["me", "a", "b"])
        >>> costs.exchange(["a", "b"], down=10, up=10)
        >>> costs.of["a"]
        {'gradients': 1, 'examples': 32, 'sent': 10, 'received': 10}
        >>> costs.of["me"]
        {'gradients': 1, 'examples': 8, 'sent': 20, 'received': 20}
    """

    def __init__(self, batches: Mapping[str, int]) -> None:
        self.batches = dict(batches)
        self.me = next(iter(batches))
        self._of = {name: {"gradients": 0, "examples": 0, "sent": 0, "received": 0} for name in batches}
        self._computed: Counter[tuple[tuple[str, ...], int | None]] = Counter()
        self._exchanged: Counter[tuple[tuple[str, ...], int, int]] = Counter()

    def compute(self, names: Sequence[str], examples: int | None = None, *, times: int = 1) -> None:
        """Count a gradient of each of these users, over a batch where nothing else is said, so many times."""
        self._computed[tuple(names), examples] += times

    def exchange(self, peers: Sequence[str], down: int, up: int, *, times: int = 1) -> None:
        """Count numbers that user 0 sends to each of these peers, and that each sends back, so many times."""
        self._exchanged[tuple(peers), down, up] += times

    @property
    def of(self) -> dict[str, dict[str, int]]:
        """What each user has computed, sent and received."""
        # Added up when somebody looks: at every step it would be most of what a step with 1,000 peers costs more.
        for (names, examples), times in self._computed.items():
            for name in names:
                self._of[name]["gradients"] += times
                self._of[name]["examples"] += times * (self.batches[name] if examples is None else examples)
        for (peers, down, up), times in self._exchanged.items():
            for name in peers:
                self._of[name]["received"] += times * down
                self._of[name]["sent"] += times * up
            self._of[self.me]["sent"] += times * down * len(peers)
            self._of[self.me]["received"] += times * up * len(peers)
        self._computed.clear()
        self._exchanged.clear()
        return self._of
