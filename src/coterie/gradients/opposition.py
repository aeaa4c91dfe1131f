"""Which peers keep pointing the other way: against user 0, and against most of the others.

A bound on lengths does not see a peer that turns its gradient round. Where each gradient is at hand, cosines do:

    c_ij ← c_ij + (cos(g_i, g_j) − c_ij) / 20,   from 0,

a mean over about the last twenty steps. A peer is opposed where c is below −1/4 with user 0 and with more than half
of the others. Peers that merely differ are not: of n gradients that cancel, as at rest, the mean cosine is
−1/(n − 1). A group that pulls away from the majority is heard as long as user 0 does not oppose it too.
"""

from typing import Any

import torch
from torch import Tensor

RATE = 1 / 20
"""What the newest cosine counts. Whoever turns round what the others send is noticed after about ten steps."""
LIMIT = -1 / 4
"""Below this mean cosine two users oppose each other."""


class Opposition:
    """The mean cosines of user 0 and its peers.

    Example:
        >>> opposition = Opposition()
        >>> own, rows = torch.ones(8), torch.tensor([1.0, 1.0, -2.0]).outer(torch.ones(8))
        >>> [opposition.opposed(own, rows, ("a", "b", "c"))[2] for _ in range(7)]
        [False, False, False, False, False, True, True]
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._cosines = torch.zeros(1, 1)  # user 0 first

    def opposed(self, own: Tensor, rows: Tensor, names: tuple[str, ...]) -> list[bool]:
        """Take the gradients of a step, and say of each peer whether it is opposed."""
        self._make_room(names)
        present = torch.tensor([0, *(self._places[name] for name in names)])
        unit = torch.nn.functional.normalize(_scaled(torch.cat([own[None], rows])), dim=1)
        cosines = (unit @ unit.T).cpu().float().nan_to_num()
        block = (present[:, None], present)
        self._cosines[block] += RATE * (cosines - self._cosines[block])
        against = self._cosines[block] < LIMIT
        most = against[1:].sum(1) * 2 > len(names)  # of the others, user 0 among them
        return [bool(each) for each in against[1:, 0] & most]

    def _make_room(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._places.setdefault(name, len(self._places) + 1)
        size, known = len(self._places) + 1, len(self._cosines)
        if size > known:
            grown = torch.zeros(size, size)
            grown[:known, :known] = self._cosines
            self._cosines = grown

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on."""
        return {"names": list(self._places), "cosines": self._cosines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state."""
        self._places = {name: place + 1 for place, name in enumerate(state["names"])}
        self._cosines = state["cosines"].cpu().clone()


def _scaled(vectors: Tensor) -> Tensor:
    """Return vectors of the same directions whose squares do not overflow."""
    largest = vectors.abs().amax(1, keepdim=True)
    return vectors / torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
