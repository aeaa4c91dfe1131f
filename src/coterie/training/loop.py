"""The one loop: K runs take their steps together, are evaluated, saved and ended; `train` is K = 1."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from coterie.engines.engine import Answers
from coterie.errors import GradientError, UserCodeError
from coterie.evaluation.evaluate import scores
from coterie.evaluation.losses import on_device
from coterie.learners.learner import Learner
from coterie.learners.stack import Steps
from coterie.recording.progress import Show
from coterie.training.ongoing import OngoingRun, Taken
from coterie.training.run import Run, Stopped
from coterie.training.together import HOST, HeldOutTogether

T = TypeVar("T")


class AsksTogether(Protocol):
    """What answers the questions of many learners at once."""

    def ask(self, learners: Sequence[Learner]) -> Mapping[Learner, Answers | None]:
        """Return the answers of the next step; None to a learner that has to ask by itself."""


class Loop:
    """Runs that take their steps together, as rows of one stack as far as they are alike.

    They have steps and evaluations in common. Of many runs, one whose own code raises, or whose
    gradients are not finite, ends, and the others go on.

    Args:
        runs: the runs, by their place; each has begun its record.
        asks: answers the questions of all at once; each learner asks by itself when None.
        held_out: passes over all validation sets at once; each run over its own when None.
        show: is told of every step of many runs.
        began: when the runs were begun; each has its share of the time since.
        close: is called when all steps are taken, before the first run is ended.
        raises: let errors of a run be raised, once it is saved.
    """

    def __init__(
        self,
        runs: Mapping[int, OngoingRun],
        *,
        asks: AsksTogether | None = None,
        held_out: HeldOutTogether | None = None,
        show: Show | None = None,
        began: float | None = None,
        close: Callable[[], None] | None = None,
        raises: bool = False,
    ) -> None:
        self.going, self._count = dict(runs), len(runs)
        self.asks, self.held_out, self.show, self.close = asks, held_out, show, close
        self.began = time.monotonic() if began is None else began
        self.steps, self.raises = Steps(), raises
        self.ended: dict[int, Run] = {}
        self.errors: list[UserCodeError] = []  # of the runs' own code
        self.stopped = False  # by Ctrl-C

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Take steps until all are taken, hooks have ended the runs, or Ctrl-C is pressed."""
        self.evaluated(OngoingRun.first_point, due=True)
        while self.going and not self.stopped:
            first = next(iter(self.going.values()))
            if first.learner.step >= first.spec.steps:
                break
            taken = self.advance(min(run.until_due() for run in self.going.values()))
            ended = self.follow_up(taken)
            self.stopped = interrupted()
            if not self.stopped:
                self.finish(Stopped.HOOK, ended)
        self.finish(Stopped.CTRL_C if self.stopped else None)

    def advance(self, most: int) -> Mapping[int, Taken]:
        """Take a step in every run; at most so many in a single one whose steps are captured."""
        if self._count == 1:
            blocks = self.each(
                lambda run: None if run.captured is None else run.take_block(run.captured, most)
            )
            taken = {place: block for place, block in blocks.items() if block is not None}
            if taken or not self.going:
                return taken
        learners = [learner for run in self.going.values() for learner in run.learners]
        answers = {} if self.asks is None else self.asks.ask(learners)
        self.each(lambda run: run.ask(answers))
        if self._count == 1:
            self.each(lambda run: self.steps.take(run.stacks))
        else:
            self.steps.take([stack for run in self.going.values() for stack in run.stacks])
        return self.each(OngoingRun.advanced)

    def follow_up(self, taken: Mapping[int, Taken]) -> list[int]:
        """Evaluate, save and tell the hooks after a step, as is due; return the runs that hooks end."""
        due = any(run.due for run in self.going.values())
        places = {id(run): place for place, run in self.going.items()}

        def told(run: OngoingRun, validation: Mapping[str, float] | None) -> bool:
            return run.taken(*taken[places[id(run)]], validation)

        ended = self.evaluated(told, due=due)
        if self.show is not None and self.going:
            losses = [loss for loss, _ in taken.values()]
            step = max(run.learner.step for run in self.going.values())
            self.show(step, sum(losses) / max(1, len(losses)), math.nan, None)
        return [place for place, by_hook in ended.items() if by_hook]

    def evaluated(
        self, do: Callable[[OngoingRun, Mapping[str, float] | None], T], *, due: bool
    ) -> dict[int, T]:
        """Do something with every run and, where an evaluation is due, its scores on its validation set."""
        outputs = self.held_out.outputs() if due and self.held_out is not None else {}

        def scored(run: OngoingRun) -> T:
            if run not in outputs:
                return do(run, None)
            loss = on_device(run.spec.loss, HOST)
            return do(run, scores(*outputs[run], loss, run.spec.metrics))

        return self.each(scored)

    def finish(self, stopped: Stopped | None, places: Sequence[int] | None = None) -> None:
        """End runs, all of them when no place is named."""
        places = list(self.going) if places is None else places
        if places and self.close is not None:
            self.close()
        share = (time.monotonic() - self.began) / self._count
        ended = self.each(lambda run: run.finish(stopped, share), places)
        for place, run in ended.items():
            self.ended[place] = run
            self.going.pop(place)

    def each(
        self, do: Callable[[OngoingRun], T], places: Sequence[int] | None = None
    ) -> dict[int, T]:
        """Do something with every run that goes on; one of many that fails ends, and the others go on."""
        results = {}
        for place in list(self.going) if places is None else places:
            run = self.going[place]
            try:
                results[place] = do(run)
            except GradientError as error:
                if self.raises:
                    raise
                what, *_ = str(error).split(";")  # where the state is, its run says
                warnings.warn(
                    f"the run of {run.spec.me.name!r} has ended early: {what}", stacklevel=2
                )
                self._leave(place, error.run)
            except UserCodeError as error:
                failed = error if error.run is not None else run.failed(error)
                if self.raises:
                    raise failed from error.__cause__
                self.errors.append(failed)
                self._leave(place, failed.run)
        return results

    def _leave(self, place: int, run: object) -> None:
        """Let a run be ended that could not go on."""
        self.going.pop(place)
        if isinstance(run, Run):
            self.ended[place] = run
