"""Everybody's runs taken together.

One loop, in which each keeps its own folder, record, guard and end.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.in_process.engine import InProcess
from coterie.errors import GradientError, UserCodeError
from coterie.evaluation.evaluate import scores
from coterie.evaluation.losses import on_device
from coterie.everyone.folders import align
from coterie.everyone.program import EvaluatedTogether, SharedAnswers, learners_of
from coterie.learners.program import HOST
from coterie.learners.spec import RunSpec
from coterie.recording.progress import Show, interruptible, progress_bar
from coterie.training.loop import TrainingLoop
from coterie.training.run import Run, Stopped
from coterie.training.train import SetUpRun, set_up

T = TypeVar("T")


def train_together(specs: Sequence[RunSpec]) -> tuple[dict[int, Run], list[UserCodeError], bool]:
    """Train everybody's runs, as one program as far as they can be.

    The others after them, one by one.

    Return the runs by place, errors of the runs' own code, and whether Ctrl-C was pressed.
    """
    began = time.monotonic()
    with ExitStack() as held, ExitStack() as stack:
        if specs[0].resume:
            align([Path(spec.out) for spec in specs if spec.out is not None])
        runs: list[SetUpRun] = []
        known: dict[str, OnParts] = {}  # everybody starts at the same point
        for spec in specs:
            like = runs[0].loop.learner.engine if runs else None
            engine = partial(InProcess, like=like) if isinstance(like, InProcess) else InProcess
            own = replace(spec, progress=False, engine=engine)
            runs.append(set_up(own, held, stack, known=known))
        members = _members(runs)
        loop = TogetherLoop(runs, members)
        interrupted = stack.enter_context(interruptible())
        bar = progress_bar(specs[0].progress, f"{len(runs)} users", specs[0].steps)
        loop.train(interrupted, stack.enter_context(bar), began)
        return loop.ended, loop.errors, loop.stopped


def _members(runs: Sequence[SetUpRun]) -> list[int]:
    """Return the places of the runs that can be taken together.

    None where there are fewer than two.
    """
    everybody = {run.spec.me.name for run in runs}
    able = []
    for place, run in enumerate(runs):
        all_others = {peer.name for peer in run.spec.peers} == everybody - {run.spec.me.name}
        if all_others and _why_by_itself(run.loop) is None:
            able.append(place)
    return able if len(able) > 1 else []


def _why_by_itself(loop: TrainingLoop) -> str | None:
    """Say why a run cannot be taken together with others; None where it can."""
    learner, rule = loop.learner, loop.learner.followed
    adaptive = isinstance(learner, AdaptiveLearner)
    able = adaptive or getattr(rule, "in_rows", False)
    reasons = {
        f"`{type(rule).__name__}` is not a rule that runs can follow together": not able,
        "every peer's gradient is needed": (not adaptive and getattr(rule, "needs_rows", False)),
        "its steps are captured": loop.captured is not None,
        "it has exchanges of its own (`exchange_every`, `local_steps`)": (
            not adaptive and max(learner.exchange_every, learner.local_steps) > 1
        ),
    }
    told = next((reason for reason, holds in reasons.items() if holds), None)
    return learner.engine.capabilities.not_stacked or told


class TogetherLoop:
    """The loop of everybody's runs."""

    def __init__(self, runs: Sequence[SetUpRun], members: Sequence[int]) -> None:
        self.runs = runs
        self.shared: SharedAnswers | None = None
        self.evaluated: EvaluatedTogether | None = None
        self.going = {place: runs[place].loop for place in members}
        engine = runs[members[0]].loop.learner.engine if members else None
        if isinstance(engine, InProcess):
            copies = engine.copies()
            self.shared = SharedAnswers(copies, [run.spec for run in runs], self.going)
            self.evaluated = EvaluatedTogether(copies, dict(self.going))
        self.ended: dict[int, Run] = {}
        self.errors: list[UserCodeError] = []
        self.stopped = False  # by Ctrl-C
        self._together = f"one program of {len(members)}"

    def train(self, interrupted: Callable[[], bool], show: Show, began: float) -> None:
        """Take the steps of all, then those of the runs that cannot be taken together, and end all of them."""
        for place in list(self.going):
            run = self.runs[place]
            replace(run, configuration=replace(run.configuration, runs=self._together)).open()
        self._each(TrainingLoop.first_point)
        while self.going and not self.stopped:
            if next(iter(self.going.values())).learner.step >= self.runs[0].spec.steps:
                break
            self._step()
            if not self.going:
                break
            losses = [loop.losses[-1] for loop in self.going.values() if loop.losses]
            done = max(loop.learner.step for loop in self.going.values())
            show(done, sum(losses) / len(losses) if losses else float("nan"), float("nan"), None)
            self.stopped = interrupted()
        share = (time.monotonic() - began) / len(self.runs)
        why = Stopped.CTRL_C if self.stopped else None
        self._each(lambda loop: loop.finish(why, share), ends=True)
        for place, run in enumerate(self.runs):
            if place not in self.ended and not self.stopped:
                self._by_itself(place, run, interrupted)

    def _step(self) -> None:
        """Take one step in every run."""
        if self.shared is None:
            return
        answers = self.shared.ask(
            [learner for loop in self.going.values() for learner in learners_of(loop)]
        )
        taken = self._each(lambda loop: loop.advance(1, answers))
        due = any(loop.due for loop in self.going.values())
        outputs = self.evaluated.outputs() if due and self.evaluated is not None else {}
        held_out = {id(loop): outputs.get(place) for place, loop in self.going.items()}

        def go_on(loop: TrainingLoop) -> None:
            there = held_out[id(loop)]
            loss = on_device(loop.spec.loss, HOST)
            validation = None if there is None else scores(*there, loss, loop.spec.metrics)
            loop.taken(*taken[id(loop)], validation)

        self._each(go_on)

    def _each(self, do: Callable[[TrainingLoop], T], *, ends: bool = False) -> dict[int, T]:
        """Do something with every run that goes on; one that fails ends, and the others go on."""
        results = {}
        for place, loop in list(self.going.items()):
            try:
                result = do(loop)
            except GradientError as error:
                _warn_of(loop, error)
                self._leave(place, error.run)
            except UserCodeError as error:
                self.errors.append(error if error.run is not None else loop.failed(error))
                self._leave(place, self.errors[-1].run)
            else:
                results[id(loop)] = result
                if ends:
                    self._leave(place, result)
        return results

    def _leave(self, place: int, run: object) -> None:
        """Let a run be ended."""
        self.going.pop(place)
        if isinstance(run, Run):
            self.ended[place] = run

    def _by_itself(self, place: int, run: SetUpRun, interrupted: Callable[[], bool]) -> None:
        """Take the steps of a run that cannot be taken together with others."""
        began = time.monotonic()
        why = (
            _why_by_itself(run.loop)
            or "its rule, its peers or its guard are not those of the others"
        )
        told = f"by itself: {why}"
        try:
            replace(run, configuration=replace(run.configuration, runs=told)).open()
            stopped = run.loop.run(interrupted)
            self.ended[place] = run.loop.finish(stopped, time.monotonic() - began)
            self.stopped = stopped is Stopped.CTRL_C
        except GradientError as error:
            _warn_of(run.loop, error)
            self.ended[place] = error.run
        except UserCodeError as error:
            self.errors.append(error)
            if error.run is not None:
                self.ended[place] = error.run


def _warn_of(loop: TrainingLoop, error: GradientError) -> None:
    """Say whose run has ended and why, since the others go on."""
    what, *_ = str(error).split(";")  # where the state is, its run says
    warnings.warn(f"the run of {loop.spec.me.name!r} has ended early: {what}", stacklevel=2)
