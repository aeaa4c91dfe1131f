"""Ask a `Question`, wherever the users are.

User 0's parts and the peers at all points, in one form of answer.

`GradientsAtPoints.ask` is how adaptive averaging gets its gradients. `asking` returns the way that
suits an engine:

- users in this process whose model can be stacked: `StackedGradients`, one operator over all points
  and users;
- peers elsewhere who answer at several points: one exchange, user 0 computes its own meanwhile;
- any other engine: point by point.

A point is a row of parameters, followed by the model's buffers where passes move them (BatchNorm).
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from coterie.engines.compression import Sketch, sketch_key, sketched
from coterie.engines.engine import (
    Answers,
    Asks,
    Engine,
    PeerEvidence,
    Question,
    Stackable,
    combined,
)
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.engines.in_process.stacked_sums import ExamplePool, StackedSums
from coterie.evaluation.evaluate import example_losses, outputs_on, whole_of
from coterie.gradients.parameters import Parameters, copied, finite_rows, is_finite
from coterie.users.examples import Examples, FromDataset, InMemory
from coterie.users.trees import Tree, mapped
from coterie.users.user import Loss, User

HELD = 2**20
"""How many numbers gradients of a large model have that are held at once, if it is not one gradient."""


@dataclass(frozen=True, eq=False)
class OwnUser:
    """User 0 of a run: its model and loss, and how its batches are drawn."""

    model: nn.Module
    loss: Loss
    me: User
    batch_size: int
    seed: int
    forward_options: ForwardOptions = DEFAULT_FORWARD

    def engine(self, part: Tensor) -> InProcess:
        """Return user 0 by itself, with a part of its examples, (n,)."""
        return InProcess(
            self.model,
            self.loss,
            part_of(self.me, part),
            batch_size=self.batch_size,
            seed=self.seed,
            forward_options=self.forward_options,
        )


def asking(engine: Engine, user: OwnUser, parts: Tensor) -> "GradientsAtPoints":
    """Return what answers questions, in as few passes or exchanges as the engine can.

    `parts`, of shape (F, n): which of user 0's examples each part has. A part draws its batches as
    a user with those examples alone would.
    """
    if isinstance(engine, Stackable) and engine.capabilities.not_stacked is None:
        return StackedGradients(engine, user, parts)
    alone = user.engine(torch.ones_like(parts[0]))
    here = StackedGradients(alone, user, parts) if alone.capabilities.not_stacked is None else None
    return GradientsAtPoints(engine, user, parts, here)


class GradientsAtPoints:
    """Answers from any engine, and losses at points.

    User 0 computes its own `here`, by the operator; point by point where its model cannot be
    stacked.
    """

    def __init__(
        self, engine: Engine, user: OwnUser, parts: Tensor, here: "StackedGradients | None" = None
    ) -> None:
        self.engine, self.user, self.parts, self._here = engine, user, parts, here
        self.names, self.d = engine.names, Parameters(user.model).size
        # by so many numbers peers in this process are judged; by whole gradients when None
        self.sketched: int | None = None
        self._carried = self._carried_buffers()

    @functools.cached_property
    def _model(self) -> nn.Module:
        """A copy of the model that passes at points may change."""
        return copied(self.user.model)

    @functools.cached_property
    def _own(self) -> list[InProcess]:
        """User 0 by itself, with each part of its examples."""
        return [self.user.engine(part) for part in self.parts]

    def _carried_buffers(self) -> list[str]:
        """Return the buffers that points have of their own where passes move any.

        Numbers, and what counts passes.

        Half precision has no room for counts, and all points share them there.
        """
        model = self.user.model
        if self._here is not None:
            return []
        moved, exact = self._own[0].support.moved, next(model.parameters()).dtype.itemsize >= 4
        counts = moved if exact else ()
        named = model.named_buffers() if moved else ()
        return [name for name, buffer in named if buffer.is_floating_point() or name in counts]

    why_not_captured: ClassVar[str | None] = (
        "gradients at several points are computed one after the other"
    )

    def block(self, step: int) -> Tensor:
        """Return the examples that all columns draw in the next steps, a row for each step."""
        raise NotImplementedError

    def on(self, question: Question, drawn: Tensor) -> Answers:
        """Return answers on the examples drawn, finite or not, as a captured step asks for them."""
        raise NotImplementedError

    def start(self) -> Tensor:
        """Return the point where the model is."""
        x = Parameters(self.user.model).vector()
        return torch.cat([x, self._moved()]) if self._carried else x

    def ask(self, question: Question) -> Answers:
        """Ask the peers, compute user 0's gradients, and return all answers.

        Weights of zero ask nobody.
        """
        asked = len(question.weights)
        peers = self._asked_one_by_one
        if self.engine.capabilities.many_points:
            peers = self._asked_at_points
        waiting = peers(question)
        own, losses, buffers = self._own_gradients(question, question.points[asked:])
        ours = self._on_all(question) if question.each else question.points[:0, : self.d]
        answers = waiting()
        sums = torch.cat([torch.zeros_like(own[:0]) if answers.sums is None else answers.sums, own])
        judged = (
            None
            if answers.rows is None
            else PeerEvidence(answers.rows, self._shown(ours, question.step))
        )
        return replace(answers, sums=sums, rows=None, losses=losses, buffers=buffers, judged=judged)

    def _own_gradients(self, question: Question, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return user 0's gradient and loss at each point, on its part's batch, and what is left in the buffers."""
        if self._here is not None:
            nobody, here = self._here.nobody, self._here
            alone = here.ask(replace(question, points=points, weights=nobody, each=()))
            return cast("Tensor", alone.sums), cast("Tensor", alone.losses), points[:, self.d :]
        gradients = [points[:0, : self.d]]
        losses = [points.new_zeros(0)]
        moved = [points[:0, self.d :]]
        for point, part in zip(points, question.own, strict=True):
            with self._at(point):
                g = self._own[part].gradients(point[: self.d], question.step, {})
                gradients.append(g.own[None])
                losses.append(torch.as_tensor(g.own_loss).reshape(1).to(points))
                moved.append(self._moved()[None])
        return torch.cat(gradients), torch.cat(losses), torch.cat(moved)

    def _on_all(self, question: Question) -> Tensor:
        """Return user 0's gradients at the first points, on all examples of the parts that judge there."""
        if self._here is not None:
            return self._here._on_all(question)
        gradients = torch.zeros_like(question.points[: len(question.each), : self.d])
        for point, part, total in zip(question.points, question.each, gradients, strict=False):
            engine = self._own[part]
            user = engine.users[engine.me]
            with self._at(point):
                for indices in _chunks(len(user)):
                    gradient, _ = engine.on(user.name, point[: self.d], indices, question.step)
                    total.add_(gradient, alpha=len(indices) / len(user))
        return gradients

    def _shown(self, ours: Tensor, step: int) -> Tensor:
        """Return user 0's gradients in the form in which peers show theirs."""
        size = self.engine.capabilities.sketch
        return (
            ours if size is None else Sketch(self.d, size, sketch_key(self.user.seed, step))(ours)
        )

    def _asked_one_by_one(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers at one point after the other, once user 0 has its gradients."""
        points = question.points[: len(question.weights)]
        weights = question.weights
        step = question.step
        judged = len(question.each)

        def answers() -> Answers:
            rows, left_out = self._rows(points[:judged], step)
            sums, answered = torch.zeros_like(points[:, : self.d]), points.new_zeros(len(points))
            sums[:judged], answered[:judged] = combined(rows, weights[:judged].to(rows))
            for row, (point, point_weights) in enumerate(
                zip(points, weights.tolist(), strict=True)
            ):
                asked = {
                    name: weight
                    for name, weight in zip(self.names, point_weights, strict=True)
                    if weight
                }
                if row >= judged and point.isfinite().all():
                    with self._at(point):
                        g = self.engine.gradients(point[: self.d], step, asked)
                    left_out.update(g.left_out)
                    if g.peers is not None and g.answered:
                        sums[row], answered[row] = g.peers - (1 - g.answered) * g.own, g.answered
            return Answers(sums, answered, left_out, rows if judged else None)

        return answers

    def _rows(self, points: Tensor, step: int) -> tuple[Tensor, dict[str, str]]:
        """Return each peer's gradient at each point, (R, N, d), and those left out.

        Their rows are not numbers.
        """
        rows = points.new_full((len(points), len(self.names), self.d), torch.nan)
        left_out = dict[str, str]()
        equal = dict.fromkeys(self.names, 1 / len(self.names))
        for point, to in zip(points, rows, strict=True):
            if point.isfinite().all():
                with self._at(point):
                    g = self.engine.gradients(point[: self.d], step, equal, rows=True)
                left_out.update(g.left_out)
                if g.rows is not None and len(g.rows):
                    to[[self.names.index(name) for name in g.names]] = g.rows
        return rows, left_out

    def _asked_at_points(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers in one exchange at the points that are finite and where anybody is asked.

        Where they show sketches only, these come beside sums at all points; else rows come, and
        sums are made here.
        """
        weights = question.weights
        judged = len(question.each)
        size = self.engine.capabilities.sketch
        points = question.points[: len(weights)]
        asked = weights.masked_fill(weights == 0, math.nan)
        asked[:judged] = weights[:judged]
        usable = points.isfinite().all(1)
        rows, sketched = bool(judged) and size is None, int(usable[:judged].sum()) if size else 0
        wanted = asked[usable]
        waiting: Callable[[], Answers] | None = None
        if isinstance(self.engine, Asks) and not wanted.isnan().all():
            sent = points[usable]
            buffers = self._buffers(sent) if self._carried else {}
            sending = Question(sent[:, : self.d], question.step, wanted, rows, sketched, buffers)
            waiting = self.engine.ask(sending)

        def answers() -> Answers:
            found = None if waiting is None else waiting()
            sums, answered = torch.zeros_like(points[:, : self.d]), points.new_zeros(len(points))
            left_out = {} if found is None else found.left_out
            shown = (
                points.new_full((judged, len(self.names), size or self.d), math.nan)
                if judged
                else None
            )
            refused = None
            if found is not None and found.rows is not None and shown is not None:
                every = points.new_full((len(points), len(self.names), self.d), math.nan)
                every[usable] = found.rows
                shown.copy_(every[:judged])
                sums, answered = combined(every, weights.to(every))
            elif found is not None and found.sums is not None:
                sums[usable], answered[usable] = found.sums, found.answered.to(answered)
                if found.sketches is not None and shown is not None:
                    shown[usable[:judged]] = found.sketches
                if found.refused is not None:
                    refused = torch.zeros(len(points), len(self.names), dtype=torch.bool)
                    refused[usable.cpu()] = found.refused
            return Answers(sums, answered, left_out, shown, refused=refused)

        return answers

    def _buffers(self, points: Tensor) -> dict[str, Tensor]:
        """Return the model's buffers at each point, where points have some of their own."""
        held = []
        for point in points:
            with self._at(point):
                held.append([buffer.clone() for buffer in self.user.model.buffers()])
        names = (name for name, _ in self.user.model.named_buffers())
        return {name: torch.stack(each) for name, *each in zip(names, *held, strict=True)}

    def losses(self, points: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each example at each point, of shape (R, n), in evaluation mode."""
        if self._here is not None:
            return self._here.losses(points, examples)
        by_point = []
        for point in points:
            self._set(self._model, point)
            by_point.append(example_losses(self._model, self.user.loss, examples))
        return torch.stack(by_point)

    def outputs(self, points: Tensor, examples: Examples) -> Tensor | None:
        """Return the outputs at each point for each example, (R, n, …), in evaluation mode.

        None where a model does not give one tensor with a row for each.
        """
        if self._here is not None:
            return self._here.outputs(points, examples)
        by_point = []
        for point in points:
            self._set(self._model, point)
            whole = whole_of(outputs_on(self._model, examples))
            output = None if whole is None else whole[0]
            if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(examples):
                return None
            by_point.append(output)
        return torch.stack(by_point)

    def model_at(self, point: Tensor) -> nn.Module:
        """Return the model at a point, whose numbers its parameters share."""
        model = copied(self.user.model, x=point[: self.d])
        self._load(model, point[self.d :])
        return model

    def serve(self, point: Tensor) -> None:
        """Give the model's parameters and buffers the values of a point."""
        self._set(self.user.model, point)

    def _set(self, model: nn.Module, point: Tensor) -> None:
        Parameters(model).load(point[: self.d])
        self._load(model, point[self.d :])

    def _moved(self) -> Tensor:
        like = next(self.user.model.parameters())
        return torch.cat(
            [like.new_empty(0), *(b.reshape(-1).to(like) for b in self._held_by(self.user.model))]
        )

    @contextmanager
    def _at(self, point: Tensor) -> Iterator[None]:
        """Let the model have a point's buffers, and restore those it had afterwards."""
        if not self._carried:
            yield
            return
        before = self._moved()
        self._load(self.user.model, point[self.d :])
        try:
            yield
        finally:
            self._load(self.user.model, before)

    def _load(self, model: nn.Module, values: Tensor) -> None:
        buffers = self._held_by(model)
        for buffer, piece in zip(
            buffers, torch.split(values, [b.numel() for b in buffers]), strict=True
        ):
            buffer.copy_((piece if buffer.is_floating_point() else piece.round()).view_as(buffer))

    def _held_by(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers of a model that points have of their own."""
        held = dict(model.named_buffers()) if self._carried else {}
        return [held[name] for name in self._carried]


class StackedGradients(GradientsAtPoints):
    """The same to rounding, by one operator over all points and users in this process."""

    engine: Stackable
    why_not_captured = None

    def __init__(self, engine: Stackable, user: OwnUser, parts: Tensor) -> None:
        super().__init__(engine, user, parts)
        self.copies = engine.copies()
        me, peers = engine.users[user.me.name], [engine.users[name] for name in engine.names]
        self._pool = ExamplePool([me, *peers], Parameters(user.model).device)
        size, seed = user.batch_size, user.seed
        columns = [self._pool.stream(me, size, seed, part) for part in parts]
        self._stacked = StackedSums(
            self.copies,
            self._pool,
            [*columns, *(self._pool.stream(peer, size, seed) for peer in peers)],
        )
        self._whole: StackedSums | None = None
        # the columns that a captured step passes over
        self._every: dict[tuple[int, ...], Tensor] = {}
        self.nobody = self._stacked.like.new_zeros(0, 0)
        self._held: dict[int, InMemory] = {}

    def _carried_buffers(self) -> list[str]:
        return []  # a model that moves any is not stackable

    def ask(self, question: Question) -> Answers:
        """Return what the operator gives.

        Where a sum of the peers is not finite, those are found who spoil it.
        """
        points, weights, step = question.points, question.weights, question.step
        drawn, asked, judged = self._stacked.drawn(step), len(weights), len(question.each)
        own = tuple(question.own)
        sums, losses = self._stacked.sums(points, weights, drawn, own, into=question.into)
        answered, left_out, evidence = weights.sum(1), dict[str, str](), None
        if judged and self.sketched:
            evidence = self._sketches(question, self.sketched, drawn, left_out)
        elif judged:
            peer_rows = self._each(
                points[:judged], drawn, left_out, torch.ones_like(weights[:judged])
            )
            evidence = PeerEvidence(peer_rows, self._on_all(question))
        if not is_finite(sums[:asked]):
            answered = torch.zeros_like(answered)
            for row, some in self._in_parts(asked):
                at, given = slice(row.start, row.stop), weights[row][:, some]
                rows = self._each(points[at], drawn, left_out, given, some)
                fresh, there = combined(rows, given)
                sums[at] = fresh if not some.start else sums[at] + fresh
                answered[at] += there
        return Answers(
            sums,
            answered,
            left_out,
            losses=losses[asked:],
            buffers=points[asked:, self.d :],
            judged=evidence,
        )

    def block(self, step: int) -> Tensor:
        """Return the examples that all columns draw in the next steps, a row for each step."""
        return self._stacked.block(step)

    def on(self, question: Question, drawn: Tensor) -> Answers:
        """Return answers on the examples drawn, finite or not.

        Every peer is passed over, whatever its weight.
        """
        weights, own = question.weights, tuple(question.own)
        key, asked = (len(weights), *own), len(weights)
        if key not in self._every:
            self._every[key] = self._stacked.joined(torch.ones_like(weights), own)
        whole = self._stacked.joined(weights, own)
        sums, losses = self._stacked.sums(question.points, whole, drawn, asked=self._every[key])
        return Answers(
            sums, weights.sum(1), {}, losses=losses[asked:], buffers=sums[asked:, self.d :]
        )

    def _in_parts(self, points: int) -> list[tuple[slice, slice]]:
        """Return the points and the peers whose gradients are held at once: all but for large models."""
        every = slice(0, len(self.names))
        if self.sketched is None:
            return [(slice(0, points), every)]
        most = max(1, HELD // self.d)
        some = [slice(k, min(k + most, every.stop)) for k in range(0, every.stop, most)]
        return [(slice(row, row + 1), each) for row in range(points) for each in some]

    def _sketches(
        self, question: Question, size: int, drawn: Tensor, left_out: dict[str, str]
    ) -> PeerEvidence:
        """Return sketches of each peer's gradients, and of user 0's, of which few are held at once."""
        points, key = question.points, sketch_key(self.user.seed, question.step)
        judged = len(question.each)
        theirs = points.new_empty(judged, len(self.names), size)
        ours = points.new_empty(judged, size)
        asked = points.new_ones(1, len(self.names))
        for row, some in self._in_parts(judged):
            rows = self._each(points[row], drawn, left_out, asked[:, some], some)
            theirs[row, some] = sketched(rows, size, key)
            del rows  # before the next are held
        for place, part in enumerate(question.each):
            alone = replace(question, points=points[place : place + 1], each=[part])
            ours[place] = sketched(self._on_all(alone), size, key)[0]
        return PeerEvidence(theirs, ours)

    def _each(
        self,
        points: Tensor,
        drawn: Tensor,
        left_out: dict[str, str],
        asked: Tensor,
        some: slice = slice(None),
    ) -> Tensor:
        """Return the gradient of each peer, or of some, at each point.

        Note who gives none where it is asked at a finite point.
        """
        parts, names = len(self.parts), self.names[some]
        columns = range(parts, parts + len(self.names))[some]
        rows = self._stacked.rows(points, columns, drawn)
        usable = finite_rows(points)
        lost = ((asked != 0) & ~finite_rows(rows))[usable].any(0).tolist()
        rows[~usable] = torch.nan
        left_out |= {name: "not finite" for name, one in zip(names, lost, strict=True) if one}
        return rows

    def _on_all(self, question: Question) -> Tensor:
        if self._whole is None:
            me = self.engine.users[self.user.me.name]
            columns = [self._pool.stream(me, len(me), 0, part) for part in self.parts]
            self._whole = StackedSums(self.copies, self._pool, columns)
        judged, drawn = tuple(question.each), self._whole.drawn(0)
        return self._whole.sums(question.points[: len(judged)], self.nobody, drawn, judged)[0]

    def losses(self, points: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each example at each point; see `GradientsAtPoints.losses`."""
        if not isinstance(examples, InMemory):
            return super().losses(points, examples)
        held, batch = self._batch(points, examples)
        chunks = torch.split(points, self.copies.max_copies(held.inputs, len(held)))
        each = [self.copies.losses(x[None], *batch)[0] for x in chunks]
        return torch.cat(each).double().cpu()

    def outputs(self, points: Tensor, examples: Examples) -> Tensor | None:
        """Return the outputs at each point for each example; see `GradientsAtPoints.outputs`."""
        if not isinstance(examples, InMemory):
            return super().outputs(points, examples)
        held, batch = self._batch(points, examples)
        chunks = torch.split(points, self.copies.max_copies(held.inputs, len(held)))
        each = [self.copies.outputs(x[None], batch[0]) for x in chunks]
        ok = all(
            isinstance(one, Tensor) and one.ndim > 2 and one.shape[2] == len(held) for one in each
        )
        return torch.cat([one[0] for one in each]) if ok else None

    def _batch(self, points: Tensor, examples: InMemory) -> tuple[InMemory, tuple[Tree, Tree]]:
        """Return examples where the points are, and as the batch of one group."""
        held = self._held.setdefault(id(examples), examples.to(points.device))
        alone = (mapped(lambda leaf: leaf[None], tree) for tree in (held.inputs, held.targets))
        return held, (next(alone), next(alone))


def _chunks(n: int) -> list[Tensor]:
    """Return n indices, 1,024 at a time.

    A last one by itself, which BatchNorm does not take, goes with others.
    """
    chunks = list(torch.split(torch.arange(n), 1024))
    return chunks if n < 2 or len(chunks[-1]) > 1 else [*chunks[:-2], torch.cat(chunks[-2:])]


def part_of(user: User, kept: Tensor) -> User:
    """Return a user with some of its examples only, and the same name."""
    indices, part = kept.cpu().nonzero().flatten(), copy.copy(user)
    if isinstance(user.examples, FromDataset):
        part.examples = replace(
            user.examples, dataset=Subset(user.examples.dataset, indices.tolist())
        )
    elif isinstance(user.examples, InMemory):
        part.examples = InMemory(*user.examples.take(indices))
    return part
