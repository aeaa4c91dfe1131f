"""What many runs do at once: answers, rules and steps as rows of one matrix, and passes over validation sets."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.engines.engine import Answers, Question
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.stacked_sums import ExamplePool, StackedSums
from coterie.errors import attributing_errors_to
from coterie.evaluation.evaluate import scores
from coterie.evaluation.losses import PerExample, on_device
from coterie.gradients.gradients import Gradients
from coterie.gradients.norm_bound import NormBound
from coterie.gradients.parameters import finite_rows
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.rules.rule import FormulaRule, State, knob_names
from coterie.training.loop import OngoingRun
from coterie.users.examples import InMemory
from coterie.users.sampling import BatchStream
from coterie.users.trees import mapped

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
        by_learner = zip(
            asked.items(),
            torch.split(sums, counts),
            torch.split(losses, counts),
            torch.split(finite_rows(sums), counts),
            strict=True,
        )
        answers: dict[Learner, Answers | None] = {}
        for (learner, question), mine, loss, finite in by_learner:
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

    def scores(self) -> dict[OngoingRun, Callable[[], Mapping[str, float]]]:
        """Return what scores every run whose validation set is in memory; losses are left with the guards."""
        x = torch.stack([learner.x for _, learner in self._rows])
        of_runs: dict[OngoingRun, Callable[[], Mapping[str, float]]] = {}
        for held, rows in self._sets.values():
            targets = mapped(Tensor.cpu, held.targets)
            inputs = mapped(lambda leaf: leaf[None], held.inputs)
            most = self._copies.max_copies(held.inputs, len(held))
            for chunk in torch.split(torch.tensor(rows), most):
                outputs = self._copies.outputs(x[chunk.to(x.device)][None], inputs)
                outputs = mapped(Tensor.cpu, outputs)
                for place, row in enumerate(chunk.tolist()):
                    run, learner = self._rows[row]
                    pair = mapped(itemgetter((0, place)), outputs), targets
                    if run.guard is not None and self._loss is not None:
                        run.guard.known[learner.model] = self._loss.by_example(*pair).double()
                    if learner is run.learner:
                        loss = on_device(run.spec.loss, HOST)
                        of_runs[run] = partial(scores, *pair, loss, run.spec.metrics)
        return of_runs


class StackedRules:
    """The rules of many runs by number, in the order of the rows of x (R, d).

    All peers answer in every step.
    """

    def __init__(self, rules: Mapping[int, FormulaRule], x: Tensor) -> None:
        kinds: dict[Hashable, list[int]] = {}
        for row, rule in enumerate(rules.values()):
            kinds.setdefault(_kind(rule), []).append(row)
        self._numbers: Tensor | None = None  # the knobs of the last step
        runs, each = list(rules), list(rules.values())
        self._groups = [_Group([each[row] for row in rows], rows, x) for rows in kinds.values()]
        places = (
            (group, *pair) for group in self._groups for pair in enumerate(group.rows.tolist())
        )
        self._places = {runs[row]: (group, place) for group, place, row in places}

    def directions(self, own: Tensor, peers: Tensor, numbers: Tensor) -> Tensor:
        """Return the direction of each run by the knobs in `numbers`, those of `numbers_at`.

        The rules remember what they remember; `taken` counts the step.
        """
        if numbers is not self._numbers:
            sizes = [len(group.names) * len(group.rows) for group in self._groups]
            for group, knobs in zip(self._groups, torch.split(numbers, sizes), strict=True):
                group.set_knobs(knobs)
            self._numbers = numbers
        if len(self._groups) == 1:
            return self._groups[0].directions(own, peers)
        directions = torch.empty_like(own)
        for group in self._groups:
            rows = group.rows
            of_group = group.directions(own.index_select(0, rows), peers.index_select(0, rows))
            directions.index_copy_(0, rows, of_group)
        return directions

    def repeats(self) -> bool:
        """Say whether the next step is the same work as those after it."""
        return all(group.rule.repeats(group.state) for group in self._groups)

    def numbers_at(self, step: int) -> list[float]:
        """Return the knobs of all runs at a step."""
        return [value for group in self._groups for value in group.numbers_at(step)]

    def taken(self, n: int) -> None:
        """Count n steps."""
        for group in self._groups:
            group.taken(n)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors in the rules' states."""
        return [group.state[name] for group in self._groups for name in group.rule.memory]

    def state(self, run: int) -> State:
        """Return the state of a run's rule."""
        group, place = self._places[run]
        tensors = {name: group.state[name][place].clone() for name in group.rule.memory}
        return {**group.plain(place), **tensors}


class _Group:
    """Runs whose rules differ in knobs and in the peers' weights only."""

    def __init__(self, rules: Sequence[FormulaRule], rows: Sequence[int], x: Tensor) -> None:
        self.rows, self.rule, self.x = torch.tensor(rows, device=x.device), rules[0], x
        self.names = knob_names(self.rule)
        settings = [tuple(getattr(rule, name) for name in self.names) for rule in rules]
        distinct = list(dict.fromkeys(settings))
        self.which = [distinct.index(setting) for setting in settings]
        self.distinct = [rules[settings.index(setting)] for setting in distinct]
        self.state = self.rule.init(x[self.rows])
        plain = {name: value for name, value in self.state.items() if name not in self.rule.memory}
        self.plains = [plain] * len(distinct)
        self._ahead = 0, self.plains  # at some step, the plain parts
        self._with_knobs: Any = self.rule

    def numbers_at(self, step: int) -> list[float]:
        """Return the knobs at a step: of all runs, one knob after the other."""
        after = [
            rule.next_knobs(plain)
            for rule, plain in zip(self.distinct, self._plains_at(step), strict=True)
        ]
        self._ahead = step + 1, [plain for _, plain in after]
        return [after[place][0][name] for name in self.names for place in self.which]

    def _plains_at(self, step: int) -> list[State]:
        """Return the plain parts of the states before a step that is to come."""
        at, plains = (
            self._ahead if self._ahead[0] <= step else (self.plains[0]["step"], self.plains)
        )
        for _ in range(at, step):
            plains = [
                rule.next_knobs(plain)[1] for rule, plain in zip(self.distinct, plains, strict=True)
            ]
        self._ahead = step, plains
        return plains

    def set_knobs(self, numbers: Tensor) -> None:
        """Let the next steps use these knobs."""
        columns = numbers.view(len(self.names), len(self.rows), 1)
        self._with_knobs = self.rule.with_knobs(dict(zip(self.names, columns, strict=True)))

    def directions(self, own: Tensor, peers: Tensor) -> Tensor:
        """Return the directions of these runs; the state's tensors stay where they are."""
        direction, state = self._with_knobs(Gradients(own, peers), self.state)
        for name in self.rule.memory:
            if state[name] is not self.state[name]:
                self.state[name].copy_(state[name])
        return direction  # type: ignore[no-any-return]

    def taken(self, n: int) -> None:
        """Count n steps."""
        self.plains = self._plains_at(self.plains[0]["step"] + n)
        # the numbers that a step depends on are the same in all runs
        self.state = {**self.state, **self.plains[0]}

    def plain(self, place: int) -> State:
        """Return the plain part of a run's state."""
        return self.plains[self.which[place]]


def _kind(rule: FormulaRule) -> Hashable:
    """Return what rules must have in common to be called together.

    The type, and all but knobs and weights.
    """
    apart = {*knob_names(rule), "tau"}
    values = [getattr(rule, field.name) for field in fields(rule) if field.name not in apart]  # type: ignore[arg-type]
    return type(rule), tuple(
        value if isinstance(value, Hashable) else id(value) for value in values
    )


class Program:
    """Many runs of one model and loss, all taking a step at a time.

    The runs are prepared, each with its rule; those of one setting of the optimizer come one after
    the other. The stack holds their parameters in that order.
    """

    def __init__(self, copies: Copies, specs: Sequence[RunSpec], stack: Stack) -> None:
        self.copies, self.stack, self.step = copies, stack, 0
        device, needs = stack.x.device, list[dict[BatchStream, float]]()
        pool = ExamplePool((user for spec in specs for user in (spec.me, *spec.peers)), device)
        asking = []
        for run, spec in enumerate(specs):
            needs.insert(run, {pool.stream(spec.me, spec.batch_size, spec.seed): 1.0})
            tau = spec.rule.weights([peer.name for peer in spec.peers])
            asked = [user for user in spec.peers if user.name in tau]
            if asked:
                asking.append(run)
                needs.append(
                    {pool.stream(u, spec.batch_size, spec.seed): tau[u.name] for u in asked}
                )
        columns = {
            stream: column
            for column, stream in enumerate(dict.fromkeys(s for need in needs for s in need))
        }
        self._stacked = StackedSums(copies, pool, list(columns))
        self._weights = stack.x.new_zeros(len(needs), len(columns))
        for row, need in zip(self._weights, needs, strict=True):
            row[[columns[stream] for stream in need]] = row.new_tensor(list(need.values()))
        self._origins = torch.tensor([*range(len(specs)), *asking], device=device)
        self._asking = torch.tensor(asking, device=device) if asking else None
        rules = {run: specs[run].rule for run in asking}
        self._rules = StackedRules(rules, stack.x[asking])
        self._knobs: tuple[list[float], Tensor] = [], stack.x.new_zeros(0)  # of the last step
        self._asks = set(asking)
        factors = [specs[run].norm_bound or torch.inf for run in asking]
        self._bound = NormBound(stack.x.new_tensor(factors), stack.x[asking])
        self.own_loss = stack.x.new_zeros(len(specs), dtype=torch.float64)  # in the last step
        # added up; whoever reads them sets them to zero
        self.losses = torch.zeros_like(self.own_loss)
        self._sums = stack.x.new_zeros(len(specs))
        self.stacks, self._steps = (stack,), Steps()

    def advance(self) -> None:
        """Take one step in every run."""
        numbers = self._rules.numbers_at(self.step)
        if numbers != self._knobs[0]:
            self._knobs = numbers, self.stack.x.new_tensor(numbers)
        losses = self.directions([self._stacked.drawn(self.step)], self._knobs[1])
        with attributing_errors_to("the optimizer"):
            self._steps.take(self.stacks)
        self.taken(1, losses.unsqueeze(0))

    def directions(self, drawn: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """Write the direction of every run by what is drawn and by its knobs; return the own losses."""
        direction, runs = self.stack.direction, len(self.stack.x)
        sums, losses = self._stacked.sums(
            self.stack.x, self._weights, drawn[0], origins=self._origins
        )
        direction.copy_(sums[:runs])
        if self._asking is not None:
            own, peers = direction.index_select(0, self._asking), sums[runs:]
            direction.index_copy_(0, self._asking, self._rules.directions(own, peers, numbers))
            too_long = self._bound.long_sums(own, peers)
            self._sums.index_add_(
                0, self._asking, torch.zeros_like(own[:, 0]).masked_fill_(too_long, torch.nan)
            )
        self._sums += direction.sum(1)
        return losses[:runs].double()

    @property
    def held(self) -> list[Tensor]:
        """What a step reads and changes beside the parameters; see `learners.blocks`."""
        return [self._sums, self._bound.longest, *self._rules.memory]

    drawn_for = ()

    def repeats(self) -> int:
        """Return how many of the next steps are the same work.

        All, once the optimizers have their state.
        """
        return sys.maxsize if self.step and self._rules.repeats() else 0

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples that are drawn in this step and some after it."""
        return [self._stacked.block(step)]

    def numbers(self, step: int) -> list[float]:
        """Return the knobs of all runs at a step."""
        return self._rules.numbers_at(step)

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps, whose own losses are the rows of `losses`."""
        self.own_loss = losses[-1].to(self.own_loss)
        self.losses += losses.sum(0).to(self.losses)
        self._rules.taken(n)
        self.step += n

    def failed(self) -> list[bool]:
        """Say of each run whether a gradient was not finite, or too long, so that its parameters are of no use."""
        # A finite sum has finite terms, and no knob hides what is not finite: 0 · ∞ is not a
        # number.
        return (~self._sums.isfinite()).tolist()

    def state(self, run: int) -> State:
        """Return the state of a run's rule after the last step."""
        return self._rules.state(run) if run in self._asks else {"step": self.step, "weight": 0.0}
