"""A run as it goes: one step of Algorithm 1 after the other, recorded, saved and taken up again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from coterie import checkpoint
from coterie.engines import Engine
from coterie.errors import CheckpointError, GradientError, KnobError
from coterie.evaluation import Metric, evaluate
from coterie.gradients import Gradients, is_finite
from coterie.parameters import Parameters
from coterie.record import Record
from coterie.rules import Rule
from coterie.run import Run
from coterie.users import Loss, User

MAY_DIFFER = frozenset({"steps", "evaluate_every"})
"""What a resumed run may be told otherwise."""


class TrainingState:
    """A run as it goes: x, the rule's state, the optimizer, and what has been recorded.

    Everything that a later step depends on is in `state_dict`; all randomness is a function of
    (seed, user, step), so there is no generator to save.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        rule: Rule,
        *,
        engine: Engine,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        metrics: Mapping[str, Metric] | None,
    ) -> None:
        self.model, self.loss, self.me, self.metrics = model, loss, me, metrics
        self.rule, self.engine, self.optimizer, self.scheduler = rule, engine, optimizer, scheduler
        if isinstance(scheduler, ReduceLROnPlateau) and me.validation is None:
            raise KnobError(
                f"`ReduceLROnPlateau` follows the validation loss, but {me.name!r} has no validation set"
            )
        self.parameters = Parameters(model)
        self.x = self.parameters.share()
        self.state = rule.init(self.x)
        self.step = 0
        self.best: dict[str, Any] = {}
        self.left_out: dict[str, dict[str, int]] = {}
        self.losses: list[float] = []
        self.out: Path | None = None
        self.saved_at: int | None = None

    def advance(self) -> Gradients:
        """Take one step of Algorithm 1, and return the gradients it used."""
        weights = self.rule.weights(self.engine.names)
        g = self.engine.gradients(self.x, self.step, weights, self.rule.needs_rows)
        if not is_finite(g.own):
            raise self._not_finite(g)
        direction, self.state = self.rule(g, self.state)
        self.parameters.set_gradient(direction)
        self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.step += 1
        self.losses.append(float(g.own_loss))
        for name, reason in g.left_out.items():
            counts = self.left_out.setdefault(name, {})
            counts[reason] = counts.get(reason, 0) + 1
        return g

    def evaluate(self) -> dict[str, Any]:
        """Record a point, and keep the model if it is the best by validation loss so far."""
        point: dict[str, Any] = {"step": self.step, "weight": self.state["weight"]}
        if self.losses:
            point["own_loss"] = sum(self.losses) / len(self.losses)
            self.losses = []
        if self.left_out:
            point["left_out"] = sum(sum(reasons.values()) for reasons in self.left_out.values())
        if self.me.validation is not None:
            found = evaluate(self.model, self.loss, self.me.validation, self.metrics)
            point |= {f"validation_{name}": value for name, value in found.items()}
            if found["loss"] < self.best.get("loss", float("inf")):
                self.best = {
                    "step": self.step,
                    "loss": found["loss"],
                    "model": _cloned(self.model.state_dict()),
                }
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(found["loss"])
        self.record.add(point)
        return point

    def open(self, configuration: dict[str, Any], out: Path | None, resume: bool) -> None:
        """Begin the record, or take up the run that was left in `out`."""
        self.out = out
        path = out and out / "record.jsonl"
        found = checkpoint.saved(out / "checkpoints") if out else []
        if out and resume and found and path and path.exists():
            self.record = Record.load(path)
            self.load_state_dict(checkpoint.load(found[-1], self.x.device), configuration, found[-1])
            self.record.configuration = configuration
            self.record.cut(self.step)
            self.saved_at = self.step
            return
        if path and (found or path.exists()) and not resume:
            raise KnobError(
                f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another folder"
            )
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
        if self.saved_at == self.step:
            return checkpoint.saved(self.out / "checkpoints")[-1]
        self.record.sync()
        self.saved_at = self.step
        return checkpoint.save(self.out / "checkpoints", self.step, self.state_dict())

    def finish(self, stopped: str | None, seconds: float) -> Run:
        """Save, look at the test set with the best model if the run has ended, and return the run."""
        self.save()
        model = copy.deepcopy(self.model)
        if self.best:
            model.load_state_dict(self.best["model"])
        test: dict[str, float] = {}
        if self.me.test is not None and stopped in (None, "a callback"):
            test = evaluate(model, self.loss, self.me.test, self.metrics)
        end = {
            "step": self.step,
            "best_step": self.best.get("step", self.step),
            "stopped": stopped,
            "test": test,
        }
        self.record.finish(end | {"left_out": self.left_out, "seconds": round(seconds, 3)})
        return Run(model, self.record, self.state, self.step, end["best_step"], test, stopped)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "configuration": self.record.configuration,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rule": self.state,
            "best": self.best,
            "left_out": self.left_out,
            "losses": self.losses,
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
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: {error}; resume with the same model, or name another "
                "folder"
            ) from error
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.state, self.best = state["step"], state["rule"], state["best"]
        self.left_out, self.losses = state["left_out"], state["losses"]

    def _not_finite(self, g: Gradients) -> GradientError:
        """Save the state before this step, and return an error that says where it is."""
        path = self.save()
        run = self.finish("a non-finite gradient", 0.0)
        where = f"saved in {path}" if path else "in this error's `run`"
        return GradientError(
            f"user 0's own gradient is not finite at step {self.step} (loss {float(g.own_loss):.4g}); the state "
            f"before it is {where}. Lower `lr`, or look for extreme values in the examples of {self.me.name!r}",
            run,
        )


def chosen_before(configuration: Mapping[str, Any], out: Path | None, resume: bool) -> dict[str, Any] | None:
    """Return the choice that the run left in `out` was made with; None where there is none of these settings."""
    _check_free(out, resume)
    path = out and out / "record.jsonl"
    if path is None or not path.exists():
        return None
    before = Record.load(path).configuration
    same = all(before.get(key) == value for key, value in configuration.items() if key not in MAY_DIFFER)
    choice: dict[str, Any] | None = before.get("choice") if same else None
    return choice


def _check_free(out: Path | None, resume: bool) -> None:
    if out and not resume and (out / "record.jsonl").exists():
        raise KnobError(f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another folder")


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
