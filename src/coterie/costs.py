"""What a run costs each user: gradients, examples, and numbers sent and received."""

from __future__ import annotations

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
        self.of = {name: {"gradients": 0, "examples": 0, "sent": 0, "received": 0} for name in batches}
        self.me = next(iter(batches))

    def compute(self, names: Sequence[str], examples: int | None = None, *, times: int = 1) -> None:
        """Count a gradient of each of these users, over a batch where nothing else is said, so many times."""
        for name in names:
            self.of[name]["gradients"] += times
            self.of[name]["examples"] += times * (self.batches[name] if examples is None else examples)

    def exchange(self, peers: Sequence[str], down: int, up: int) -> None:
        """Count numbers that user 0 sends to each of these peers, and numbers that each sends back."""
        for name in peers:
            self.of[name]["received"] += down
            self.of[name]["sent"] += up
        self.of[self.me]["sent"] += down * len(peers)
        self.of[self.me]["received"] += up * len(peers)
