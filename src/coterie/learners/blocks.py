"""Blocks of steps of many copies or runs.

What is known beforehand lies in tables, the rest is the same work.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.learners.learner import Learner
from coterie.learners.stack import Stack


class Block(Protocol):
    """The next steps of something, to be taken one after the other by the same work.

    See `training.captured`.
    """

    device: torch.device
    total: Tensor  # of all directions in the block: not finite if a gradient is not

    @property
    def at(self) -> int:
        """The step that comes next."""

    def known(self, most: int) -> int:
        """Return for how many of the next steps, at most `most`, the tables can hold what they need."""

    def fill(self, n: int) -> None:
        """Put what n steps need in the tables."""

    def step(self, taken: int) -> None:
        """Take one step by its row of the tables; `taken` steps of the block were taken before."""

    def draw_ahead(self, n: int) -> None:
        """Draw what the tables will hold next, while the device is at work on n steps."""

    def count(self, n: int) -> list[float]:
        """Let it be known that n steps were taken; return user 0's loss in each."""

    def save(self) -> Callable[[], None]:
        """Save what a block of steps changes, and return what undoes the block."""

    def signature(self) -> object:
        """Return what must stay the same for a graph to be used again."""


class Repeats(Protocol):
    """What steps stacks of parameters by the same work, but for examples and numbers that are known beforehand."""

    @property
    def step(self) -> int:
        """The step that comes next."""

    @property
    def stacks(self) -> Sequence[Stack]:
        """The parameters."""

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

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the stacks' directions by one row of what is drawn.

        Return the own losses, one or many.
        """

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps, whose own losses are the rows of `losses`."""


@runtime_checkable
class TakesBlocks(Protocol):
    """What a learner follows, where that says how the learner's steps are taken in blocks."""

    def block(self, learner: Learner) -> Block | str:
        """Return the learner's steps as a block, or why they cannot be taken so."""


class StackBlock:
    """The next steps of stacks of parameters.

    Rows of indices of examples, and of numbers and step sizes.

    `undone`: a block in which a direction is not finite is undone. Many runs go on without the one
    that it is of.
    """

    def __init__(self, learner: Repeats, *, undone: bool = True) -> None:
        self.learner, x, self.undone = learner, learner.stacks[0].x, undone
        self.device = x.device
        # the row of the next step
        self.counter = torch.zeros(1, dtype=torch.long, device=self.device)
        self.total = x.new_zeros(())
        self.indices: list[Tensor] = []
        self.numbers, self.losses = x.new_zeros(0, 0), x.new_zeros(0, 0)
        self.first, self.rows = 0, 0  # the step of the first row, and how many rows there are
        self.next: list[Tensor] | None = None  # the indices after these
        self.rates: list[list[list[float]]] = []  # by step, then stack

    @property
    def at(self) -> int:
        """The step that comes next."""
        return self.learner.step

    def known(self, most: int) -> int:
        """Return for how many of the next steps the tables can hold what they need; see `Block`."""
        same = self.learner.repeats()
        if not same:
            return 0
        if not self.first <= self.at < self.first + self.rows:
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
        numbers, row = (
            torch.tensor(rows, dtype=self.total.dtype).reshape(n, -1),
            learner.step - self.first,
        )
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
        numbers = self.numbers.index_select(0, counter)[0].unbind()
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
            for tensor, value in zip(
                self._changed(), values, strict=True
            ):  # some may have moved to the device
                tensor.copy_(value)
            for stack, schedule in zip(self.learner.stacks, schedules, strict=True):
                stack.load_schedules(schedule)

        return restore

    def signature(self) -> object:
        """Return what must stay the same for a graph to be used again.

        Where tensors are, and numbers in it.
        """
        tensors = (*self._changed(), *self.indices, self.numbers, self.losses)
        return [t.data_ptr() for t in tensors], [
            str(stack.settings()) for stack in self.learner.stacks
        ]

    def _changed(self) -> list[Tensor]:
        return [
            *(tensor for stack in self.learner.stacks for tensor in stack.tensors()),
            *self.learner.held,
        ]

    def _draw(self) -> None:
        """Let the tables hold the examples of the next step."""
        ahead = self.next if self.at == self.first + self.rows else None
        drawn = self.learner.drawn(self.at) if ahead is None else ahead
        self.rows, self.first, self.next = min(map(len, drawn)), self.at, None
        drawn = [table[: self.rows] for table in drawn]
        if [table.shape for table in self.indices] == [table.shape for table in drawn]:
            for table, fresh in zip(self.indices, drawn, strict=True):
                table.copy_(fresh)  # where a graph looks for it
        else:
            self.indices = [table.to(self.device) for table in drawn]
