"""A run as it goes: its track and guard, recorded, saved and taken up again."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.errors import CheckpointError, GradientError, KnobError, PeerLost
from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.metrics import Metric
from coterie.gradients.gradients import Gradients, is_finite
from coterie.learners.learner import Track
from coterie.recording import checkpoint
from coterie.recording.configuration import Configuration
from coterie.recording.costs import Cost
from coterie.recording.record import Record
from coterie.recording.result import End, GuardCheck, GuardDecision, Point
from coterie.recording.traffic import Traffic, total
from coterie.training.captured import Captured
from coterie.training.guard import Guard
from coterie.training.run import Run
from coterie.users.user import Loss, User

MAY_DIFFER = frozenset({"steps", "evaluate_every", "estimates", "capture"})
"""What a resumed run may be told otherwise, or need not know."""


class TrainingState:
    """A run as it goes: the model's track, its guard, and what has been recorded.

    Args:
        track: the model on its way.
        loss: the mean loss of a batch from (output, target).
        me: user 0.
        metrics: by name, functions of (outputs, targets) over a whole set.
        guard: the shadow it is compared with, or None.
        captured: the steps of track and shadow as one program, or None.
    """

    def __init__(
        self,
        track: Track,
        loss: Loss,
        me: User,
        metrics: Mapping[str, Metric] | None,
        guard: Guard | None,
        *,
        captured: Captured | None = None,
    ) -> None:
        if isinstance(track.scheduler, ReduceLROnPlateau) and me.validation is None:
            raise KnobError(
                f"`ReduceLROnPlateau` follows the validation loss, but {me.name!r} has no validation set"
            )
        self.track, self.guard, self.captured = track, guard, captured
        self.loss, self.me, self.metrics = loss, me, metrics
        self.left_out: dict[str, dict[str, int]] = {}
        self.travelled: dict[str, Traffic] = {}  # before this session
        self.losses: list[float] = []
        self.out: Path | None = None
        self.saved_at: int | None = None

    def advance(self, most: int = 1) -> tuple[float, Mapping[str, str]]:
        """Take a step, the guard's shadow too; or several, at most so many, where they are captured.

        Returns:
            User 0's loss in the last of them, and who was left out of it and why.
        """
        losses = self.captured and self.captured.advance(most)
        if losses:
            self.losses += losses
            return losses[-1], {}
        g = self._one_step()
        self.losses.append(float(g.own_loss))
        for name, reason in g.left_out.items():
            counts = self.left_out.setdefault(name, {})
            counts[reason] = counts.get(reason, 0) + 1
        return self.losses[-1], g.left_out

    def _one_step(self) -> Gradients:
        """Take one step, and return the gradients that were used."""
        try:
            g = self.track.gradients()
        except PeerLost as lost:
            raise self._lost(lost) from lost
        if self.guard is not None:
            alone = self.guard.shadow.gradients()
            if not is_finite(alone.own):
                raise self._not_finite(alone)
            if not is_finite(g.own):  # the peers led the model astray, not user 0's examples
                self.guard.restart(self.track)
                g = self.track.gradients()
            self.guard.shadow.advance(alone)
        elif not is_finite(g.own):
            raise self._not_finite(g)
        self.track.advance(g)
        return g

    def evaluate(self, validation: Mapping[str, float] | None = None) -> Point:
        """Record a point, keep the model if it is the best by validation loss so far, and ask the guard.

        Args:
            validation: loss and metrics on the validation set, where they are known.
        """
        step, weight = self.track.step, self.track.weight  # as they are before the guard restarts the run
        own_loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.losses = []
        if self.me.validation is not None:
            validation = validation or evaluate(self.track.model, self.loss, self.me.validation, self.metrics)
            self.track.consider(validation["loss"])
        point = Point(
            step=step,
            weight=None if math.isnan(weight) else weight,
            own_loss=own_loss,
            left_out=sum(sum(reasons.values()) for reasons in self.left_out.values()),
            validation=validation or {},
            guard=self._checked(),
        )
        self.record.add(point)
        return point

    def _checked(self) -> GuardCheck | None:
        """Return what the guard says, which may restart the run."""
        if self.guard is None:
            return None
        compared = self.guard.check(self.track)
        return GuardCheck(
            alone_loss=compared.alone,
            difference=compared.difference,
            error=compared.error,
            restarts=self.guard.restarts,
        )

    def open(self, configuration: Configuration, out: Path | None, resume: bool) -> None:
        """Begin the record, or take up the run that was left in `out`."""
        self.out = out
        path = out and out / "record.jsonl"
        found = checkpoint.saved(out / "checkpoints") if out else []
        if out and resume and found and path and path.exists():
            self.record = Record.load(path)
            self.load_state_dict(checkpoint.load(found[-1], self.track.x.device), configuration, found[-1])
            self.record.configuration = configuration
            self.record.cut(self.track.step)
            self.saved_at = self.track.step
            return
        _check_free(out, resume)
        if found:
            raise CheckpointError(
                f"{found[-1]} stands without the record {path}; put it back, or name another folder"
            )
        self.record = Record(configuration, path)
        self.evaluate()

    def save(self) -> Path | None:
        """Write a checkpoint, where there is a folder for it and this step has none yet."""
        if self.out is None:
            return None
        if self.saved_at == self.track.step:
            return checkpoint.saved(self.out / "checkpoints")[-1]
        self.record.sync()
        self.saved_at = self.track.step
        return checkpoint.save(self.out / "checkpoints", self.track.step, self.state_dict())

    def finish(self, stopped: str | None, seconds: float) -> Run:
        """Save, look at the test set with the best model if the run has ended, and return the run."""
        self.save()
        model, best, decision = self._served()
        test: dict[str, float] = {}
        if self.me.test is not None and stopped in (None, "a callback"):
            test = evaluate(model, self.loss, self.me.test, self.metrics)
        end = End(
            step=self.track.step,
            best_step=best.get("step", self.track.step),
            seconds=round(seconds, 3),
            stopped=stopped,
            test=test,
            guard=decision,
            tau=self._tau(),
            left_out=self.left_out,
            costs=self.track.costs.by_user(),
            traffic=total(self.travelled, self.track.engine.traffic()),
        )
        self.record.finish(end)
        models = self.track.models()
        state, step = self.track.state, self.track.step
        return Run(model, self.record, state, step, end.best_step, test, stopped, models)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "configuration": self.record.configuration.to_plain(),
            "track": self.track.state_dict(),
            "guard": self.guard and self.guard.state_dict(),
            "left_out": self.left_out,
            "traffic": _plain(total(self.travelled, self.track.engine.traffic())),
            "losses": self.losses,
            "costs": _plain(self.track.costs.by_user()),
        }

    def load_state_dict(self, state: dict[str, Any], configuration: Configuration, path: Path) -> None:
        """Take up a state; one of another run is a `CheckpointError`."""
        before = Configuration.from_plain(state["configuration"])
        for key, (then, now) in configuration.differences(before, MAY_DIFFER).items():
            raise CheckpointError(
                f"the checkpoint {path} is of another run: `{key}` was {then!r} and is now {now!r}; "
                "resume with the same settings, or name another folder"
            )
        try:
            self.track.load_state_dict(state["track"])
            if self.guard is not None:
                self.guard.load_state_dict(state["guard"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: {error}; resume with the same model, or name another "
                "folder"
            ) from error
        self.left_out, self.losses = state["left_out"], state["losses"]
        self.travelled = {name: Traffic.from_plain(each) for name, each in state["traffic"].items()}
        self.track.costs.load(state["costs"])

    def _served(self) -> tuple[Any, dict[str, Any], GuardDecision | None]:
        """Return the model to serve, what it was the best of, and how collaboration compares with Alone."""
        model, best = copy.deepcopy(self.track.model), self.track.best
        if best:
            model.load_state_dict(best["model"])
        if self.guard is None or not self.guard.shadow.best:
            return model, best, None
        alone = copy.deepcopy(self.guard.shadow.model)
        alone.load_state_dict(self.guard.shadow.best["model"])
        compared = self.guard.compare(model, alone)
        keep_alone = not best or self.guard.shadow.best["loss"] < best["loss"]
        decision = GuardDecision(
            served="alone" if keep_alone else "collaborative",
            difference=compared.difference,
            error=compared.error,
        )
        return (alone, self.guard.shadow.best, decision) if keep_alone else (model, best, decision)

    def _lost(self, lost: PeerLost) -> PeerLost:
        """Save the state before this step, and return the error with where it is."""
        path = self.save()
        run = self.finish("a lost peer", 0.0)
        where = f"saved in {path}; start everybody again and resume" if path else "in this error's `run`"
        return PeerLost(f"{lost}. The state after {self.track.step} steps is {where}", lost.peers, run)

    def _tau(self) -> dict[str, float]:
        """Return each peer's share of the peers' weight at the end, where there is such a thing."""
        found = self.track.tau()
        whole = sum(found.values())
        return {name: float(weight / whole) for name, weight in found.items()} if whole else {}

    def _not_finite(self, g: Gradients) -> GradientError:
        """Save the state before this step, and return an error that says where it is."""
        path = self.save()
        run = self.finish("a non-finite gradient", 0.0)
        where = f"saved in {path}" if path else "in this error's `run`"
        return GradientError(
            f"user 0's own gradient is not finite at step {self.track.step} (loss {float(g.own_loss):.4g}); the "
            f"state before it is {where}. Start again with a lower `lr`, or look for extreme values in the "
            f"examples of {self.me.name!r}",
            run,
        )


def found_before(configuration: Configuration, out: Path | None, resume: bool) -> Configuration:
    """Return the configuration with the choice and the constants that the run left in `out` began with.

    They are taken over where everything else is as it was.
    """
    _check_free(out, resume)
    path = out and out / "record.jsonl"
    if path is None or not path.exists():
        return configuration
    before = Record.load(path).configuration
    if configuration.differences(before, MAY_DIFFER):
        return configuration
    return replace(
        configuration, choice=before.choice, estimates=before.estimates, not_measured=before.not_measured
    )


def _plain(by_user: Mapping[str, Cost | Traffic]) -> dict[str, dict[str, float]]:
    return {name: asdict(each) for name, each in by_user.items()}


def _check_free(out: Path | None, resume: bool) -> None:
    if out and not resume and ((out / "record.jsonl").exists() or checkpoint.saved(out / "checkpoints")):
        raise KnobError(f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another folder")
