"""Whole steps as one program.

The host waits for the device once a block of steps, not at every step.

A step is the same work every time, except for a few numbers that are known beforehand: which
examples are drawn, the rule's knobs, the step size. They are put in tables for a block of steps
(`step_tables`). The rest (batches, passes, rule, optimizer, and the same for the guard's shadow)
reads them there: on a GPU as a captured CUDA graph, on a CPU as it is. After the block the host
reads the losses and whether all gradients were finite. If one was not, the block is undone and its
steps are taken one by one, where peers are left out, counted and reported as usual.
"""

import math
import warnings

import torch

from coterie.engines.in_process.side_stream import side_stream
from coterie.learners.blocks import Block, TakesBlocks
from coterie.learners.capturable import why_not_capturable
from coterie.learners.learner import Learner, RuleLearner
from coterie.rules import Capturable
from coterie.training.step_tables import StepTables

WARM_UP = 3
"""How many steps are taken by the program before it is captured, in which libraries set up what they need."""


class Captured:
    """The steps of a learner, and of its guard's shadow, as one program."""

    def __init__(self, *tables: Block) -> None:
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
        alone = n if self.device.type != "cuda" else min(n, max(0, WARM_UP - self._warm))
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
        now = [table.signature() for table in self.tables]
        if self._graph is not None and self._captured_with == now:
            return True
        self._graph = None
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


def block_of(learner: Learner) -> Block | str:
    """Return the steps of a learner as a block, or why they cannot be taken so."""
    if isinstance(learner.followed, TakesBlocks):
        return learner.followed.block(learner)
    if not isinstance(learner, RuleLearner):
        return f"`{type(learner.followed).__name__}` takes steps of its own kind"
    engine, rule = learner.engine, learner.rule
    if max(learner.exchange_every, learner.local_steps) > 1:
        return "not all steps are alike with `exchange_every` or `local_steps`"
    if not isinstance(rule, Capturable):
        return f"`{type(rule).__name__}` does not say beforehand what a step needs"
    if getattr(rule, "aggregator", None) is not None:
        return "an aggregator looks into its rows"
    can = engine.capabilities
    why = can.rows_not_captured if rule.needs_rows else can.not_captured
    return why_not_capturable(learner.optimizer) or why or StepTables(learner)


def warn_not_captured(why: str) -> None:
    """Say that steps are not captured, and why."""
    warnings.warn(
        f"steps are taken one by one, not captured, which is slower: {why}; `capture=False` says"
        " the same",
        stacklevel=5,  # where `train` is called
    )
