"""The loop of many runs.

Each has its own learner and record, and all take the steps of one program.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie.engines.in_process.engine import InProcess
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.learners.program import Program
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable
from coterie.recording.configuration import Configuration
from coterie.recording.progress import Show
from coterie.recording.record import Record
from coterie.rules import Alone
from coterie.training.loop import Loop
from coterie.training.ongoing import OngoingRun, Taken
from coterie.training.run import Run, Stopped
from coterie.training.setup import costs_of
from coterie.training.together import HeldOutTogether


@dataclass(frozen=True, eq=False)
class ReadyRun:
    """A run before its first step."""

    place: int  # among the runs asked for
    spec: RunSpec  # prepared; its rule is the one to follow, once it is chosen
    engine: InProcess  # over its users, with a model like its own
    configuration: Configuration  # what its record begins with
    why_by_itself: str | None  # why it cannot take part in a program

    def loop(self, *, follows: bool = True) -> OngoingRun:
        """Return its loop, of which the program takes the steps.

        Without the rule where that is not chosen.
        """
        costs = costs_of(self.spec, self.engine.names, self.configuration.peers)
        rule = self.spec.rule if follows else Alone()
        learner = RuleLearner(replace(self.spec, scheduler=None), rule, self.engine, costs)
        loop = OngoingRun(self.spec, learner, self.spec.hooks)
        loop.begin(Record(self.configuration))
        return loop

    def not_started(self) -> Run:
        """Return the run as Ctrl-C left it: with no step taken."""
        loop = self.loop(follows=False)
        loop.evaluate()
        return loop.finish(Stopped.CTRL_C, 0.0)


class ManyLoop(Loop):
    """Runs of rules that take the steps of one program: rows of one matrix from the question to the step."""

    def __init__(self, ready: Sequence[ReadyRun], show: Show | None = None) -> None:
        alike: dict[Any, list[ReadyRun]] = {}
        for each in ready:
            alike.setdefault(_setting(each.spec), []).append(each)
        together = f"one program of {len(ready)}"
        self.ready = [
            replace(each, configuration=replace(each.configuration, runs=together))
            for some in alike.values()
            for each in some
        ]
        self.loops = [each.loop() for each in self.ready]
        x = torch.stack([run.learner.x for run in self.loops])
        stack = Stack(x, [(some[0].spec, len(some)) for some in alike.values()])
        for run, row in zip(self.loops, x, strict=True):
            run.learner.x = run.learner.parameters.share(row)
        copies = self.ready[0].engine.copies()
        self.program = Program(copies, [each.spec for each in self.ready], stack)
        self.captured = self._captured()
        runs = {each.place: run for each, run in zip(self.ready, self.loops, strict=True)}
        super().__init__(runs, held_out=HeldOutTogether(copies, self.loops), show=show)
        self._row = {place: row for row, place in enumerate(runs)}
        self._counted = 0  # the steps that the runs know of

    def _captured(self) -> Captured | None:
        """Return the program's steps as captured ones, on a GPU, where that is possible."""
        possible = all(why_not_capturable(each.spec.made_optimizer) is None for each in self.ready)
        if not self.program.stack.x.is_cuda or not possible:
            return None
        for each, run in zip(self.ready, self.loops, strict=True):
            run.record.configuration = replace(each.configuration, capture="a CUDA graph")
        captured = Captured(StackBlock(self.program, undone=False))
        for run in self.loops:
            run.captured = captured  # whose end it tells
        return captured

    def advance(self, most: int) -> Mapping[int, Taken]:
        """Take a step in every run, or several that are captured."""
        program = self.program
        if self.captured is None or self.captured.advance(most) is None:
            program.advance()
        for run in self.going.values():
            run.learner.step = program.step
        due = any(run.due for run in self.going.values())
        if not due and not any(each.spec.hooks for each in self.ready):
            return dict.fromkeys(self.going, (math.nan, {}))
        self._bring_up()
        if due:
            first = next(iter(self.loops))
            since = program.step % first.spec.every or first.spec.every
            losses = (program.losses / since).tolist()
            program.losses.zero_()
            for place, run in self.going.items():
                run.losses = [losses[self._row[place]]]
        own = program.own_loss.tolist()
        return {place: (own[self._row[place]], {}) for place in self.going}

    def finish(self, stopped: Stopped | None, places: Sequence[int] | None = None) -> None:
        """End runs, those not that have failed."""
        self._bring_up()
        super().finish(stopped, places)

    def _bring_up(self) -> None:
        """Let the runs know of the steps that were taken, and drop those that have failed."""
        failed, steps = self.program.failed(), self.program.step - self._counted
        self._counted = self.program.step
        for place, run in list(self.going.items()):
            row, learner = self._row[place], run.learner
            if failed[row]:
                self.going.pop(place)
                continue
            learner.state = self.program.state(row)
            asked = list(run.spec.rule.weights(learner.engine.names))
            learner.count(asked, steps=steps)


def _setting(spec: RunSpec) -> tuple[Any, ...]:
    """Return what runs must have in common to share an optimizer and its scheduler."""
    names = {id(p): name for name, p in spec.model.named_parameters()}
    groups = spec.made_optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    held = tuple(tuple(names[id(p)] for p in group["params"]) for group in groups)
    return type(spec.made_optimizer), str(options), held, id(spec.scheduler), spec.clip_norm
