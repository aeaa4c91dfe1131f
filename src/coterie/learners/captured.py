"""Whole steps as one program: the host waits for the device once a block of steps, not at every step.

A step is the same work every time, except for a few numbers that are known beforehand: which
examples are drawn, the rule's knobs, the step size. They are put in tables for a block of steps.
The rest (batches, passes, rule, optimizer, and the same for the guard's shadow) reads them there:
on a GPU as a captured CUDA graph, on a CPU as it is. After the block the host reads the losses and
whether all gradients were finite. If one was not, the block is undone and its steps are taken one
by one, where peers are left out, counted and reported as usual.
"""

import copy
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coterie.engines.in_process.side_stream import side_stream
from coterie.learners.stack import Stack

WARM_UP = 3
"""How many steps are taken by the program before it is captured, in which libraries set up what they need."""


class CapturableSteps(Protocol):
    """What steps stacks of parameters by the same work, but for examples and numbers that are known beforehand."""

    @property
    def step(self) -> int:
        """The step that comes next."""

    @property
    def stacks(self) -> Sequence[Stack]:
        """The parameters."""

    @property
    def drawn_for(self) -> Hashable:
        """Whose examples are drawn; where that changes, others are drawn."""

    @property
    def held(self) -> Sequence[Tensor]:
        """Other tensors that a step reads or changes.

        They stay where they are while the work is the same.
        """

    def repeats(self) -> int:
        """Return how many of the next steps are the same work; 0 where the next is not."""

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples that each pass draws in this step and some after it, a row for each step."""

    def numbers(self, step: int) -> list[float]:
        """Return the numbers of a step."""

    def directions(self, drawn: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """Write the stacks' directions by one row of what is drawn.

        Return the own losses, one or many.
        """

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps, whose own losses are the rows of `losses`."""


class StackBlock:
    """The next steps of stacks of parameters.

    Rows of indices of examples, and of numbers and step sizes.

    `undone`: a block in which a direction is not finite is undone. Many runs go on without the one
    that it is of.
    """

    def __init__(self, learner: CapturableSteps, *, undone: bool = True) -> None:
        self.learner, x, self.undone = learner, learner.stacks[0].x, undone
        self.device = x.device
        # the row of the next step
        self.counter = torch.zeros(1, dtype=torch.long, device=self.device)
        self.total = x.new_zeros(())
        self.indices: list[Tensor] = []
        self.drawn_for: Hashable = None
        self.numbers, self.losses = x.new_zeros(0, 0), x.new_zeros(0, 0)
        self.first, self.rows = 0, 0  # the step of the first row, and how many rows there are
        self.next: list[Tensor] | None = None  # the indices after these
        self.rates: list[list[list[float]]] = []  # by step, then stack

    @property
    def at(self) -> int:
        """The step that comes next."""
        return self.learner.step

    def known(self, most: int) -> int:
        """Return for how many of the next steps the tables can hold what they need; at most `most`."""
        same = self.learner.repeats()
        if not same:
            return 0
        drawn = self.first <= self.at < self.first + self.rows
        if not drawn or self.drawn_for != self.learner.drawn_for:
            self._draw()
        return min(most, same, self.first + self.rows - self.at)

    def fill(self, n: int) -> None:
        """Put what n steps need in the tables, and let the schedules of step sizes run ahead."""
        learner, rows, self.rates = self.learner, [], []
        for step in range(learner.step, learner.step + n):
            self.rates.append([stack.rates() for stack in learner.stacks])
            rows.append(
                [*learner.numbers(step), *(rate for rates in self.rates[-1] for rate in rates)]
            )
            for stack in learner.stacks:
                stack.schedule()
        numbers = torch.tensor(rows, dtype=self.total.dtype).reshape(n, -1)
        row = learner.step - self.first
        if self.numbers.shape != (self.rows, numbers.shape[1]):
            self.numbers = self.total.new_zeros(self.rows, numbers.shape[1])
        self.numbers[row : row + n].copy_(numbers)
        self.counter.fill_(row)
        self.total.zero_()
        for stack in learner.stacks:
            stack.make_capturable()

    def step(self, taken: int) -> None:
        """Take one step by its row of the tables."""
        learner, counter = self.learner, self.counter
        numbers = self.numbers.index_select(0, counter)[0]
        count = len(numbers) - sum(map(len, self.rates[taken]))
        rows = [table.index_select(0, counter)[0] for table in self.indices]
        losses = learner.directions(rows, numbers[:count])
        if self.losses.shape != (self.rows, losses.numel()):
            self.losses = losses.new_zeros(self.rows, losses.numel())
        self.losses.index_copy_(0, counter, losses.reshape(1, -1))
        at = count
        for stack, rates in zip(learner.stacks, self.rates[taken], strict=True):
            if self.undone:
                self.total.add_(stack.direction.sum())
            stack.optimize(numbers[at : at + len(rates)] if self.device.type == "cuda" else rates)
            at += len(rates)
        counter.add_(1)

    def draw_ahead(self, n: int) -> None:
        """Draw what the tables will hold next, once n steps take longer than that, or it is due after them."""
        end = self.first + self.rows
        if self.next is None and (self.at + n == end or n >= self.rows // 4):
            self.next = self.learner.drawn(end)

    def count(self, n: int) -> list[float]:
        """Let the learner know that it has taken n steps; return the first own loss in each."""
        row = self.at - self.first
        losses = self.losses[row : row + n].cpu()
        self.learner.taken(n, losses)
        return losses[:, 0].tolist()

    def save(self) -> Callable[[], None]:
        """Save what a block of steps changes, and return what undoes the block."""
        values = [tensor.clone() for tensor in self._changed()]
        schedules = [copy.deepcopy(stack.schedules()) for stack in self.learner.stacks]

        def restore() -> None:
            # some may have moved to the device
            for tensor, value in zip(self._changed(), values, strict=True):
                tensor.copy_(value)
            for stack, schedule in zip(self.learner.stacks, schedules, strict=True):
                stack.load_schedules(schedule)

        return restore

    def signature(self) -> object:
        """Return what must stay the same for a graph to be used again.

        Where tensors are, and numbers in it.
        """
        tensors = (*self._changed(), *self.indices, self.numbers, self.losses)
        settings = [str(stack.settings()) for stack in self.learner.stacks]
        return [t.data_ptr() for t in tensors], self.drawn_for, settings

    def _changed(self) -> list[Tensor]:
        return [
            *(tensor for stack in self.learner.stacks for tensor in stack.tensors()),
            *self.learner.held,
        ]

    def _draw(self) -> None:
        """Let the tables hold the examples of the next step."""
        same = self.at == self.first + self.rows and self.drawn_for == self.learner.drawn_for
        ahead = self.next if same else None
        self.drawn_for = self.learner.drawn_for
        drawn = self.learner.drawn(self.at) if ahead is None else ahead
        self.rows, self.first, self.next = min(map(len, drawn)), self.at, None
        drawn = [table[: self.rows] for table in drawn]
        if [table.shape for table in self.indices] == [table.shape for table in drawn]:
            for table, fresh in zip(self.indices, drawn, strict=True):
                table.copy_(fresh)  # where a graph looks for it
        else:
            self.indices = [table.to(self.device) for table in drawn]


class Captured:
    """Blocks of steps, such as those of a learner and of its guard's shadow, taken as one program."""

    def __init__(self, *tables: StackBlock) -> None:
        self.tables = tables
        self.device = tables[0].device
        self.failed: str | None = None  # why a graph could not be captured
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_with: object = None
        self._warm = self._undone = self._careful_until = 0

    def advance(self, most: int) -> list[float] | None:
        """Take at most so many steps and return user 0's loss in each.

        None where the next is no such step.
        """
        step = self.tables[0].at
        wanted = 0 if self.failed or step < self._careful_until else most
        n = min(table.known(wanted) for table in self.tables) if wanted else 0
        if not n:
            return None
        undo = [table.save() for table in self.tables]
        for table in self.tables:
            table.fill(n)
        if self._take(n) and all(math.isfinite(table.total.item()) for table in self.tables):
            losses, *_ = [table.count(n) for table in self.tables]
            return losses
        for restore in undo:
            restore()
        self._careful_until = step + n * 2**self._undone  # a peer may be bad at every step
        self._undone += 1
        return None

    def _take(self, n: int) -> bool:
        """Take n steps, on a GPU by the graph once it is captured; say whether they were taken."""
        alone = n
        # the first step of other work makes what the graph is to find
        if self.device.type == "cuda":
            alone = min(n, max(int(not self._is_captured()), WARM_UP - self._warm))
        for taken in range(alone):
            self._step(taken)
        self._warm += alone
        if alone < n and not self._capture():
            return False
        for _ in range(n - alone):
            self._graph.replay()  # type: ignore[union-attr]  # captured above
        for table in self.tables:
            table.draw_ahead(n)  # while the device is at work
        return True

    def _capture(self) -> bool:
        """Capture the step, where that has not been done yet, and say whether it could be."""
        if self._is_captured():
            return True
        self._graph, now = None, [table.signature() for table in self.tables]
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph):
                self._step(0)
        except RuntimeError as error:
            self.failed = str(error).splitlines()[0]
            warn_not_captured(self.failed)
            return False
        self._graph, self._captured_with = graph, now
        return True

    def _is_captured(self) -> bool:
        """Say whether the graph is that of the next steps' work."""
        now = [table.signature() for table in self.tables]
        return self._graph is not None and self._captured_with == now

    def _step(self, taken: int) -> None:
        """Take one step of every learner, the shadow's on a stream beside the first."""
        first, *others = self.tables
        joins = []
        for table in others:
            with side_stream(self.device) as join:
                table.step(taken)
            joins.append(join)
        first.step(taken)
        for join in joins:
            join()


def warn_not_captured(why: str) -> None:
    """Say that steps are not captured, and why."""
    warnings.warn(
        f"steps are taken one by one, not captured, which is slower: {why}; `capture=False` says"
        " the same",
        stacklevel=5,  # where `train` is called
    )
