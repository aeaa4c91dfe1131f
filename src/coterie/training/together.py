"""What many runs do at once: their questions are answered by one operator, and so are their validation sets passed."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
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
from coterie.learners.spec import RunSpec
from coterie.training.ongoing import OngoingRun
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, mapped

HOST = torch.device("cpu")
"""Where outputs on validation sets are scored."""


class SharedAnswers:
    """The answers to the questions of many learners, from batches that are drawn once for all.

    Runs are prepared, of one model, loss, batch size and seed; their examples are in memory. A
    user's batch as a peer is the same for all others, and the one that it draws for itself.

    `runs` are some of those that `specs` describe, by place.
    """

    def __init__(
        self, copies: Copies, specs: Sequence[RunSpec], runs: Mapping[int, OngoingRun]
    ) -> None:
        users, size, seed = [spec.me for spec in specs], specs[0].batch_size, specs[0].seed
        pool = ExamplePool(users, copies.parameters.device)
        streams = [pool.stream(user, size, seed) for user in users]
        self._names = [user.name for user in users]
        # of a learner's parts, and of its peers
        self._columns: dict[Learner, tuple[list[int], list[int]]] = {}
        for place, run in runs.items():
            for learner in run.learners:
                parts = [place]
                # part 0 is all examples, as others see this user
                if isinstance(learner, AdaptiveLearner):
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


class HeldOutTogether:
    """The validation sets of many runs: models and guards' shadows pass over them together."""

    def __init__(self, copies: Copies, runs: Sequence[OngoingRun]) -> None:
        self._copies, device = copies, copies.parameters.device
        self._rows = [(run, learner) for run in runs for learner in run.learners]
        self._sets: dict[int, tuple[InMemory, list[int]]] = {}
        for row, (run, _) in enumerate(self._rows):
            held_out = run.spec.me.validation
            if isinstance(held_out, InMemory):
                held = self._sets.setdefault(id(held_out), (held_out.to(device), []))
                held[1].append(row)
        loss = copies.passes.per_example
        self._loss = None if loss is None else cast("PerExample", on_device(loss, HOST))

    def outputs(self) -> dict[OngoingRun, tuple[Tree, Tree]]:
        """Return, on the host, outputs and targets of every run whose validation set is in memory.

        Losses are left with the guards.
        """
        x, of_runs = torch.stack([learner.x for _, learner in self._rows]), {}
        for held, rows in self._sets.values():
            targets = mapped(Tensor.cpu, held.targets)
            inputs = mapped(lambda leaf: leaf[None], held.inputs)
            most = self._copies.max_copies(held.inputs, len(held))
            for some in torch.split(torch.tensor(rows), most):
                outputs = self._copies.outputs(x[some.to(x.device)][None], inputs)
                outputs = mapped(Tensor.cpu, outputs)
                for place, row in enumerate(some.tolist()):
                    run, learner = self._rows[row]
                    pair = mapped(itemgetter((0, place)), outputs), targets
                    if run.guard is not None and self._loss is not None:
                        run.guard.known[learner.model] = self._loss.by_example(*pair).double()
                    if learner is run.learner:
                        of_runs[run] = pair
        return of_runs
