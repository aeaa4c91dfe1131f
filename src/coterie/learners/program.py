"""Many runs as one program.

A pass over the own batches of all, one over the peers', then the rules of all.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.stacked_sums import ExamplePool, StackedSums
from coterie.gradients.gradients import Gradients
from coterie.gradients.norm_bound import NormBound
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.rules.rule import FormulaRule, State, knob_names
from coterie.users.sampling import BatchStream

Call: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Directions from own gradients and the peers' sums."""


class StackedRules:
    """The rules of many runs by number, in the order of the rows of x (R, d).

    All peers answer in every step.
    """

    def __init__(self, rules: Mapping[int, FormulaRule], x: Tensor) -> None:
        kinds: dict[Hashable, list[int]] = {}
        for row, rule in enumerate(rules.values()):
            kinds.setdefault(_kind(rule), []).append(row)
        runs, each = list(rules), list(rules.values())
        self._groups = [_Group([each[row] for row in rows], rows, x) for rows in kinds.values()]
        places = (
            (group, *pair) for group in self._groups for pair in enumerate(group.rows.tolist())
        )
        self._places = {runs[row]: (group, place) for group, place, row in places}

    def __call__(self, own: Tensor, peers: Tensor) -> Tensor:
        """Return the direction of each run, and remember the state of its rule."""
        return self._directions(own, peers, self._groups)

    def repeat(self, own: Tensor, peers: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Return the direction of each run by the knobs in `numbers`, those of `numbers_at`.

        `taken` counts it.
        """
        calls, first = [], 0
        for group in self._groups:
            last = first + len(group.names) * len(group.rows)
            calls.append(partial(group.repeat, numbers=numbers[first:last]))
            first = last
        return self._directions(own, peers, calls)

    def repeats(self) -> bool:
        """Say whether the next step is the same work as those after it."""
        return all(group.rule.repeats(group.state) for group in self._groups)

    def numbers_at(self, step: int) -> list[float]:
        """Return the knobs of all runs at a step."""
        return [value for group in self._groups for value in group.numbers_at(step)]

    def taken(self, n: int) -> None:
        """Count n steps that were taken by `repeat`."""
        for group in self._groups:
            group.taken(n)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors in the rules' states."""
        return [group.state[name] for group in self._groups for name in group.rule.memory]

    def _directions(
        self, own: Tensor, peers: Tensor, calls: Sequence[Callable[[Tensor, Tensor], Tensor]]
    ) -> Tensor:
        if len(self._groups) == 1:
            return calls[0](own, peers)
        directions = torch.empty_like(own)
        for group, call in zip(self._groups, calls, strict=True):
            some = call(own.index_select(0, group.rows), peers.index_select(0, group.rows))
            directions.index_copy_(0, group.rows, some)
        return directions

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        group, place = self._places[run]
        return float(group.plain(place)["weight"])

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
        self.values: list[dict[str, float]] = []
        self.stacked: Any = self.rule

    def __call__(self, own: Tensor, peers: Tensor) -> Tensor:
        """Return the directions of these runs."""
        following = [
            rule.next_knobs(plain) for rule, plain in zip(self.distinct, self.plains, strict=True)
        ]
        values = [numbers for numbers, _ in following]
        if values != self.values:
            columns = {name: [values[place][name] for place in self.which] for name in self.names}
            knobs = {
                name: self.x.new_tensor(column).unsqueeze(1) for name, column in columns.items()
            }
            self.values, self.stacked = values, self.rule.with_knobs(knobs)
        direction, state = self.stacked(Gradients(own, peers), self.state)
        self.plains = [plain for _, plain in following]
        self._ahead = self.plains[0]["step"], self.plains
        # the numbers that a step depends on are the same in all runs
        self.state = {**state, **self.plains[0]}
        return direction  # type: ignore[no-any-return]

    def numbers_at(self, step: int) -> list[float]:
        """Return the knobs at a step: of all runs, one knob after the other."""
        pairs = zip(self.distinct, self._plains_at(step), strict=True)
        values = [rule.next_knobs(plain)[0] for rule, plain in pairs]
        return [values[place][name] for name in self.names for place in self.which]

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

    def repeat(self, own: Tensor, peers: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Return the directions by the knobs in `numbers`.

        The state's tensors stay where they are.
        """
        columns = torch.stack(list(numbers)).view(len(self.names), -1, 1) if numbers else ()
        rule = self.rule.with_knobs(dict(zip(self.names, columns, strict=True)))
        direction, state = rule(Gradients(own, peers), self.state)
        for name in self.rule.memory:
            if state[name] is not self.state[name]:
                self.state[name].copy_(state[name])
        return direction

    def taken(self, n: int) -> None:
        """Count n steps."""
        self.plains = self._plains_at(self.plains[0]["step"] + n)
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
        self.own_loss = self._directions(self._stacked.drawn(self.step), self._rules)
        self.losses += self.own_loss
        self._steps.take(self.stacks)
        self.step += 1

    def _directions(self, drawn: Tensor, rules: Call) -> Tensor:
        """Write the direction of every run, and return the own losses."""
        direction, runs = self.stack.direction, len(self.stack.x)
        sums, losses = self._stacked.sums(self.stack.x, self._weights, drawn, origins=self._origins)
        direction.copy_(sums[:runs])
        if self._asking is not None:
            own, theirs = direction.index_select(0, self._asking), sums[runs:]
            direction.index_copy_(0, self._asking, rules(own, theirs))
            too_long = self._bound.long_sums(own, theirs)
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

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the direction of every run by what is drawn; return the own losses."""
        return self._directions(drawn[0], partial(self._rules.repeat, numbers=numbers))

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps of a block."""
        self.own_loss = losses[-1].to(self.own_loss)
        self.losses += losses.sum(0).to(self.losses)
        self._rules.taken(n)
        self.step += n

    def failed(self) -> list[bool]:
        """Say of each run whether a gradient was not finite, or too long, so that its parameters are of no use."""
        # A finite sum has finite terms, and no knob hides what is not finite: 0 · ∞ is not a
        # number.
        return (~self._sums.isfinite()).tolist()

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        return self._rules.weight(run) if run in self._asks else 0.0

    def state(self, run: int) -> State:
        """Return the state of a run's rule after the last step."""
        return self._rules.state(run) if run in self._asks else {"step": self.step, "weight": 0.0}
