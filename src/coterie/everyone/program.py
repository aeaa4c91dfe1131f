"""Everybody's questions answered together.

One operator over all users, and all validation sets at once.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.engines.engine import Answers, Question
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.stacked_sums import ExamplePool, StackedSums
from coterie.evaluation.losses import PerExample, on_device
from coterie.gradients.gradients import finite_rows
from coterie.learners.learner import Learner
from coterie.learners.program import HOST, HeldOut
from coterie.learners.spec import RunSpec
from coterie.training.loop import TrainingLoop
from coterie.users.trees import Tree


class SharedAnswers:
    """The answers to the questions of many learners, from batches that are drawn once for all.

    Runs are prepared, of one model, loss, batch size and seed; their examples are in memory. A
    user's batch as a peer is the same for all others, and the one that it draws for itself.
    """

    def __init__(
        self, copies: Copies, specs: Sequence[RunSpec], loops: Mapping[int, TrainingLoop]
    ) -> None:
        users, size, seed = [spec.me for spec in specs], specs[0].batch_size, specs[0].seed
        pool = ExamplePool(users, copies.parameters.device)
        streams = [pool.stream(user, size, seed) for user in users]
        self._names = [user.name for user in users]
        # of a learner's parts, and of its peers
        self._columns: dict[Learner, tuple[list[int], list[int]]] = {}
        for place, loop in loops.items():
            for learner in learners_of(loop):
                parts = [place]
                if isinstance(
                    learner, AdaptiveLearner
                ):  # part 0 is all examples, as others see this user
                    folds = [
                        pool.stream(users[place], size, seed, part)
                        for part in learner.points.parts[1:]
                    ]
                    parts += range(len(streams), len(streams) + len(folds))
                    streams += folds
                peers = [self._names.index(name) for name in learner.engine.names]
                self._columns[learner] = parts, peers
        self._stacked = StackedSums(copies, pool, streams)
        self._weights: tuple[list[tuple[Tensor, int, tuple[int, ...]]], Tensor] | None = None

    def ask(self, learners: Sequence[Learner]) -> dict[Learner, Answers | None]:
        """Return the answers of the next step; None to a learner that has to ask by itself.

        That is one that asks each peer by itself, or whose peers' gradients are to be looked at one
        by one.
        """
        asked = {learner: learner.question() for learner in learners}
        if any(question.each for question in asked.values()):
            return dict.fromkeys(asked)
        points = torch.cat([question.points for question in asked.values()])
        step = next(iter(asked.values())).step
        sums, losses = self._stacked.sums(points, self._joined(asked), self._stacked.drawn(step))
        counts = [len(question.points) for question in asked.values()]
        given = zip(
            torch.split(sums, counts),
            torch.split(losses, counts),
            torch.split(finite_rows(sums), counts),
            strict=True,
        )
        answers: dict[Learner, Answers | None] = {}
        for (learner, question), (mine, loss, finite) in zip(asked.items(), given, strict=True):
            peers = len(question.weights)
            whole = Answers(
                mine, question.weights.sum(1), {}, losses=loss[peers:], buffers=mine[peers:, :0]
            )
            answers[learner] = whole if bool(finite[:peers].all()) else None
        return answers

    def _joined(self, asked: Mapping[Learner, Question]) -> Tensor:
        """Return the weights of all columns at all points, the same tensor while they stay the same."""
        of_all = [
            (question.weights, question.weights._version, tuple(question.own))
            for question in asked.values()
        ]
        if self._weights is not None and len(self._weights[0]) == len(of_all):
            pairs = zip(self._weights[0], of_all, strict=True)
            if all(old[0] is new[0] and old[1:] == new[1:] for old, new in pairs):
                return self._weights[1]
        rows = []
        for learner, question in asked.items():
            parts, peers = self._columns[learner]
            row = question.weights.new_zeros(len(question.points), len(self._stacked.streams))
            row[: len(question.weights), peers] = question.weights
            row[range(len(question.weights), len(row)), [parts[part] for part in question.own]] = (
                1.0
            )
            rows.append(row)
        self._weights = of_all, torch.cat(rows)
        return self._weights[1]


class EvaluatedTogether:
    """The validation sets of all members: models and guards' shadows pass over them together."""

    def __init__(self, copies: Copies, loops: Mapping[int, TrainingLoop]) -> None:
        self._loops = loops
        self._rows = [
            (place, learner) for place, loop in loops.items() for learner in learners_of(loop)
        ]
        loss, users = copies.passes.per_example, [loops[place].spec.me for place, _ in self._rows]
        self._loss = None if loss is None else cast("PerExample", on_device(loss, HOST))
        self._held_out = HeldOut(copies, users, self._points())

    def _points(self) -> Tensor:
        return torch.stack([learner.x for _, learner in self._rows])

    def outputs(self) -> dict[int, tuple[Tree, Tree]]:
        """Return outputs and targets of every member's model, by place, and leave losses with its guard."""
        by_place = {}
        outputs = self._held_out.outputs(self._points())
        for row, (place, learner) in enumerate(self._rows):
            if row in outputs:
                loop = self._loops[place]
                if loop.guard is not None and self._loss is not None:
                    loop.guard.known[learner.model] = self._loss.by_example(*outputs[row]).double()
                if learner is loop.learner:
                    by_place[place] = outputs[row]
        return by_place


def learners_of(loop: TrainingLoop) -> list[Learner]:
    """Return the learner of a run, and its guard's shadow."""
    return [loop.learner] if loop.guard is None else [loop.learner, loop.guard.shadow]
