"""The steps of one learner.

What is known beforehand lies in tables, the rest is the same work every time.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.engines.capabilities import require
from coterie.errors import blaming
from coterie.learners.capturable import at_rates, make_capturable, settings_of, state_tensors
from coterie.learners.learner import RuleLearner
from coterie.rules import Alone, Capturable, State


class StepTables:
    """The next steps of a learner.

    For each a row of indices of examples, and one of knobs and step sizes.
    """

    def __init__(self, learner: RuleLearner) -> None:
        self.learner, self.engine = learner, require(learner.engine, "capture", "a captured step")
        self.device = learner.x.device
        self.scheduler = (
            None if isinstance(learner.scheduler, ReduceLROnPlateau) else learner.scheduler
        )
        # the row of the next step
        self.counter = torch.zeros(1, dtype=torch.long, device=self.device)
        # of all directions: not finite if a gradient is not, or too long
        self.total = learner.x.new_zeros(())
        self.indices, self.numbers = self.counter.new_zeros(0, 0), learner.x.new_zeros(0, 0)
        self.losses = learner.x.new_zeros(0)
        self.first = -1  # the step of the first row
        self.names: tuple[str, ...] = ("",)  # the peers asked
        self.next: Tensor | None = None  # the indices after these
        self.weights: dict[str, float] = {}
        self.knobs: list[str] = []
        self.rates: list[list[float]] = []
        self.memory: dict[str, Tensor] = {}  # the rule's tensors, which stay where they are
        self.after: State = {}

    @property
    def at(self) -> int:
        """The step that comes next."""
        return self.learner.step

    @property
    def listens(self) -> bool:
        """Whether the peers are asked."""
        return self.learner.step >= self.learner.listens_from

    @property
    def rule(self) -> Capturable:
        """The rule, or that of a learner that listens to nobody for a while."""
        return cast("Capturable", self.learner.rule) if self.listens else Alone()

    def known(self, most: int) -> int:
        """Return for how many of the next steps, at most `most`, the tables can hold what they need."""
        learner = self.learner
        if not learner.step or not self.rule.repeats(learner.state):
            return 0  # in the first step of all an optimizer makes what it remembers
        self.weights = self.rule.weights(self.engine.names)
        self._draw()
        known = min(most, self.first + len(self.indices) - learner.step)
        return known if self.listens else min(known, learner.listens_from - learner.step)

    def fill(self, n: int) -> None:
        """Put what n steps need in the tables, and let the schedule of step sizes run ahead."""
        learner, state, rows = self.learner, self.learner.state, []
        groups = learner.optimizer.param_groups
        self.rates = []
        for _ in range(n):
            knobs, plain = self.rule.next_knobs(state)
            self.knobs, state = list(knobs), {**state, **plain}
            self.rates.append([float(group["lr"]) for group in groups] if self.scheduler else [])
            rows.append([*knobs.values(), *self.rates[-1]])
            if self.scheduler is not None:
                with blaming("the scheduler"):
                    self.scheduler.step()
        self._remember(state)
        numbers, row = (
            torch.tensor(rows, dtype=learner.x.dtype).reshape(n, -1),
            learner.step - self.first,
        )
        if self.numbers.shape != (len(self.indices), numbers.shape[1]):
            self.numbers = learner.x.new_zeros(len(self.indices), numbers.shape[1])
        self.numbers[row : row + n].copy_(numbers)
        self.counter.fill_(row)
        self.total.zero_()
        make_capturable(learner.optimizer, self.device)

    def step(self, taken: int) -> None:
        """Take one step by its row of the tables; `taken` steps of the block were taken before."""
        learner, rule = self.learner, self.rule
        numbers = self.numbers.index_select(0, self.counter)[0].unbind()
        drawn = self.indices.index_select(0, self.counter)[0]
        g = self.engine.gradients_of(learner.x, drawn, self.weights, rows=rule.needs_rows)
        direction, state = rule.with_knobs(dict(zip(self.knobs, numbers, strict=False)))(
            g, learner.state
        )
        for key, tensor in self.memory.items():
            if key in state:
                tensor.copy_(state[key])
        self.total.add_(direction.sum())
        if (
            learner.bound is not None and self.weights
        ):  # a block with what is too long is undone, too
            self.total.masked_fill_(learner.bound.exceeded(g), torch.nan)
        rates = numbers[len(self.knobs) :] if self.device.type == "cuda" else self.rates[taken]
        with at_rates(learner.optimizer, rates):
            learner.optimize(direction)
        self.losses.index_copy_(0, self.counter, cast("Tensor", g.own_loss).reshape(1))
        self.counter.add_(1)

    def draw_ahead(self, n: int) -> None:
        """Draw what the tables will hold next, once n steps take longer than that, or it is due after them."""
        end = self.first + len(self.indices)
        if self.next is None and (self.learner.step + n == end or n >= len(self.indices) // 4):
            self.next = self.engine.indices(self.names, end)

    def count(self, n: int) -> list[float]:
        """Let the learner know that it has taken n steps; return user 0's loss in each."""
        learner, row = self.learner, self.learner.step - self.first
        losses: list[float] = self.losses[row : row + n].tolist()
        learner.state, learner.step = self.after, learner.step + n
        learner.count(list(self.weights), steps=n)
        return losses

    def save(self) -> Callable[[], None]:
        """Save what a block of steps changes, and return what undoes the block."""
        scheduler, groups = self.scheduler, self.learner.optimizer.param_groups
        tensors = [tensor.clone() for tensor in self._changed()]
        state = {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in self.learner.state.items()
        }
        schedule = {} if scheduler is None else copy.deepcopy(scheduler.state_dict())
        rates = [group["lr"] for group in groups]

        def restore() -> None:
            self.learner.state = state
            for tensor, value in zip(self._changed(), tensors, strict=True):
                tensor.copy_(value)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            if scheduler is not None:
                scheduler.load_state_dict(schedule)

        return restore

    def signature(self) -> object:
        """Return what must stay the same for a graph to be used again.

        Where tensors are, and numbers in it.
        """
        tensors = (*self._changed(), *self.memory.values(), self.indices, self.numbers, self.losses)
        settings = settings_of(self.learner.optimizer, scheduled=bool(self.scheduler))
        return (
            [t.data_ptr() for t in tensors],
            self.weights,
            self.listens,
            self.knobs,
            str(settings),
        )

    def _draw(self) -> None:
        """Let the tables hold the examples of the next step."""
        step, names = self.learner.step, tuple(self.weights)
        end = self.first + len(self.indices)
        if names == self.names and self.first <= step < end:
            return
        ahead = self.next if names == self.names and step == end else None
        drawn = self.engine.indices(names, step) if ahead is None else ahead
        if self.indices.shape == drawn.shape:
            self.indices.copy_(drawn)  # where a graph looks for it
        else:
            self.indices, self.losses = drawn.to(self.device), self.learner.x.new_zeros(len(drawn))
        self.first, self.names, self.next = step, names, None

    def _remember(self, after: Mapping[str, Any]) -> None:
        """Let the rule's tensors lie where the steps look for them, and note its state after the block."""
        for key, value in self.learner.state.items():
            if (
                isinstance(value, Tensor)
                and key in self.memory
                and self.memory[key].shape == value.shape
            ):
                self.memory[key].copy_(value)
            elif isinstance(value, Tensor):
                self.memory[key] = value.clone()
        self.learner.state = {**self.learner.state, **self.memory}
        self.after = {**after, **self.memory}

    def _changed(self) -> list[Tensor]:
        """Return the parameters, and what the bound and the optimizer remember."""
        bound = [] if self.learner.bound is None else [self.learner.bound.longest]
        return [self.learner.x, *bound, *state_tensors(self.learner.optimizer)]
