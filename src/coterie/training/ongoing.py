"""A run that goes on: its learner and guard, what is recorded, saved and told of its steps, and its end."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.engines.capabilities import TellsPromises
from coterie.engines.engine import Answers
from coterie.errors import (
    CheckpointError,
    GradientError,
    KnobError,
    PeerLost,
    UserCodeError,
    attributing_errors_to,
)
from coterie.evaluation.evaluate import evaluate
from coterie.gradients.gradients import is_finite
from coterie.learners.captured import Captured
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.recording import checkpoint
from coterie.recording.checkpoint import RunFolder
from coterie.recording.claim import Claim
from coterie.recording.configuration import Configuration, counted
from coterie.recording.costs import Cost, Traffic, total
from coterie.recording.record import Record
from coterie.recording.result import End, GuardDecision, Point
from coterie.reporting.verdict import with_verdict
from coterie.training.algorithm import algorithm_of
from coterie.training.guard import Guard
from coterie.training.hooks import Hook, HookLike, Start, as_hook, tell
from coterie.training.run import Run, Step, Stopped

MAY_DIFFER = frozenset({"steps", "evaluate_every", "estimates", "not_measured", "capture"})
"""Settings that may change when a run is resumed."""


def check_free(out: Path | None, resume: bool) -> None:
    """Refuse a folder that holds a run, unless it is to be resumed."""
    if (
        out
        and not resume
        and ((out / "record.jsonl").exists() or checkpoint.saved(out / "checkpoints"))
    ):
        raise KnobError(
            f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another"
            " folder"
        )


def with_earlier_choice(
    configuration: Configuration, out: Path | None, resume: bool
) -> Configuration:
    """Return the configuration with choice and constants of the run left in `out`, if all else is as it was."""
    check_free(out, resume)
    path = out and out / "record.jsonl"
    if path is None or not path.exists():
        return configuration
    before = Record.load(path).configuration
    if configuration.differences(before, MAY_DIFFER):
        return configuration
    configuration = replace(configuration, choice=before.choice, estimates=before.estimates)
    return replace(configuration, not_measured=before.not_measured)


class ResumableRun:
    """What the later steps of a run depend on, and the folder that it is saved in."""

    def __init__(self, spec: RunSpec, learner: Learner, guard: Guard | None) -> None:
        self.spec, self.learner, self.guard = spec, learner, guard
        self.left_out: dict[str, dict[str, int]] = {}  # how often each peer was, by reason
        # the steps without each peer: the first and the last one of every stretch
        self.absent: dict[str, list[list[int]]] = {}
        self.travelled: dict[str, Traffic] = {}  # before this session
        self.losses: list[float] = []  # user 0's, since the last evaluation
        self.folder = RunFolder()
        self.record: Record

    def resumed(self, out: Path, configuration: Configuration) -> Record | None:
        """Go on from the last checkpoint in a folder and return the record there.

        None where nothing was saved.
        """
        saved, path = checkpoint.saved(out / "checkpoints"), out / "record.jsonl"
        if not saved:
            return None
        if not path.exists():
            raise CheckpointError(
                f"{saved[-1]} stands without the record {path}; put it back, or name another folder"
            )
        record = Record.load(path)
        state, path = checkpoint.load_last(saved, self.learner.x.device)
        self.load_state_dict(state, configuration, path)
        record.configuration = configuration
        record.cut(self.learner.step)
        self.folder.saved_at = self.learner.step
        return record

    def save(self) -> Path | None:
        """Write a checkpoint, where there is a folder for it and this step has none yet, and return its path."""

        def content() -> dict[str, Any]:
            self.record.before_checkpoint(self.learner.step)
            return self.state_dict()

        return self.folder.save(self.learner.step, content)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "configuration": self.record.configuration.to_plain(),
            "learner": self.learner.state_dict(),
            "guard": self.guard and self.guard.state_dict(),
            "left_out": self.left_out,
            "absent": self.absent,
            "traffic": _plain(total(self.travelled, self.learner.engine.traffic())),
            "losses": self.losses,
            "costs": _plain(self.learner.costs.by_user()),
        }

    def load_state_dict(
        self, state: dict[str, Any], configuration: Configuration, path: Path
    ) -> None:
        """Go on from a state; one of another run, or of something else, is a `CheckpointError`."""
        try:
            self._take_up(state, configuration, path)
        except (
            AttributeError,
            LookupError,
            TypeError,
        ) as error:  # whole, but not made by `state_dict`
            raise CheckpointError(
                f"the checkpoint {path} does not hold the state of a run ({error!r}); delete it, or"
                " name another folder"
            ) from error

    def _take_up(self, state: dict[str, Any], configuration: Configuration, path: Path) -> None:
        before = Configuration.from_plain(state["configuration"])
        # which it plans by
        divided = {"steps"} if algorithm_of(self.spec.rule).plans_by_steps else set()
        for key, (then, now) in configuration.differences(before, MAY_DIFFER - divided).items():
            why = "resume with the same settings, or name another folder"
            if key in divided:
                why = (
                    "the rule divides the steps before the first one, so that a run with others is"
                )
                why += " another from its start: name another folder"
            raise CheckpointError(
                f"the checkpoint {path} is of another run: `{key}` was {then!r} and is now {now!r};"
                f" {why}"
            )
        try:
            self.learner.load_state_dict(state["learner"])
            if self.guard is not None:
                self.guard.load_state_dict(state["guard"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: {error}; resume with the same model,"
                " or name another folder"
            ) from error
        if self.learner.step > self.spec.steps:
            raise CheckpointError(
                f"the checkpoint {path} is of a run that has taken {self.learner.step} steps, more"
                f" than `steps`, {self.spec.steps}; ask for at least as many, or name another"
                " folder"
            )
        self.left_out, self.losses = state["left_out"], state["losses"]
        self.absent = state.get("absent", {})  # which earlier versions did not note
        self.travelled = {name: Traffic(**each) for name, each in state["traffic"].items()}
        self.learner.costs.load(state["costs"])


def _plain(by_user: Mapping[str, Cost | Traffic]) -> dict[str, dict[str, float]]:
    return {name: asdict(each) for name, each in by_user.items()}


Taken: TypeAlias = tuple[float, Mapping[str, str]]
"""User 0's loss in a step that was taken, and who was left out of it and why."""
MOST_REASONS, OTHER_REASONS = 20, "other reasons"
"""How many reasons why a peer was left out are told apart."""
MOST_STRETCHES = 1000
"""Of steps without a peer; the last one then goes on, gaps or not."""


class OngoingRun(ResumableRun):
    """One of the runs that `Loop` takes through their steps.

    `captured` are the steps of learner and shadow, `asked` what was to be prepared.
    """

    def __init__(
        self,
        spec: RunSpec,
        learner: Learner,
        hooks: Sequence[HookLike] = (),
        *,
        save_every: int = 1,
        guard: Guard | None = None,
        captured: Captured | None = None,
        asked: RunSpec | None = None,
    ) -> None:
        if isinstance(learner.scheduler, ReduceLROnPlateau) and spec.me.validation is None:
            raise KnobError(
                f"`ReduceLROnPlateau` follows the validation loss, but {spec.me.name!r} has no"
                " validation set"
            )
        super().__init__(spec, learner, guard)
        self.save_every, self.captured, self.asked = save_every, captured, asked or spec
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

    def open(self, configuration: Configuration, claim: Claim | None, resume: bool) -> None:
        """Begin the record, or resume the run that was left in the folder that was claimed."""
        out, self.folder = None if claim is None else claim.folder, RunFolder(claim)
        record = self.resumed(out, configuration) if out and resume else None
        if record is None:
            check_free(out, resume)
            # what fails on the validation set is told before anything is written
            self.first = self._validate()
            record = Record(configuration, out and out / "record.jsonl")
        self.begin(record)

    def begin(self, record: Record) -> None:
        """Begin with a record, which is empty at the first step, and tell the hooks."""
        self.record = record
        start = Start(self.spec, self.learner.followed, record.configuration, self.learner.step)
        tell(self.hooks, "on_start", start)

    def first_point(self, validation: Mapping[str, float] | None = None) -> None:
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
        validation: Mapping[str, float] | None = None,
    ) -> bool:
        """Evaluate, save and tell the hooks after a step, as is due.

        Say whether a hook ends the run.
        """
        step = self.learner.step
        point = self.evaluate(validation) if self.due else None
        self.whole = True
        if step % self.save_every == 0:
            self.save()
        return self.call_hooks(own_loss, left_out, point)

    def call_hooks(self, own_loss: float, left_out: Mapping[str, str], point: Point | None) -> bool:
        """Tell all hooks of the step that was taken; say whether one of them ends the run."""
        if not self._on_step:
            return False
        learner = self.learner
        best_loss = learner.best.get("loss")
        step = Step(
            learner.step,
            own_loss,
            learner.weight,
            left_out,
            point,
            learner.model,
            best_loss,
            self.tau,
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

    def take_block(self, captured: Captured, most: int) -> Taken | None:
        """Take at most so many captured steps; None where the next is no such step."""
        self.whole = False
        with attributing_errors_to("the model, the loss or the optimizer"):
            losses = captured.advance(most)
        return None if losses is None else self.took(losses)

    def took(self, losses: list[float]) -> Taken:
        """Note steps that were taken, with user 0's loss in each, and that nobody was left out of."""
        self.losses += losses
        return losses[-1], {}

    def ask(self, answers: Mapping[Learner, Answers | None]) -> None:
        """Write the directions of the next step, by answers that were asked for with those of other runs."""
        self.whole = True  # until the step is taken
        try:
            with attributing_errors_to("the model or the loss"):
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
        for learner in self.stepping:
            learner.advanced(1)
        step = self._taken
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
        with attributing_errors_to("the model or the loss"):
            return self.learner.next_step()

    def _validate(self) -> Mapping[str, float] | None:
        """Return the loss and the metrics on the validation set, where there is one."""
        model, spec, held_out = self.learner.model, self.spec, self.spec.me.validation
        return None if held_out is None else evaluate(model, spec.loss, held_out, spec.metrics)

    def evaluate(self, validation: Mapping[str, float] | None = None) -> Point:
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
        given = (
            learner.state,
            learner.step,
            end.best_step,
            scores[1],
            stopped,
            learner.models(),
            alone,
        )
        rest = (
            self.folder.unwritten(),
            self.asked,
            learner.out_of_fold() if self.guard is None else None,
        )
        run = Run(model, self.record, *given, *rest)
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
        return UserCodeError(
            f"{error}, after {counted(self.learner.step, 'step')}; {self.folder.where()}", run
        )

    def _lost(self, lost: PeerLost) -> PeerLost:
        """Save the state before this step, and return the error with where it is."""
        path, run = self.save(), self.finish(Stopped.PEER_LOST, 0.0)
        where = "in this error's `run`"
        if path:
            where = f"saved in {path}; start everybody again and resume"
        return PeerLost(
            f"{lost}. The state after {counted(self.learner.step, 'step')} is {where}",
            lost.peers,
            run,
        )

    def _not_finite(self, step: NextStep, of_rule: str | None = None) -> GradientError:
        """Save the state before this step, and return an error that says where it is."""
        path, run = self.save(), self.finish(Stopped.NOT_FINITE, 0.0)
        where = f"saved in {path}" if path else "in this error's `run`"
        own = (
            f"user 0's own gradient is not finite at step {self.learner.step} (loss"
            f" {float(step.own_loss):.4g})"
        )
        remedy = (
            "Start again with a lower `lr`, or look for extreme values in the examples of"
            f" {self.spec.me.name!r}"
        )
        if of_rule is not None:
            remedy = (
                "Look at what the rule divides by, or for a peer whose gradients are very large"
            )
        return GradientError(f"{of_rule or own}; the state before it is {where}. {remedy}", run)
