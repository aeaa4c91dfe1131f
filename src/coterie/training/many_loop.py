"""Runs as they go together: each with its track and record, all taking the steps of one program."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from coterie.choosing import Chooser, chooser_for
from coterie.engines.in_process.engine import InProcess
from coterie.evaluation.evaluate import scores
from coterie.evaluation.metrics import Metric
from coterie.learners.program import Listening, Member, Program
from coterie.learners.spec import Problem
from coterie.learners.stack import Stack
from coterie.methods.rounds import Method
from coterie.recording.configuration import Configuration
from coterie.recording.progress import Show
from coterie.recording.record import Record
from coterie.recording.result import Point
from coterie.rules import Alone, Rule
from coterie.training.loop import TrainingState
from coterie.training.run import Callback, Run, Step
from coterie.training.train import costs_of, track_of


@dataclass(frozen=True, eq=False)
class Begun:
    """A run before its first step.

    Args:
        place: its place among those wanted.
        problem: what it learns, from whom, and how.
        rule: how gradients become its direction.
        engine: over its users, with a model like its own.
        configuration: what its record begins with.
        callbacks: called after every step.
        why: why it cannot take part in a program, or None.
    """

    place: int
    problem: Problem
    rule: Rule | Chooser | Method
    engine: InProcess
    configuration: Configuration
    callbacks: Sequence[Callback]
    why: str | None

    def state(self, metrics: Mapping[str, Metric] | None) -> TrainingState:
        """Return the run as it goes, for which somebody else steps the optimizer."""
        p = self.problem
        costs = costs_of(p.me, self.engine.names, self.configuration.peers, p.batch_size)
        rule = Alone() if isinstance(self.rule, Chooser) or chooser_for(self.rule) else self.rule
        track = track_of(replace(p, scheduler=None), rule, self.engine, costs)
        state = TrainingState(track, p.loss, p.me, metrics, None)
        state.record = Record(self.configuration)
        return state

    def not_begun(self, metrics: Mapping[str, Metric] | None) -> Run:
        """Return the run as Ctrl-C left it: with no step taken."""
        state = self.state(metrics)
        state.evaluate()
        return state.finish("Ctrl-C", 0.0)


class Together:
    """Runs that take the steps of one program.

    Args:
        begun: the runs.
        metrics: by name, functions of (outputs, targets) over a whole set.
        every: steps between evaluations.
    """

    def __init__(self, begun: Sequence[Begun], metrics: Mapping[str, Metric] | None, every: int) -> None:
        self.began, self.every, self.metrics = time.monotonic(), every, metrics
        alike: dict[Any, list[Begun]] = {}
        for each in begun:
            alike.setdefault(_setting(each.problem), []).append(each)
        self.begun = [each for some in alike.values() for each in some]
        self.states = [each.state(metrics) for each in self.begun]
        for state in self.states:
            record, how = state.record, f"one program of {len(begun)}"
            record.configuration = replace(record.configuration, runs=how)
        x = torch.stack([state.track.x for state in self.states])
        stack = Stack(x, [(some[0].problem, len(some)) for some in alike.values()])
        for state, row in zip(self.states, x, strict=True):
            state.track.x = state.track.parameters.share(row)
        members = [Member(each.problem, cast("Listening", each.rule)) for each in self.begun]
        self.program = Program(self.begun[0].engine.copies(), members, stack)
        self.losses = torch.zeros_like(self.program.own_loss)
        self.running = set(range(len(begun)))
        self.runs: dict[int, Run] = {}

    def train(self, interrupted: Callable[[], bool], show: Show) -> tuple[dict[int, Run], bool]:
        """Take all steps; return the runs by place, less those that failed, and whether Ctrl-C was pressed."""
        steps, stopped = self.begun[0].problem.steps, False
        self._evaluate()
        while self.program.step < steps and self.running and not stopped:
            self.program.advance()
            self.losses += self.program.own_loss
            due = self.program.step % self.every == 0 or self.program.step == steps
            points = self._evaluate() if due else {}
            self._call(points)
            show(self.program.step, float(self.program.own_loss.mean()) if due else math.nan, math.nan, None)
            stopped = interrupted()
        self._finish(self.running, "Ctrl-C" if stopped else None)
        return self.runs, stopped

    def _evaluate(self) -> dict[int, Point]:
        """Record a point of every run that goes on."""
        program, points = self.program, {}
        self._drop_failed()
        held_out, since = program.held_out(), program.step % self.every or self.every
        losses = (self.losses / since).tolist()
        self.losses.zero_()
        for run in sorted(self.running):
            state = self._at_step(run)
            state.losses = [losses[run]] if program.step else []
            found = scores(*held_out[run], state.loss, self.metrics) if run in held_out else None
            points[run] = state.evaluate(found)
        return points

    def _at_step(self, run: int) -> TrainingState:
        """Return the state of a run, brought up to the program's step."""
        state, step = self.states[run], self.program.step
        state.track.step, state.track.state = step, self.program.state(run)
        return state

    def _drop_failed(self) -> None:
        self.running -= {run for run, failed in enumerate(self.program.failed()) if failed}

    def _call(self, points: Mapping[int, Point]) -> None:
        """Tell the callbacks of this step, and end the runs for which one returns True."""
        called = [run for run in sorted(self.running) if self.begun[run].callbacks]
        own_loss = self.program.own_loss.tolist() if called else []
        for run in called:
            weight, model = self.program.weight(run), self.states[run].track.model
            told = Step(self.program.step, own_loss[run], weight, {}, points.get(run), model)
            if [callback for callback in self.begun[run].callbacks if callback(told) is True]:
                self._finish({run}, "a callback")

    def _finish(self, runs: set[int], stopped: str | None) -> None:
        """End runs that have not failed."""
        self._drop_failed()
        share = (time.monotonic() - self.began) / len(self.begun)
        for run in sorted(runs & self.running):
            state = self._at_step(run)
            costs, asked = state.track.costs, list(state.track.rule.weights(state.track.engine.names))
            sent, times = state.track.x.numel(), self.program.step
            costs.compute([costs.me, *asked], times=times)
            costs.exchange(asked, down=sent, up=sent, times=times)
            self.runs[self.begun[run].place] = state.finish(stopped, share)
            self.running.discard(run)


def _setting(problem: Problem) -> tuple[Any, ...]:
    """Return what runs must have in common to share an optimizer and its scheduler."""
    names = {id(p): name for name, p in problem.model.named_parameters()}
    groups = problem.optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    held = tuple(tuple(names[id(p)] for p in group["params"]) for group in groups)
    return type(problem.optimizer), str(options), held, id(problem.scheduler)
