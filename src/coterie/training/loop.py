"""The one loop: K runs take their steps together, are evaluated, saved and ended; `train` is K = 1."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.engines.engine import Answers, TellsPromises
from coterie.errors import (
    CoterieError,
    GradientError,
    KnobError,
    PeerLost,
    UserCodeError,
    attributing_errors_to,
)
from coterie.evaluation.evaluate import evaluate
from coterie.gradients.parameters import is_finite
from coterie.learners.captured import Captured
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.recording.claim import Claim
from coterie.recording.configuration import Configuration, counted
from coterie.recording.costs import total
from coterie.recording.progress import Show
from coterie.recording.record import Record
from coterie.recording.result import End, GuardDecision, Point
from coterie.reporting.verdict import with_verdict
from coterie.training.guard import Guard
from coterie.training.hooks import Hook, HookLike, Start, as_hook, tell
from coterie.training.resuming import ResumableRun
from coterie.training.run import Run, Step, Stopped

T = TypeVar("T")
Scores: TypeAlias = Mapping[str, float]
"""Loss and metrics on a validation set."""
Taken: TypeAlias = tuple[float, Mapping[str, str]]
"""User 0's loss in a step that was taken, and who was left out of it and why."""
MOST_REASONS, OTHER_REASONS = 20, "other reasons"
"""How many reasons why a peer was left out are told apart."""
MOST_STRETCHES = 1000
"""Of steps without a peer; the last one then goes on, gaps or not."""


class OngoingRun(ResumableRun):
    """A run that is set up: one of those that `Loop` takes through their steps.

    Its record begins with the configuration; the claim is that of its folder, where it has one.
    `captured` are the steps of learner and shadow, `asked` what was to be prepared.
    """

    def __init__(
        self,
        spec: RunSpec,
        learner: Learner,
        configuration: Configuration,
        hooks: Sequence[HookLike] = (),
        *,
        claim: Claim | None = None,
        guard: Guard | None = None,
        captured: Captured | None = None,
        asked: RunSpec | None = None,
    ) -> None:
        if isinstance(learner.scheduler, ReduceLROnPlateau) and spec.me.validation is None:
            raise KnobError(
                f"`ReduceLROnPlateau` follows the validation loss, but {spec.me.name!r} has no"
                " validation set"
            )
        super().__init__(spec, learner, guard, claim)
        self.configuration, self.captured, self.asked = configuration, captured, asked or spec
        self.save_every = spec.steps if claim is None else spec.save_every
        self.hooks = [as_hook(hook) for hook in hooks]
        self._on_step = [hook for hook in self.hooks if type(hook).on_step is not Hook.on_step]
        self._told_of_gradients = False
        self.learners = [learner] if guard is None else [learner, guard.shadow]
        self.stepping: Sequence[Learner] = ()  # the learners whose next step is asked for
        self.stacks: list[Stack] = []  # and their parameters
        # whether the state is that after a whole step, evaluated where that is due
        self.whole = True
        # what the validation set says before the first step
        self.first: Mapping[str, float] | None = None

    def open(self) -> None:
        """Begin the record, or resume the run that was left in the folder."""
        out = None if self.folder.claim is None else self.folder.claim.folder
        record = self.resumed(out, self.configuration) if out and self.spec.resume else None
        if record is None:
            # what fails on the validation set is told before anything is written
            self.first = self._validate()
            record = Record(self.configuration, out and out / "record.jsonl")
        self.begin(record)

    def begin(self, record: Record) -> None:
        """Begin with a record, which is empty at the first step, and tell the hooks."""
        self.record = record
        start = Start(self.spec, self.learner.followed, record.configuration, self.learner.step)
        tell(self.hooks, "on_start", start)

    def first_point(self, validation: Scores | None = None) -> None:
        """Record a point before the first step."""
        if not self.record.points:
            self.evaluate(self.first or validation)

    def until_due(self) -> int:
        """Return how many steps may be taken until there is something to evaluate, to save or to tell."""
        if any(hook.every_step for hook in self._on_step):
            return 1
        step, every, saving = self.learner.step, self.spec.every, self.save_every
        return min(every - step % every, saving - step % saving, self.spec.steps - step)

    @property
    def due(self) -> bool:
        """Whether an evaluation is due after the step that was taken."""
        return self.learner.step % self.spec.every == 0 or self.learner.step == self.spec.steps

    def taken(
        self,
        own_loss: float,
        left_out: Mapping[str, str],
        validation: Scores | None = None,
    ) -> bool:
        """Evaluate, save and tell the hooks after a step, as is due.

        Say whether a hook ends the run.
        """
        step = self.learner.step
        point = self.evaluate(validation) if self.due else None
        self.whole = True
        elsewhere = not self.learner.engine.capabilities.local
        if step % self.save_every == 0 or (elsewhere and self.folder.is_due()):
            self.save()
        return self.call_hooks(own_loss, left_out, point)

    def call_hooks(self, own_loss: float, left_out: Mapping[str, str], point: Point | None) -> bool:
        """Tell all hooks of the step that was taken; say whether one of them ends the run."""
        if not self._on_step:
            return False
        learner = self.learner
        step = Step(
            step=learner.step,
            own_loss=own_loss,
            weight=learner.weight,
            left_out=left_out,
            point=point,
            model=learner.model,
            best_loss=learner.best.get("loss"),
            tau=self.tau,
        )
        before = self._gradient_version()
        answers = tell(self._on_step, "on_step", step)
        if self._gradient_version() != before and not self._told_of_gradients:
            self._told_of_gradients = True
            warnings.warn(
                "a hook has changed gradients after the step was taken, which has no effect;"
                " `clip_norm` cuts the direction before it",
                stacklevel=2,
            )
        return True in [answer is True for answer in answers]

    def _gradient_version(self) -> int:
        """Return how often the gradients in the model were changed in place.

        They are views of one vector.
        """
        gradients = (p.grad for p in self.learner.model.parameters())
        return next((gradient._version for gradient in gradients if gradient is not None), 0)

    def take_block(self, most: int) -> Taken | None:
        """Take at most so many captured steps; None where the next is no such step."""
        if self.captured is None:
            return None
        self.whole = False
        losses = self.captured.advance(most)
        if losses is None:
            return None
        self.losses += losses
        return losses[-1], {}

    def ask(self, answers: Mapping[Learner, Answers | None]) -> None:
        """Write the directions of the next step, by answers that were asked for with those of other runs."""
        self.whole = True  # until the step is taken
        try:
            step, *others = [each.next_step(answers.get(each)) for each in self.learners]
        except PeerLost as lost:
            raise self._lost(lost) from lost
        alone = others[0] if others else None
        if self.guard is not None and alone is not None and self.learner.can_restart:
            if not is_finite(alone.own):
                raise self._not_finite(alone)
            if not is_finite(step.own):  # the peers led the model astray, not user 0's examples
                step = self._restarted(self.guard)
        if not is_finite(step.own):
            raise self._not_finite(step)
        self.whole = False
        try:
            step.write()
        except GradientError as error:  # the rule's direction is not finite
            if self.guard is None:
                self.whole = True
                raise self._not_finite(step, str(error)) from error
            warnings.warn(f"{error}; the run goes on from the model trained alone", stacklevel=4)
            step = self._restarted(self.guard)
            step.write()
        self._taken, self.stepping = step, self.learners[:1]
        # steps of this size may suit a method, and be too long alone
        if alone is not None and is_finite(alone.own):
            alone.write()
            self.stepping = self.learners
        self.stacks = [stack for learner in self.stepping for stack in learner.stacks]

    def advanced(self) -> Taken:
        """Go on after the step that was asked for and taken."""
        self.stacks, step = [], self._taken
        for learner in self.stepping:
            learner.advanced(1)
        self.losses.append(float(step.own_loss))
        for name, reason in step.left_out.items():
            counts = self.left_out.setdefault(name, {})
            # else a peer could fill the record with words of its own
            told = reason if reason in counts or len(counts) < MOST_REASONS else OTHER_REASONS
            counts[told] = counts.get(told, 0) + 1
            stretches, taken = self.absent.setdefault(name, []), self.learner.step - 1
            if stretches and (stretches[-1][1] == taken - 1 or len(stretches) == MOST_STRETCHES):
                stretches[-1][1] = taken
            else:
                stretches.append([taken, taken])
        return self.losses[-1], step.left_out

    def _restarted(self, guard: Guard) -> NextStep:
        """Let the run go on from the model trained alone, and return its next step."""
        guard.restart(self.learner)
        return self.learner.next_step()

    def _validate(self) -> Mapping[str, float] | None:
        """Return the loss and the metrics on the validation set, where there is one."""
        model, spec, held_out = self.learner.model, self.spec, self.spec.me.validation
        return None if held_out is None else evaluate(model, spec.loss, held_out, spec.metrics)

    def evaluate(self, validation: Scores | None = None) -> Point:
        """Record a point, keep the model if it is the best by validation loss so far, and ask the guard."""
        learner = self.learner
        step, weight = learner.step, learner.weight  # as they are before the guard restarts the run
        # not one: a batch had nothing to learn from
        known = [loss for loss in self.losses if not math.isnan(loss)]
        own_loss = sum(known) / len(known) if known else None
        self.losses = []
        validation = validation or self._validate()
        if validation is not None:
            learner.consider(validation["loss"])
        point = Point(
            step=step,
            weight=None if math.isnan(weight) else weight,
            own_loss=own_loss,
            left_out=sum(sum(reasons.values()) for reasons in self.left_out.values()),
            validation=validation or {},
            guard=None if self.guard is None else self.guard.check(learner),
        )
        self.folder.write("record", lambda: self.record.add(point))
        self.whole = True
        tell(self.hooks, "on_evaluation", point)
        return point

    def finish(self, stopped: Stopped | None, seconds: float) -> Run:
        """Save, evaluate the best model on the test set if the run has ended, and return the run."""
        if self.whole:
            self.save()
        learner, spec = self.learner, self.spec
        model, best, decision = learner.served()
        failed: UserCodeError | None = None
        broken = stopped is Stopped.USER_CODE  # and might fail again
        if self.guard is not None and not broken:
            model, best, decision = self.guard.decide(model, best)
        held_out = spec.me.validation, spec.me.test if stopped in (None, Stopped.HOOK) else None
        scores: list[dict[str, float]] = [{}, {}]
        try:
            if not broken:
                scores = [
                    evaluate(model, spec.loss, e, spec.metrics) if e is not None else {}
                    for e in held_out
                ]
        except UserCodeError as error:
            failed, stopped, broken = error, Stopped.USER_CODE, True
        end = self._end(stopped, seconds, scores, best.get("step", learner.step), decision)
        alone = learner.trained_alone() if self.guard is None else self.guard.alone()
        end = with_verdict(end, self.record.configuration, spec, model, None if broken else alone)
        self.folder.write("record", lambda: self.record.finish(end))
        run = Run(
            model=model,
            record=self.record,
            state=learner.state,
            step=learner.step,
            best_step=end.best_step,
            test=scores[1],
            stopped=stopped,
            models=learner.models(),
            alone=alone,
            unwritten=self.folder.unwritten(),
            spec=self.asked,
            out_of_fold=learner.out_of_fold() if self.guard is None else None,
        )
        try:
            tell(self.hooks, "on_end", run)
        except UserCodeError as error:
            failed = failed or error
        if failed is not None:
            raise UserCodeError(f"{failed}; {self.folder.where()}", run) from failed.__cause__
        return run

    def _end(
        self,
        stopped: Stopped | None,
        seconds: float,
        scores: Sequence[Mapping[str, float]],
        best_step: int,
        decision: GuardDecision | None,
    ) -> End:
        """Return what the record says of the end, but for the verdict."""
        learner, engine, (validation, test) = self.learner, self.learner.engine, scores
        traffic = total(self.travelled, engine.traffic())
        return End(
            step=learner.step,
            best_step=best_step,
            seconds=round(seconds, 3),
            stopped=stopped,
            validation=validation,
            test=test,
            guard=decision,
            tau=self.tau(),
            left_out=self.left_out,
            absent=self.absent,
            costs=learner.costs.by_user(),
            traffic=traffic,
            promises=engine.promises() if isinstance(engine, TellsPromises) else {},
            account=learner.account(traffic),
            not_captured=(self.captured and self.captured.failed) or "",
        )

    def tau(self) -> dict[str, float]:
        """Return each peer's share of the peers' weight in the last step, where there is such a thing."""
        weights = self.learner.tau()
        whole = sum(weights.values())
        return {name: float(weight / whole) for name, weight in weights.items()} if whole else {}

    def failed(self, error: UserCodeError) -> UserCodeError:
        """Save what there is, tell the hooks that the run has ended, and return the error with where it is."""
        try:
            run = self.finish(Stopped.USER_CODE, 0.0)
        except UserCodeError as second:  # the same code fails at the end too
            run = second.run
        after = f"after {counted(self.learner.step, 'step')}; {self.folder.where()}"
        failed = UserCodeError(f"{error}, {after}", run)
        failed.__cause__ = error.__cause__
        return failed

    def _left(self, stopped: Stopped) -> tuple[Run, str]:
        """Save the state before this step, and return the run, ended, with where that state is."""
        path, run = self.save(), self.finish(stopped, 0.0)
        return run, f"saved in {path}" if path else "in this error's `run`"

    def _lost(self, lost: PeerLost) -> PeerLost:
        """Return the error with where the state before this step is."""
        run, where = self._left(Stopped.PEER_LOST)
        again = "; start everybody again and resume" if where.startswith("saved") else ""
        after = f"The state after {counted(self.learner.step, 'step')} is {where}{again}"
        return PeerLost(f"{lost}. {after}", lost.peers, run)

    def _not_finite(self, step: NextStep, of_rule: str | None = None) -> GradientError:
        """Return an error that says where the state before this step is."""
        run, where = self._left(Stopped.NOT_FINITE)
        what = (
            f"user 0's own gradient is not finite at step {self.learner.step} (loss"
            f" {float(step.own_loss):.4g})"
        )
        remedy = (
            "Start again with a lower `lr`, or look for extreme values in the examples of"
            f" {self.spec.me.name!r}"
        )
        if of_rule is not None:
            what = of_rule
            remedy = (
                "Look at what the rule divides by, or for a peer whose gradients are very large"
            )
        return GradientError(f"{what}; the state before it is {where}. {remedy}", run)


class Loop:
    """Runs that take their steps together, as rows of one stack as far as they are alike.

    They have steps and evaluations in common. Of many runs, one whose own code raises, or whose
    gradients are not finite, ends, and the others go on.

    Args:
        runs: the runs, by their place; each has begun its record.
        ask: answers the questions of all learners at once, but for those that it gives None; each
            learner asks by itself when None.
        held_out: passes over all validation sets at once, and returns what scores each run; each
            passes over its own when None.
        show: is told of every step of many runs.
        began: when the runs were begun; each has its share of the time since.
        close: is called when all steps are taken, before the first run is ended.
        raises: let errors of a run be raised, once it is saved.
    """

    def __init__(
        self,
        runs: Mapping[int, OngoingRun],
        *,
        ask: Callable[[Sequence[Learner]], Mapping[Learner, Answers | None]] | None = None,
        held_out: Callable[[], Mapping[OngoingRun, Callable[[], Scores]]] | None = None,
        show: Show | None = None,
        began: float | None = None,
        close: Callable[[], None] | None = None,
        raises: bool = False,
    ) -> None:
        self.going, self._count = dict(runs), len(runs)
        self.ask, self.held_out, self.show, self.close = ask, held_out, show, close
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
        if self._count == 1 and any(run.captured is not None for run in self.going.values()):
            blocks = self.each(
                lambda run: run.take_block(most), "the model, the loss or the optimizer"
            )
            taken = {place: block for place, block in blocks.items() if block is not None}
            if taken or not self.going:
                return taken
        learners = [learner for run in self.going.values() for learner in run.learners]
        answers = {} if self.ask is None else self.ask(learners)
        self.each(lambda run: run.ask(answers), "the model or the loss")
        if self._count == 1:
            self.each(lambda run: self.steps.take(run.stacks), "the optimizer")
        else:
            with attributing_errors_to("the optimizer"):
                self.steps.take([stack for run in self.going.values() for stack in run.stacks])
        return self.each(OngoingRun.advanced)

    def follow_up(self, taken: Mapping[int, Taken]) -> list[int]:
        """Evaluate, save and tell the hooks after a step, as is due; return the runs that hooks end."""
        due = any(run.due for run in self.going.values())
        places = {id(run): place for place, run in self.going.items()}

        def told(run: OngoingRun, validation: Scores | None) -> bool:
            return run.taken(*taken[places[id(run)]], validation)

        ended = self.evaluated(told, due=due)
        if self.show is not None and self.going:
            losses = [loss for loss, _ in taken.values()]
            step = max(run.learner.step for run in self.going.values())
            self.show(step, sum(losses) / max(1, len(losses)), math.nan, None)
        return [place for place, by_hook in ended.items() if by_hook]

    def evaluated(self, do: Callable[[OngoingRun, Scores | None], T], *, due: bool) -> dict[int, T]:
        """Do something with every run and, where an evaluation is due, its scores on its validation set."""
        scores = self.held_out() if due and self.held_out is not None else {}
        return self.each(lambda run: do(run, scores[run]() if run in scores else None))

    def finish(self, stopped: Stopped | None, places: Sequence[int] | None = None) -> None:
        """End runs, all of them when no place is named."""
        places = list(self.going) if places is None else places
        if places and self.close is not None:
            self.close()
        share = (time.monotonic() - self.began) / self._count
        ended = self.each(lambda run: run.finish(stopped, share), places=places)
        for place, run in ended.items():
            self.ended[place] = run
            self.going.pop(place)

    def each(
        self,
        do: Callable[[OngoingRun], T],
        whose: str = "",
        places: Sequence[int] | None = None,
    ) -> dict[int, T]:
        """Do something with every run that goes on; one of many that fails ends, and the others go on.

        `whose` code is called, of which an error may come.
        """
        results = {}
        for place in list(self.going) if places is None else places:
            run = self.going[place]
            try:
                results[place] = do(run)
            except Exception as error:
                self._fail(place, error, whose)
        return results

    def _fail(self, place: int, error: Exception, whose: str) -> None:
        """Raise what a run raised; of many runs, one whose own code or gradients fail ends alone."""
        run = self.going[place]
        if whose and not isinstance(error, CoterieError):
            error = UserCodeError.of(whose, error)
        if isinstance(error, UserCodeError) and error.run is None:
            error = run.failed(error)
        if self.raises or not isinstance(error, GradientError | UserCodeError):
            raise error
        if isinstance(error, UserCodeError):
            self.errors.append(error)
        else:
            what, *_ = str(error).split(";")  # where the state is, its run says
            warnings.warn(f"the run of {run.spec.me.name!r} has ended early: {what}", stacklevel=2)
        self.going.pop(place)
        if isinstance(error.run, Run):
            self.ended[place] = error.run
