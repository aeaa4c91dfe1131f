"""A bound on how long what peers send may be, so that no single step can destroy a run.

A gradient that is too long is left out of its step, as one that is not finite: its weight goes back
to g_0, and the record counts it. Too long is more than a few times

    the median length of all peers' gradients in the same step, where each is at hand and there are
    three or more; the longest sum before, where only sums are at hand;

or than as many times g_0, where that is longer. The first sum has nothing to be compared with.

A rule that only sums gradients has no defence of its own against one that is turned round. Where
each is at hand all the same, what is opposed to user 0 and to most of the others is left out too:
see `Opposition`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.gradients.gradients import Gradients

RATE = 1 / 20
"""What the newest cosine counts.

Whoever turns round what the others send is noticed after about ten steps.
"""
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


FACTOR = 3.0
"""How many times as long as the median is too long: honest peers of real data sets stay below."""
LEAST_ROWS = 3
"""How many peers it takes for their median to be one of the good ones, if one of them is bad."""
GROWTH = 1.1
"""By what factor the longest sum that is remembered may grow in a step.

Sums that grow tenfold need 24 steps.
"""

AGAINST = "it keeps pointing against user 0 and most of the others"
"""Why a gradient that is turned round is left out."""


class NormBound:
    """The bound of one run, or of R at once, with what it remembers: the length of the longest sum.

    Args:
        factor: how many times as long as the median is too long; a number, or one for each run, of
            shape (R,).
        x: the parameters, of shape (d,) or (R, d).

    Example:
        >>> bound = NormBound(3.0, torch.zeros(2))
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-40.0, 0.0]])
        >>> g = Gradients(own=torch.ones(2), rows=rows, names=("a", "b", "c"), answered=1.0)
        >>> bound.kept(g, dict.fromkeys("abc", 1 / 3), rows=True).left_out
        {'c': 'more than 3 times as long as the median of all'}
    """

    def __init__(self, factor: float | Tensor, x: Tensor) -> None:
        self.factor = factor
        self.longest = torch.zeros(x.shape[:-1], dtype=_dtype(x), device=x.device)
        self.opposition = Opposition()

    def kept(self, g: Gradients, weights: Mapping[str, float], *, rows: bool) -> Gradients:
        """Return the gradients less what is too long: as rows, or as their weighted sum."""
        if g.rows is not None and len(g.rows) >= LEAST_ROWS:
            why_not = self._why_not(g, g.rows, rows=rows)
            if rows and not why_not:
                return g
            good = [name not in why_not for name in g.names]
            names = tuple(name for name in g.names if name not in why_not)
            left_out = dict(g.left_out) | why_not
            matrix = g.rows if all(good) else g.rows[torch.tensor(good, device=g.rows.device)]
            return g.with_peers(matrix, names, weights, left_out, rows=rows)
        total = _total(g)
        if total is None or not bool(self.long_sums(g.own, total)):
            if rows or g.rows is None:
                return g
            return g.with_peers(g.rows, g.names, weights, g.left_out, rows=False)
        why = f"the sum is more than {self.factor:g} times as long as any before"
        left_out = dict(g.left_out) | {name: why for name in weights if name not in g.left_out}
        none = g.own.new_empty(0, *g.own.shape)
        return replace(g, rows=none, names=(), peers=None).with_peers(
            none, (), weights, left_out, rows=rows
        )

    def _why_not(self, g: Gradients, matrix: Tensor, *, rows: bool) -> dict[str, str]:
        """Return which of the peers' gradients are left out, each with the reason."""
        too_long = long_rows(matrix, g.own, self.factor).tolist()
        why: dict[str, str] = {}
        if not rows:
            opposed = self.opposition.opposed(g.own, matrix, g.names)
            why |= {name: AGAINST for name, is_so in zip(g.names, opposed, strict=True) if is_so}
        far = f"more than {self.factor:g} times as long as the median of all"
        why |= {name: far for name, is_so in zip(g.names, too_long, strict=True) if is_so}
        return why

    def exceeded(self, g: Gradients) -> Tensor:
        """Say whether something is too long, without a wait for the device."""
        if g.rows is not None and len(g.rows) >= LEAST_ROWS:
            return long_rows(g.rows, g.own, self.factor).any()
        total = _total(g)
        if total is None:
            return torch.zeros_like(g.own[0], dtype=torch.bool)
        return self.long_sums(g.own, total)

    def long_sums(self, own: Tensor, sums: Tensor) -> Tensor:
        """Say of each sum whether it is too long after those before, and remember its length."""
        length, begun = _lengths(sums), self.longest > 0
        too_long = length.isinf() | (
            begun & (length > self.factor * torch.maximum(self.longest, _lengths(own)))
        )
        grown = torch.maximum(self.longest, torch.minimum(length, GROWTH * self.longest))
        self.longest.copy_(torch.where(begun, grown, length).nan_to_num(0.0, 0.0))
        return too_long


def _total(g: Gradients) -> Tensor | None:
    """Return the peers' sum, or the mean of a few rows; None where nobody answered."""
    if g.rows is not None:
        return g.rows.mean(0) if len(g.rows) else None
    return g.peers if g.answered else None


def long_rows(rows: Tensor, own: Tensor, factor: float | Tensor) -> Tensor:
    """Say of each of n rows whether it is too long beside the others (the lower median) and g_0.

    Example:
        >>> long_rows(torch.tensor([[1.0], [2.0], [-9.0]]), torch.tensor([1.0]), 3.0)
        tensor([False, False,  True])
    """
    lengths = _lengths(rows)
    median = lengths.sort().values[(len(lengths) - 1) // 2]
    return lengths > factor * torch.maximum(median, _lengths(own))


def _lengths(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=_dtype(vectors))
    return lengths


def _dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)  # half a precision would overflow
