"""Sums of peers that give no gradient on its own: each adds its part and passes the sum on.

User 0 asks all who take part at once. They compute at the same time; then the sum goes from one to
the next in the order that user 0 has named, and the last one sends it to user 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.engines.compression import SKETCH, Sketch, sketch_key
from coterie.engines.engine import Answers, Question
from coterie.engines.messages import decoded, to_array
from coterie.engines.peer import Peer
from coterie.engines.remote.responder import reply_to
from coterie.privacy.masks import digest_of
from coterie.privacy.sums import SumsOnly

MOST_OPEN = 8
"""How many sums a peer keeps open; the oldest is given up for one more."""


class SumOutcome(IntEnum):
    """What became of a question to a peer at a point: nothing that can be used, or a refusal."""

    NOTHING = 0
    GRADIENT = 1
    REFUSED = 2


@dataclass
class Passed:
    """A sum on its way: at each point over those peers that are in it."""

    total: Tensor  # of shape (P, d)
    present: Tensor  # of shape (P, N): whose gradients it has
    strict: SumsOnly | None  # what all who give sums only, and are in it, ask for

    def plus(self, other: "Passed") -> "Passed":
        """Return the sum of both."""
        limits = [one.strict for one in (self, other) if one.strict is not None]
        return Passed(self.total + other.total, self.present | other.present, strictest(limits))

    def fit(self, weights: Tensor) -> "Passed":
        """Return the same without what would show too few of those who give sums only."""
        if self.strict is None:
            return self
        enough = self.strict.allowed(weights.masked_fill(~self.present, torch.nan))
        return replace(
            self,
            total=self.total.masked_fill(~enough[:, None], 0.0),
            present=self.present & enough[:, None],
        )


def strictest(kinds: Sequence[SumsOnly]) -> SumsOnly | None:
    """Return sums that all of these allow; None where there is none."""
    return SumsOnly(max(k.peers for k in kinds), min(k.share for k in kinds)) if kinds else None


@dataclass
class _Open:
    """A sum that a peer was asked for, or was passed before it was asked."""

    digest: bytes = b""
    weights: Tensor | None = None
    mine: Passed | None = None
    passed: tuple[str, dict[str, Any]] | None = None  # by whom, and what
    order: Sequence[str] = ()
    answer: Callable[[dict[str, Any]], None] | None = None  # of who is the last


class PartialSums:
    """A peer's place in sums that are passed on.

    A sum in which it is alone, or outweighs the others, it takes no part in; nor, as the last one,
    does it hand over what fewer have given than those in it ask for.

    Args:
        peer: what computes the gradients.
        sums: which sums it takes part in; any, where it gives gradients on their own too.
        pass_on: sends another peer what is passed to it.
    """

    def __init__(
        self, peer: Peer, sums: SumsOnly | None, pass_on: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.peer, self.sums, self._pass_on = peer, sums, pass_on
        self._open: dict[int, _Open] = {}

    def asked(
        self,
        caller: str,
        answer: Callable[[dict[str, Any]], None],
        *,
        number: int,
        request: Any,
        weights: Any,
        columns: Any,
        sketched: int,
        sketch: int,
    ) -> None:
        """Compute this peer's part, and answer; who is the last one answers with the sum."""
        me = self.peer.user.name
        asked_for, columns = _read_weights(weights, columns, caller)
        order = [name for k, name in enumerate(columns) if not asked_for[:, k].isnan().all()]
        if me not in order:
            raise ValueError("it is not in the sum")
        reply, mine = self._part(caller, request, asked_for, columns.index(me), (sketched, sketch))
        one = self._opened(number)
        told = {name: asked_for[:, k].numpy() for k, name in enumerate(columns)}
        places = {name: k for k, name in enumerate(columns)}
        one.digest = digest_of({"weights": told, "places": places, "number": number})
        one.weights, one.mine, one.order = asked_for, mine, order
        last = order[-1] == me
        one.answer = (lambda total: answer(reply | total)) if last else None
        if not last:
            answer(reply)
        self._go_on(number)

    def passed(self, caller: str, *, sum: int, content: Any, **_: Any) -> None:  # noqa: A002  # on the way
        """Take what another peer passes on."""
        if not isinstance(content, dict) or type(sum) is not int:
            raise ValueError("not a sum")  # of what came
        self._opened(sum).passed = caller, content
        self._go_on(sum)

    def _opened(self, number: int) -> _Open:
        if number not in self._open and len(self._open) >= MOST_OPEN:
            del self._open[min(self._open)]
        return self._open.setdefault(number, _Open())

    def _go_on(self, number: int) -> None:
        """Pass the sum on, once this peer's part and what comes before it are there."""
        one, me = self._open[number], self.peer.user.name
        if one.mine is None or one.weights is None:
            return
        place, total = one.order.index(me), one.mine
        if place:
            if one.passed is None:
                return
            by, content = one.passed
            came = _read_passed(content, one)
            if by != one.order[place - 1] or came is None:
                raise ValueError("what is passed on is not this sum")
            total = total.plus(came)
        del self._open[number]
        if one.answer is not None:
            total = total.fit(one.weights)
            one.answer({"total": to_array(total.total), "given": to_array(total.present)})
            return
        strict = None if total.strict is None else [total.strict.peers, total.strict.share]
        content = {"total": to_array(total.total), "given": to_array(total.present)}
        content |= {"strict": strict, "digest": one.digest.hex()}
        self._pass_on(one.order[place + 1], {"sum": number, "content": content})

    def _part(
        self, caller: str, request: Any, weights: Tensor, column: int, shown_as: tuple[int, int]
    ) -> tuple[dict[str, Any], Passed]:
        """Return what this peer says to user 0, and its part of the sum.

        `shown_as`: at how many points it shows a sketch, of how many numbers.
        """
        points, strict, (sketched, sketch) = request["points"], self.sums, shown_as
        if len(points) != len(weights) or not 0 <= sketched <= len(points):
            raise ValueError("weights are not those of the points")
        size = self.peer.passes.parameters.size
        if sketched and not 0 < sketch <= (max(1, size // 2) if strict else max(SKETCH, size)):
            raise ValueError("sketches are too long")
        asked = ~weights[:, column].isnan()
        allowed = asked if strict is None else asked & strict.allowed(weights)
        outcomes = torch.where(asked, SumOutcome.REFUSED, SumOutcome.NOTHING)
        present = torch.zeros(weights.shape, dtype=torch.bool)
        x = self.peer.passes.parameters
        total = torch.zeros(len(points), size, dtype=x.dtype)
        shown = torch.full((sketched, sketch), torch.nan, dtype=x.dtype)
        if allowed.any():
            replied = reply_to(self.peer, caller, request, wanted=allowed.tolist())
        else:
            replied = self.peer.refuse(f"it gives {strict}", caller)
        if replied.gradients is not None:
            rows, places = replied.gradients.cpu(), allowed.nonzero().flatten()
            finite = rows.isfinite().all(1)
            outcomes[places] = torch.where(finite, SumOutcome.GRADIENT, SumOutcome.NOTHING)
            used = places[finite]
            total[used] = weights[used, column, None].to(total) * rows[finite]
            present[used, column] = True
            if sketched:
                made = Sketch(size, sketch, sketch_key(request["seed"], request["step"]))
                shown[used[used < sketched]] = made(rows[finite][used < sketched])
        reply: dict[str, Any] = {"refused": replied.refused, "outcomes": to_array(outcomes)}
        return reply | {"sketches": to_array(shown)}, Passed(
            total, present, strict if present.any() else None
        )


def read_sum(
    question: Question, replies: Mapping[str, Any], names: Sequence[str], asked: Sequence[str]
) -> Answers:
    """Return what peers with these names answered, of whom some were asked, as user 0 reads it."""
    points = question.points
    n_points, shape = len(points), (len(points), len(names))
    outcomes = torch.zeros(shape, dtype=torch.int64)
    left_out = {name: "no answer" for name in asked if name not in replies}
    shown: Tensor | None = None
    for name, reply in replies.items():
        k, said = names.index(name), reply.get("outcomes")
        if is_array(said, (n_points,), "i"):
            outcomes[:, k] = torch.from_numpy(np.array(said))
        sketches = reply.get("sketches")
        if question.sketched and is_array(sketches, (question.sketched, None), "f"):
            if shown is None:
                shown = points.new_full(
                    (question.sketched, len(names), sketches.shape[1]), torch.nan
                )
            if sketches.shape[1] == shown.shape[2]:
                shown[:, k] = _tensor(sketches).to(shown)
    last = replies.get(asked[-1], {}) if asked else {}
    sums, present = torch.zeros_like(points), torch.zeros(shape, dtype=torch.bool)
    if is_array(last.get("total"), tuple(points.shape), "f") and is_array(
        last.get("given"), shape, "b"
    ):
        sums, present = _tensor(last["total"]).to(points), torch.from_numpy(np.array(last["given"]))
        present &= ~question.weights.isnan().cpu()
    lost = ~sums.isfinite().all(1)
    sums, present = sums.masked_fill(lost[:, None], 0.0), present & ~lost[:, None].cpu()
    refused = outcomes == SumOutcome.REFUSED
    for name in asked:
        k = names.index(name)
        missing = ~question.weights[:, k].isnan().cpu() & ~present[:, k]
        if name not in left_out and bool(missing.any()):
            at = int(missing.int().argmax())
            no_sum = "the sum is not finite" if lost.any() else "no sum"
            said = "refused" if refused[at, k] else "not finite"
            left_out[name] = no_sum if outcomes[at, k] == SumOutcome.GRADIENT else said
    there = (question.weights.cpu().masked_fill(~present, 0.0)).sum(1).to(points)
    return Answers(sums, there, left_out, sketches=shown, refused=refused)


def is_array(value: Any, shape: Sequence[int | None], kind: str) -> bool:
    """Say whether a value is an array of this kind and shape, in which None is any number."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind == kind
        and value.ndim == len(shape)
        and all(want in (None, n) for n, want in zip(value.shape, shape, strict=True))
    )


def _read_weights(weights: Any, names: Any, caller: str) -> tuple[Tensor, list[str]]:
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not fits or len(set(names)) < len(names) or caller in names:
        raise ValueError("the names of a sum must be those of other peers")
    if not is_array(weights, (None, len(names)), "f"):
        raise ValueError("a sum must have a weight for each")
    return torch.from_numpy(np.array(weights, dtype=np.float64)), names


def _read_passed(content: Mapping[str, Any], one: _Open) -> Passed | None:
    """Return a sum that was passed on; None where it is not the one that is open."""
    mine = one.mine
    total: Any = content.get("total")
    present, strict = content.get("given"), content.get("strict")
    if mine is None or content.get("digest") != one.digest.hex():
        return None
    shapes = tuple(mine.total.shape), tuple(mine.present.shape)
    if not (is_array(total, shapes[0], "f") and is_array(present, shapes[1], "b")):
        return None
    limits = None if strict is None else SumsOnly(*strict)
    return Passed(_tensor(total).to(mine.total), torch.from_numpy(np.array(present)), limits)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    numbers = decoded(array)
    return torch.from_numpy(np.array(array)) if numbers is None else numbers
