"""The loop of many runs.

Each has its own learner and record, and all take the steps of one program.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie.engines.in_process.engine import InProcess
from coterie.errors import UserCodeError
from coterie.evaluation.evaluate import scores
from coterie.evaluation.losses import on_device
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.learners.program import HOST, Program
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable
from coterie.recording.configuration import Configuration
from coterie.recording.progress import Show
from coterie.recording.record import Record
from coterie.recording.result import Point
from coterie.rules import Alone
from coterie.training.loop import TrainingLoop
from coterie.training.run import Run, Stopped
from coterie.training.setup import costs_of


@dataclass(frozen=True, eq=False)
class ReadyRun:
    """A run before its first step."""

    place: int  # among the runs asked for
    spec: RunSpec  # prepared; its rule is the one to follow, once it is chosen
    engine: InProcess  # over its users, with a model like its own
    configuration: Configuration  # what its record begins with
    why_by_itself: str | None  # why it cannot take part in a program

    def loop(self, *, follows: bool = True) -> TrainingLoop:
        """Return its loop, of which the program takes the steps.

        Without the rule where that is not chosen.
        """
        costs = costs_of(self.spec, self.engine.names, self.configuration.peers)
        rule = self.spec.rule if follows else Alone()
        learner = RuleLearner(replace(self.spec, scheduler=None), rule, self.engine, costs)
        loop = TrainingLoop(self.spec, learner, self.spec.hooks)
        loop.begin(Record(self.configuration))
        return loop

    def not_started(self) -> Run:
        """Return the run as Ctrl-C left it: with no step taken."""
        loop = self.loop(follows=False)
        loop.evaluate()
        return loop.finish(Stopped.CTRL_C, 0.0)


class ManyLoop:
    """Runs that take the steps of one program; they have steps and evaluations in common."""

    def __init__(self, ready: Sequence[ReadyRun]) -> None:
        self.began = time.monotonic()
        alike: dict[Any, list[ReadyRun]] = {}
        for each in ready:
            alike.setdefault(_setting(each.spec), []).append(each)
        together = f"one program of {len(ready)}"
        self.ready = [
            replace(each, configuration=replace(each.configuration, runs=together))
            for some in alike.values()
            for each in some
        ]
        self.steps, self.every = ready[0].spec.steps, ready[0].spec.every
        self.loops = [each.loop() for each in self.ready]
        x = torch.stack([loop.learner.x for loop in self.loops])
        stack = Stack(x, [(some[0].spec, len(some)) for some in alike.values()])
        for loop, row in zip(self.loops, x, strict=True):
            loop.learner.x = loop.learner.parameters.share(row)
        self.program = Program(
            self.ready[0].engine.copies(), [each.spec for each in self.ready], stack
        )
        self.captured = self._captured()
        self.running = set(range(len(ready)))
        self.errors: list[UserCodeError] = []  # of the runs' own code
        self.runs: dict[int, Run] = {}

    def train(self, interrupted: Callable[[], bool], show: Show) -> tuple[dict[int, Run], bool]:
        """Take all steps; return the runs by place, less those that failed, and whether Ctrl-C was pressed."""
        stopped = False
        self._evaluate()
        while self.program.step < self.steps and self.running and not stopped:
            until = min(self.every - self.program.step % self.every, self.steps - self.program.step)
            one = any(each.spec.hooks for each in self.ready)
            if self.captured is None or self.captured.advance(1 if one else until) is None:
                self.program.advance()
            due = self.program.step % self.every == 0 or self.program.step == self.steps
            points = self._evaluate() if due else {}
            self._call_hooks(points)
            show(
                self.program.step,
                float(self.program.own_loss.mean()) if due else math.nan,
                math.nan,
                None,
            )
            stopped = interrupted()
        self._finish(self.running, Stopped.CTRL_C if stopped else None)
        return self.runs, stopped

    def _captured(self) -> Captured | None:
        """Return the program's steps as captured ones, on a GPU, where that is possible."""
        possible = all(why_not_capturable(each.spec.made_optimizer) is None for each in self.ready)
        if not self.program.stack.x.is_cuda or not possible:
            return None
        for each, loop in zip(self.ready, self.loops, strict=True):
            loop.record.configuration = replace(each.configuration, capture="a CUDA graph")
        captured = Captured(StackBlock(self.program, undone=False))
        for loop in self.loops:
            loop.captured = captured  # whose end it tells
        return captured

    def _evaluate(self) -> dict[int, Point]:
        """Record a point of every run that goes on."""
        program, points = self.program, {}
        self._drop_failed()
        held_out, since = program.held_out(), program.step % self.every or self.every
        losses = (program.losses / since).tolist()
        program.losses.zero_()
        for run in sorted(self.running):
            loop = self._at_step(run)
            loop.losses = [losses[run]] if program.step else []
            spec = self.ready[run].spec
            loss = on_device(spec.loss, HOST)
            try:
                validation = scores(*held_out[run], loss, spec.metrics) if run in held_out else None
                points[run] = loop.evaluate(validation)
            except UserCodeError as error:
                self._end_by(error, run)
        return points

    def _at_step(self, run: int) -> TrainingLoop:
        """Return the loop of a run, brought up to the program's step."""
        loop = self.loops[run]
        loop.learner.step, loop.learner.state = self.program.step, self.program.state(run)
        return loop

    def _drop_failed(self) -> None:
        self.running -= {run for run, failed in enumerate(self.program.failed()) if failed}

    def _call_hooks(self, points: Mapping[int, Point]) -> None:
        """Tell the hooks of this step, and end the runs for which one returns True."""
        called = [run for run in sorted(self.running) if self.ready[run].spec.hooks]
        own_loss = self.program.own_loss.tolist() if called else []
        for run in called:
            try:
                if self._at_step(run).call_hooks(own_loss[run], {}, points.get(run)):
                    self._finish({run}, Stopped.HOOK)
            except UserCodeError as error:
                self._end_by(error, run)

    def _finish(self, runs: set[int], stopped: Stopped | None) -> None:
        """End runs that have not failed."""
        self._drop_failed()
        share = (time.monotonic() - self.began) / len(self.ready)
        for run in sorted(runs & self.running):
            loop = self._at_step(run)
            asked = list(self.ready[run].spec.rule.weights(loop.learner.engine.names))
            loop.learner.count(asked, steps=self.program.step)
            try:
                self.runs[self.ready[run].place] = loop.finish(stopped, share)
            except UserCodeError as error:
                self._end_by(error, run)
            self.running.discard(run)

    def _end_by(self, error: UserCodeError, run: int) -> None:
        """End a run whose own code raised; the others go on."""
        self.errors.append(error if error.run is not None else self._at_step(run).failed(error))
        self.runs[self.ready[run].place] = self.errors[-1].run
        self.running.discard(run)


def _setting(spec: RunSpec) -> tuple[Any, ...]:
    """Return what runs must have in common to share an optimizer and its scheduler."""
    names = {id(p): name for name, p in spec.model.named_parameters()}
    groups = spec.made_optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    held = tuple(tuple(names[id(p)] for p in group["params"]) for group in groups)
    return type(spec.made_optimizer), str(options), held, id(spec.scheduler), spec.clip_norm
