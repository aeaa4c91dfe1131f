"""Between organisations, where user 0 sees the sum of the sites' gradients and nobody's own: what it asks sites."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from torch import Tensor

from coterie.engines.flare.messages import read_part
from coterie.engines.flare.post import Post
from coterie.engines.flare.sites import Replies
from coterie.privacy.masked_sums import MaskedSums


class SecureSums:
    """The masked sums of one job over sites; see `MaskedSums`.

    Args:
        sums: who takes part.
        post: what carries the messages, and counts them.
        batch_size: how many examples a gradient is of, which says how much noise it needs.
    """

    def __init__(self, sums: MaskedSums, post: Post, batch_size: int) -> None:
        self.sums, self._post = sums, post
        self._offer = {"batch_size": batch_size}
        self.told: dict[str, Mapping[str, Any]] = {}  # the last answers of those who gave a part
        self._round = 0  # it goes on over agreements, so that a late request is of none but its own

    def ask(
        self, request: dict[str, Any], weights: Mapping[str, float]
    ) -> Callable[[], tuple[Tensor | None, dict[str, str]]]:
        """Ask sites for their parts, by a message; return at once what waits for the sum, or why there is none."""
        agreed = self.sums.agree(weights, request["step"], self._asked)
        if agreed is None:
            return lambda: (None, {})
        self._round += 1
        names = list(agreed.weights)
        sent = self._post.send(names, "part", request | {"round": self._round})
        return partial(self._added, sent, names, request, self._round)

    def _asked(self, names: Sequence[str], method: str, **arguments: Any) -> Mapping[str, Any]:
        arguments |= self._offer if method == "offer" else {}
        return self._post.ask(names, method, **arguments).wait()

    def _added(
        self, sent: Replies, names: Sequence[str], request: dict[str, Any], round_: int
    ) -> tuple[Tensor | None, dict[str, str]]:
        replies, step, size = sent.wait(), request["step"], request["points"].size
        read = {name: read_part(name, replies.get(name), step, round_, size) for name in names}
        parts = {name: part for name, part in read.items() if not isinstance(part, str)}
        for name, part in parts.items():
            self._post.received(name, part.nbytes)
        missing = {name: part for name, part in read.items() if isinstance(part, str)}
        self.told = {name: replies[name] for name in parts}
        words = None if missing else reduce(np.add, parts.values())
        return self.sums.added(words, missing, step)
