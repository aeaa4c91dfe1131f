"""Everybody's gradients at several points in one step, and the losses there: point by point, on any engine.

User 0 computes its own here, on all of its examples or on all but one fold. `PointsTogether` takes one pass,
`PointsExchanged` one exchange with peers elsewhere. A point is a row of parameters, followed by the model's buffers
where passes move them (BatchNorm).
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from coterie.engines.engine import Engine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.evaluation.evaluate import example_losses
from coterie.gradients.gradients import finite_rows
from coterie.gradients.parameters import Parameters, copied
from coterie.learners.spec import RunSpec
from coterie.users.examples import Examples, FromDataset, InMemory
from coterie.users.user import User


@dataclass(frozen=True, eq=False)
class Own:
    """User 0's gradients at some points."""

    gradients: Tensor  # of shape (R, d)
    loss: Tensor  # at the first point
    buffers: Tensor  # of shape (R, b): what the passes left in the model's buffers


@dataclass(frozen=True, eq=False)
class Sums:
    """The peers' weighted sums at some points, over those peers whose gradients can be used."""

    sums: Tensor  # of shape (R, d)
    answered: Tensor  # of shape (R,): the weight that is in each
    left_out: Mapping[str, str] = field(default_factory=dict)  # the others, each with the reason
    refused: Tensor | None = None  # of shape (R, N): who refused where; None if `left_out` says it of all points


@dataclass(frozen=True, eq=False)
class Judged:
    """What whom to listen to is judged by: each peer's gradient or its sketch at all points but the last."""

    theirs: Tensor  # of shape (R − 1, N, m); not numbers where there is none
    ours: Tensor  # of shape (R − 1, m): user 0's, in the same way
    heard: Sums  # at the last point; at all where `theirs` are sketches
    left_out: Mapping[str, str]

    def sums(self, weights: Tensor) -> Sums:
        """Return the peers' sums at all points: by these weights, or where they came as sums by those asked for."""
        if len(self.heard.sums) == len(weights):
            return self.heard
        first = combined(self.theirs, weights[:-1], {})
        sums = torch.cat([first.sums, self.heard.sums])
        return Sums(sums, torch.cat([first.answered, self.heard.answered]), self.left_out)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the length of each peer's gradient, (R − 1, N), and at each point what is usual, (R − 1,).

        That is the median of the peers' lengths, or user 0's where that is longer.
        """
        lengths = self.theirs.norm(dim=2)
        return lengths, torch.fmax(lengths.nanmedian(dim=1).values, self.ours.norm(dim=1))

    def without(self, peers: Tensor, why: str, names: Sequence[str]) -> "Judged":
        """Return the same where some peers (R − 1, N) did not answer."""
        if not peers.any():
            return self
        out = {name: why for name, one in zip(names, peers.any(0).tolist(), strict=True) if one}
        theirs = self.theirs.masked_fill(peers.unsqueeze(2), torch.nan)
        return replace(self, theirs=theirs, left_out={**out, **self.left_out})


class Points:
    """Gradients and losses at several points, one point after the other. The engine must be able to give rows.

    `parts`, of shape (P, n): which of user 0's examples each part has. A copy that is blind to a fold draws its
    batches from a part as a user with those examples alone would.
    """

    def __init__(
        self, spec: RunSpec, engine: Engine, parts: Tensor, forward_options: ForwardOptions = DEFAULT_FORWARD
    ) -> None:
        self.spec, self.engine, self.parts = spec, engine, parts
        self.names, self.d = engine.names, Parameters(spec.model).size
        self._users = [_part(spec.me, part) for part in parts]
        self._forward_options = forward_options
        self._carried = self._carried_buffers()
        self._model = copied(spec.model)

    @functools.cached_property
    def _own(self) -> list[InProcess]:
        """User 0 by itself, with each part of its examples."""
        made = (replace(self.spec, me=user, peers=()) for user in self._users)
        return [each.in_process(forward_options=self._forward_options) for each in made]

    def _carried_buffers(self) -> list[str]:
        """Return the buffers that points have of their own where passes move any: numbers, and what counts passes.

        Half precision has no room for counts, and all points share them there.
        """
        moved, exact = self._own[0].support.moved, next(self.spec.model.parameters()).dtype.itemsize >= 4
        counts = moved if exact else ()
        named = self.spec.model.named_buffers() if moved else ()
        return [name for name, buffer in named if buffer.is_floating_point() or name in counts]

    def start(self) -> Tensor:
        """Return the point where the model is."""
        return torch.cat([Parameters(self.spec.model).vector(), self._moved()])

    def own(self, points: Tensor, step: int, parts: Sequence[int]) -> Own:
        """Return user 0's gradient at each point, on its part's batch of this step."""
        gradients, moved, first = [], [], points.new_tensor(torch.nan)
        for row, (point, part) in enumerate(zip(points, parts, strict=True)):
            with self._at(point):
                g = self._own[part].gradients(point[: self.d], step, {})
                gradients.append(g.own)
                moved.append(self._moved())
            first = torch.as_tensor(g.own_loss) if not row else first
        return Own(torch.stack(gradients), first, torch.stack(moved))

    def on_all(self, points: Tensor, step: int, parts: Sequence[int]) -> Tensor:
        """Return user 0's gradient at each point, on all examples of its part."""
        gradients = torch.zeros_like(points[:, : self.d])
        for point, part, total in zip(points, parts, gradients, strict=True):
            user = self._users[part]
            with self._at(point):
                for some in _chunks(len(user)):
                    gradient, _ = self._own[part].on(user.name, point[: self.d], some, step)
                    total.add_(gradient, alpha=len(some) / len(user))
        return gradients

    def ask(self, points: Tensor, step: int, weights: Tensor) -> Callable[[], Sums]:
        """Ask for the peers' sums by weights (R, N), and return what waits for them."""
        return partial(self.sums, points, step, weights)

    def judge(self, points: Tensor, step: int, weights: Tensor, parts: Sequence[int]) -> Callable[[], Judged]:
        """Ask for what whom to listen to is judged by, with user 0's gradients on all examples of these parts."""
        return partial(self._judged, points, step, weights, parts)

    def _judged(self, points: Tensor, step: int, weights: Tensor, parts: Sequence[int]) -> Judged:
        everyone = torch.ones_like(weights[:-1], dtype=torch.bool)
        rows, left_out = self.rows(points[:-1], step, everyone)
        ours = self.on_all(points[:-1], step, parts)
        last = self.sums(points[-1:], step, weights[-1:])
        return Judged(rows, ours, last, {**left_out, **last.left_out})

    def sums(self, points: Tensor, step: int, weights: Tensor) -> Sums:
        """Return the peers' sums by weights (R, N)."""
        sums, answered = torch.zeros_like(points[:, : self.d]), points.new_zeros(len(points))
        left_out: dict[str, str] = {}
        for row, (point, given) in enumerate(zip(points, weights.tolist(), strict=True)):
            if point.isfinite().all():
                asked = {name: weight for name, weight in zip(self.names, given, strict=True) if weight}
                with self._at(point):
                    g = self.engine.gradients(point[: self.d], step, asked)
                left_out.update(g.left_out)
                if g.peers is not None and g.answered:
                    sums[row], answered[row] = g.peers - (1 - g.answered) * g.own, g.answered
        return Sums(sums, answered, left_out)

    def rows(self, points: Tensor, step: int, asked: Tensor) -> tuple[Tensor, dict[str, str]]:
        """Return each peer's gradient at each point, of shape (R, N, d), and those left out with the reason.

        `asked`, of shape (R, N), says who is asked. The rows of others, and of those left out, are not numbers.
        """
        rows = points.new_full((len(points), len(self.names), self.d), torch.nan)
        left_out: dict[str, str] = {}
        for point, wanted, to in zip(points, asked.tolist(), rows, strict=True):
            names = [name for name, yes in zip(self.names, wanted, strict=True) if yes]
            if names and point.isfinite().all():
                equal = dict.fromkeys(names, 1 / len(names))
                with self._at(point):
                    g = self.engine.gradients(point[: self.d], step, equal, rows=True)
                left_out.update(g.left_out)
                if g.rows is not None and len(g.rows):
                    to[[self.names.index(name) for name in g.names]] = g.rows
        return rows, left_out

    def losses(self, points: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each example at each point, of shape (R, n), in evaluation mode."""
        by_point = []
        for point in points:
            self._set(self._model, point)
            by_point.append(example_losses(self._model, self.spec.loss, examples))
        return torch.stack(by_point)

    def serve(self, point: Tensor) -> None:
        """Give the model's parameters and buffers the values of a point."""
        self._set(self.spec.model, point)

    def _set(self, model: nn.Module, point: Tensor) -> None:
        Parameters(model).load(point[: self.d])
        self._load(model, point[self.d :])

    def _moved(self) -> Tensor:
        like = next(self.spec.model.parameters())
        return torch.cat([like.new_empty(0), *(b.reshape(-1).to(like) for b in self._held_by(self.spec.model))])

    @contextmanager
    def _at(self, point: Tensor) -> Iterator[None]:
        """Let the model have a point's buffers, and restore those it had afterwards."""
        before = self._moved()
        self._load(self.spec.model, point[self.d :])
        try:
            yield
        finally:
            self._load(self.spec.model, before)

    def _load(self, model: nn.Module, values: Tensor) -> None:
        buffers = self._held_by(model)
        for buffer, piece in zip(buffers, torch.split(values, [b.numel() for b in buffers]), strict=True):
            buffer.copy_((piece if buffer.is_floating_point() else piece.round()).view_as(buffer))

    def _held_by(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers of a model that points have of their own."""
        held = dict(model.named_buffers()) if self._carried else {}
        return [held[name] for name in self._carried]


def combined(rows: Tensor, weights: Tensor, left_out: Mapping[str, str]) -> Sums:
    """Return weighted sums of the rows that are finite."""
    there = finite_rows(rows)
    if not there.all():
        rows = rows.masked_fill(~there.unsqueeze(2), 0.0)
    present = weights * there
    return Sums(torch.bmm(present.unsqueeze(1), rows).squeeze(1), present.sum(1), left_out)


def _chunks(n: int) -> list[Tensor]:
    """Return n indices, 1,024 at a time; a last one by itself, which BatchNorm does not take, goes with others."""
    chunks = list(torch.split(torch.arange(n), 1024))
    return chunks if n < 2 or len(chunks[-1]) > 1 else [*chunks[:-2], torch.cat(chunks[-2:])]


def _part(user: User, kept: Tensor) -> User:
    """Return a user with some of its examples only, and the same name."""
    indices, part = kept.cpu().nonzero().flatten(), copy.copy(user)
    if isinstance(user.examples, FromDataset):
        part.examples = replace(user.examples, dataset=Subset(user.examples.dataset, indices.tolist()))
    elif isinstance(user.examples, InMemory):
        part.examples = InMemory(*user.examples.take(indices))
    return part
