"""A run as it goes: its track and guard, recorded, saved and taken up again."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.errors import CheckpointError, GradientError, KnobError, PeerLost
from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.metrics import Metric
from coterie.gradients.gradients import Gradients, is_finite
from coterie.learners.learner import Track
from coterie.recording import checkpoint
from coterie.recording.record import Record
from coterie.recording.traffic import total
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
        self.travelled: dict[str, dict[str, float]] = {}  # before this session
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

    def evaluate(self, found: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Record a point, keep the model if it is the best by validation loss so far, and ask the guard.

        Args:
            found: loss and metrics on the validation set, where they are known.
        """
        point: dict[str, Any] = {"step": self.track.step}
        if not math.isnan(self.track.weight):
            point["weight"] = self.track.weight
        if self.losses:
            point["own_loss"] = sum(self.losses) / len(self.losses)
            self.losses = []
        if self.left_out:
            point["left_out"] = sum(sum(reasons.values()) for reasons in self.left_out.values())
        if self.me.validation is not None:
            found = found or evaluate(self.track.model, self.loss, self.me.validation, self.metrics)
            point |= {f"validation_{name}": value for name, value in found.items()}
            self.track.consider(found["loss"])
        if self.guard is not None:
            compared = self.guard.check(self.track)
            point |= {
                "alone_validation_loss": compared.alone,
                "guard_difference": compared.difference,
                "guard_error": compared.error,
                "guard_restarts": self.guard.restarts,
            }
        self.record.add(point)
        return point

    def open(self, configuration: dict[str, Any], out: Path | None, resume: bool) -> None:
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
        model, best, compared = self._served()
        test: dict[str, float] = {}
        if self.me.test is not None and stopped in (None, "a callback"):
            test = evaluate(model, self.loss, self.me.test, self.metrics)
        end: dict[str, Any] = {
            "step": self.track.step,
            "best_step": best.get("step", self.track.step),
            "stopped": stopped,
            "test": test,
            **compared,
            "tau": self._tau(),
            "left_out": self.left_out,
            "costs": self.track.costs.of,
            "traffic": total(self.travelled, self.track.engine.traffic()),
            "seconds": round(seconds, 3),
        }
        self.record.finish(end)
        models = self.track.models()
        state, step = self.track.state, self.track.step
        return Run(model, self.record, state, step, end["best_step"], test, stopped, models)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "configuration": self.record.configuration,
            "track": self.track.state_dict(),
            "guard": self.guard and self.guard.state_dict(),
            "left_out": self.left_out,
            "traffic": total(self.travelled, self.track.engine.traffic()),
            "losses": self.losses,
            "costs": self.track.costs.of,
        }

    def load_state_dict(self, state: dict[str, Any], configuration: dict[str, Any], path: Path) -> None:
        """Take up a state; one of another run is a `CheckpointError`."""
        for key, value in configuration.items():
            before = state["configuration"].get(key)
            if before != value and key not in MAY_DIFFER:
                raise CheckpointError(
                    f"the checkpoint {path} is of another run: `{key}` was {before!r} and is now {value!r}; "
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
        self.left_out, self.losses, self.travelled = state["left_out"], state["losses"], state["traffic"]
        self.track.costs.of.update(state["costs"])

    def _served(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the model to serve, what it was the best of, and how collaboration compares with Alone."""
        model, best = copy.deepcopy(self.track.model), self.track.best
        if best:
            model.load_state_dict(best["model"])
        if self.guard is None or not self.guard.shadow.best:
            return model, best, {}
        alone = copy.deepcopy(self.guard.shadow.model)
        alone.load_state_dict(self.guard.shadow.best["model"])
        found = self.guard.compare(model, alone)
        served = "alone" if not best or self.guard.shadow.best["loss"] < best["loss"] else "collaborative"
        compared = {"served": served, "difference": found.difference, "error": found.error}
        if served == "alone":
            return alone, self.guard.shadow.best, compared
        return model, best, compared

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


def found_before(configuration: Mapping[str, Any], out: Path | None, resume: bool) -> dict[str, Any]:
    """Return the choice and the constants that the run left in `out` began with; nothing for other settings."""
    _check_free(out, resume)
    path = out and out / "record.jsonl"
    if path is None or not path.exists():
        return {}
    before = Record.load(path).configuration
    same = all(before.get(key) == value for key, value in configuration.items() if key not in MAY_DIFFER)
    return {key: before[key] for key in ("choice", "estimates") if same and key in before}


def _check_free(out: Path | None, resume: bool) -> None:
    if out and not resume and ((out / "record.jsonl").exists() or checkpoint.saved(out / "checkpoints")):
        raise KnobError(f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another folder")
