"""Gradients of all users over a few batches, each at two points.

What constants are measured from.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.compression import Sketch
from coterie.engines.engine import AnswersAtOwnPoints, Engine
from coterie.errors import DataError

Array: TypeAlias = NDArray[np.float64]

SKETCH = 2**15
"""Longer gradients are folded to this length with random signs.

Products of them then err by 0.6 %.
"""

REACH = 0.25
"""How far the second point is, in steps of the length that would bring a linear loss to zero."""


MAX_NUMBERS = 2**24
"""How many numbers of gradients are asked for at a time, where batches are passed together."""


@dataclass(frozen=True, eq=False)
class SampledRows:
    """One user's gradients, a row for each group of batches."""

    at: Array  # at the first point, the mean of a group's batches, of shape (groups, length)
    first: (
        # there, of the group's first batch alone; of user 0 without the groups that chose the
        # second point
        Array
    )
    ahead: Array  # the same batches at the second point
    batches: int = 1  # how many a group has


@dataclass(frozen=True, eq=False)
class SampledGradients:
    """Everybody's gradients at two points."""

    own: SampledRows
    peers: Mapping[str, SampledRows]  # those that answered every time
    left_out: Mapping[str, str]  # the others, each with the reason
    losses: tuple[float, float]  # user 0's at the two points
    distance: float  # between the points


@dataclass(frozen=True, eq=False)
class Asking:
    """Who is asked for gradients, and on which batches.

    Args:
        engine: gives everybody's gradients on the batches of steps 0, 1, ….
        here: gives those of the users in `parts` on any of their examples.
        parts: by user, the examples of disjoint batches, of shape (groups, size).
        me: user 0's name in `parts`.
        groups: into how many groups the batches of steps are put, for the users who are not in
            `parts`.
        batches: how many batches such a group has.
        known: by user, what those in `parts` answer at the first point, where it was asked for
            before; it is filled. For runs that begin at one point.
    """

    engine: Engine
    here: AnswersAtOwnPoints | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    me: str = ""
    groups: int = 8
    batches: int = 1
    known: dict[str, "OnParts"] = field(default_factory=dict)

    def sample(self, x: Tensor) -> SampledGradients:
        """Ask everybody at x and, `REACH` steps that bring a linear loss to zero, downhill of it.

        The way down is that of the first third of user 0's groups, which are then left out of what
        is measured along it: a way that was fitted to examples meets more curvature in them than
        there is.
        """
        shorten, lead = _sketch(x), max(1, self._own_groups // 3)
        first = self._ask(x, 0, shorten, self.known)
        way, loss = first.way / lead, float(np.mean(first.losses))
        if loss <= 0 or not bool(way.any()):
            why = (
                "user 0's loss is not positive or its gradient is zero at the start: no scale to"
                " measure by"
            )
            raise DataError(why)
        step = (-REACH * loss / way.square().sum()) * way
        others = [self._ask(x, batch, shorten, {}) for batch in range(1, self.batches)]
        ahead = self._ask(x + step, 0, shorten, {})
        left_out = {
            name: why for one in (first, *others, ahead) for name, why in one.left_out.items()
        }
        users: dict[str, SampledRows] = {}
        for name in (self.me, *self.engine.names):
            if name not in left_out:
                rows = first.rows(name)
                again = [one.rows(name) for one in others if name in one.lists]
                at = np.mean([rows, *again], axis=0) if again else rows
                users[name] = SampledRows(at, rows, ahead.rows(name), 1 + len(again))
        own, rest = users.pop(self.me), slice(lead if self._own_groups > 1 else 0, None)
        if not users:
            raise DataError("no peer's gradient can be used")
        own = replace(own, first=own.first[rest], ahead=own.ahead[rest])
        losses = loss, float(np.mean(ahead.losses[rest]))
        return SampledGradients(own, users, left_out, losses, float(step.norm()))

    @property
    def _own_groups(self) -> int:
        return len(self.parts[self.me]) if self.me in self.parts else self.groups

    def _ask(
        self,
        point: Tensor,
        batch: int,
        shorten: Callable[[Tensor], Tensor],
        known: dict[str, "OnParts"],
    ) -> "_Answers":
        """Ask at a point for one batch of each group; users in `parts` have but one."""
        answers = _Answers(self.me, torch.zeros_like(point))
        if self.here is not None and not batch:
            for name, parts in self.parts.items():
                there = known.get(name) or _on_parts(self.here, name, parts, point, shorten)
                known[name] = there
                answers.note(name, there)
        elsewhere = [name for name in self.engine.names if name not in self.parts]
        if not elsewhere and self.me in self.parts:
            return answers
        equal = dict.fromkeys(elsewhere, 1 / max(1, len(elsewhere)))
        for group in range(self.groups):
            g = self.engine.gradients(point, group * self.batches + batch, equal, rows=True)
            answers.left_out |= g.left_out
            for name, row in zip(g.names, () if g.rows is None else g.rows, strict=True):
                answers.note(name, OnParts.of(row[None], 0.0, shorten, 0))
            if self.me not in self.parts:
                lead = group < max(1, self.groups // 3)
                answers.note(
                    self.me, OnParts.of(g.own[None], float(g.own_loss), shorten, int(lead))
                )
        return answers


@dataclass(frozen=True, eq=False)
class OnParts:
    """One user's gradients at one point, a row for each of some batches."""

    rows: Array  # shortened
    losses: list[float]
    way: Tensor  # the sum of the first gradients, which may choose the second point, not shortened
    finite: bool

    @classmethod
    def of(cls, rows: Tensor, loss: float, shorten: Callable[[Tensor], Tensor], lead: int) -> Self:
        """Return gradients of batches, with their mean loss.

        The first `lead` may choose the second point.
        """
        finite = math.isfinite(loss) and bool(rows.isfinite().all())
        return cls(shorten(rows).numpy(), [loss] * len(rows), rows[:lead].sum(0), finite)


def _on_parts(
    here: AnswersAtOwnPoints,
    name: str,
    parts: Tensor,
    point: Tensor,
    shorten: Callable[[Tensor], Tensor],
) -> OnParts:
    """Return a user's gradients at a point on disjoint batches."""
    pieces, lead = list[OnParts](), max(1, len(parts) // 3)
    for chunk in torch.split(parts, max(1, MAX_NUMBERS // len(point))):
        rows, loss = here.on_each(name, point, chunk, step=0)
        pieces.append(OnParts.of(rows, float(loss), shorten, lead))
        lead = max(0, lead - len(chunk))
    if len(pieces) == 1:
        return pieces[0]
    losses = [loss for one in pieces for loss in one.losses]
    way = functools.reduce(torch.add, (one.way for one in pieces))
    return OnParts(
        np.concatenate([one.rows for one in pieces]), losses, way, all(one.finite for one in pieces)
    )


@dataclass(eq=False)
class _Answers:
    """What was answered at one point."""

    me: str
    way: Tensor  # the sum of user 0's gradients that choose the second point
    losses: list[float] = field(default_factory=list)  # user 0's, by group
    # by user, gradients of some groups each
    lists: dict[str, list[Array]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, one: OnParts) -> None:
        """Take a user's gradients of some groups."""
        if name != self.me:
            self.left_out |= {} if one.finite else {name: "not finite"}
        elif not one.finite:
            raise DataError("user 0's loss or gradient is not finite at the start")
        else:
            self.way += one.way
            self.losses += one.losses
        self.lists.setdefault(name, []).append(one.rows)

    def rows(self, name: str) -> Array:
        """Return one user's gradients, of shape (groups, length)."""
        lists = self.lists[name]
        return lists[0] if len(lists) == 1 else np.concatenate(lists)


def _sketch(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what shortens gradients, in double precision, with products kept in the mean."""
    if len(like) <= SKETCH:
        return lambda rows: rows.double().cpu()
    sketch = Sketch(len(like), SKETCH, key=0)
    return lambda rows: sketch(rows).double().cpu()
