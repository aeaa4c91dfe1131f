"""Hooks: what is called while a run goes on; the progress bar, and trackers by name, such as TensorBoard."""

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from coterie.errors import KnobError, UserCodeError, attributing_errors_to
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration, describe
from coterie.recording.progress import progress_bar
from coterie.recording.result import Point
from coterie.registry import Registry
from coterie.training.algorithm import Followed, algorithm_of
from coterie.training.run import Run, Step


@dataclass(frozen=True, eq=False)
class Start:
    """What hooks are told before the first step."""

    spec: RunSpec  # with the model that is trained
    rule: Followed  # as it was chosen, or the method
    configuration: Configuration  # what the record says of the run
    step: int = 0  # how many were taken before, in a run that is resumed


class Hook:
    """Base of hooks: override what is needed. A function of a `Step` is a hook too.

    Example:
        >>> import torch, coterie
        >>> class Printed(Hook):
        ...     def on_evaluation(self, point):
        ...         print("step", point.step)
        ...
        ...     def on_end(self, run):
        ...         print("weight of a:", run.record.end.tau["a"])
        >>> me, a = (coterie.User(name, torch.eye(2), torch.ones(2, 1)) for name in ("me", "a"))
        >>> rule, loss = coterie.WeightedAveraging(0.5), torch.nn.functional.mse_loss
        >>> run = coterie.train(torch.nn.Linear(2, 1), loss, me, [a], rule, steps=2, hooks=[Printed()])
        step 0
        step 1
        step 2
        weight of a: 1.0
    """

    every_step: bool = True
    """False: `on_step` may be called after several steps at once, where these are captured."""

    def on_start(self, start: Start) -> None:
        """Be told of the run before its first step."""

    def on_step(self, step: Step) -> object:
        """Be told of a step that was taken; True ends the run."""

    def on_evaluation(self, point: Point) -> None:
        """Be told of a point that was recorded, the first of them before the first step."""

    def on_end(self, run: Run) -> None:
        """Be told of the run when it has ended, for whatever reason."""


HookLike: TypeAlias = Hook | Callable[[Step], object]
"""A hook, or a function that is called with a `Step` after every step and ends the run where it returns True."""


def as_hook(hook: HookLike) -> Hook:
    """Return a hook; a function becomes one."""
    if isinstance(hook, Hook):
        return hook
    if callable(hook) and not isinstance(hook, type):
        return _OnStep(hook)
    raise KnobError(
        f"`hooks` must be functions of a `Step` or instances of `coterie.Hook`, got {hook!r}"
    )


def tell(hooks: Sequence[Hook], what: str, about: object) -> list[object]:
    """Call a method of all hooks, also of those after one that raises, and return what they return."""
    answers, failed = [], None
    for hook in hooks:
        try:
            with attributing_errors_to(
                f"the hook {describe(hook.function if isinstance(hook, _OnStep) else type(hook))}"
            ):
                answers.append(getattr(hook, what)(about))
        except UserCodeError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return answers


class _OnStep(Hook):
    """A function that is called after every step."""

    def __init__(self, function: Callable[[Step], object]) -> None:
        self.function = function

    def on_step(self, step: Step) -> object:
        return self.function(step)


class ProgressHook(Hook):
    """Show every step in a progress bar, which the stack closes."""

    every_step = False

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def on_start(self, start: Start) -> None:
        """Say what a rule will cost that asks much, and open the bar."""
        if cost := algorithm_of(start.rule).cost_in_words():
            print(cost, file=sys.stderr)
        bar = progress_bar(
            wanted=True, description=type(start.rule).__name__, steps=start.spec.steps
        )
        self._show = self._stack.enter_context(bar)

    def on_step(self, step: Step) -> None:
        """Show the step."""
        self._show(step.step, step.own_loss, step.weight, step.best_loss)


TRACKERS: Registry[Callable[[Path], Hook]] = Registry("tracker", "coterie.trackers")
"""What makes a hook from the folder of a run."""

register_tracker = TRACKERS.register

USUAL = "tensorboard"
"""What follows a run where nothing else is named, if it is installed."""

MAX_PARAMETER = 500
"""How many characters MLflow stores of a parameter, in all its versions."""


def trackers_of(folder: Path, names: Sequence[str] | None) -> list[Hook]:
    """Return the hooks that follow a run.

    Those named; when None the usual one, where it is installed.
    """
    if names is None:
        names = [USUAL] if importlib.util.find_spec(USUAL) is not None else []
    return [TRACKERS[name](folder) for name in names]


class Tracker(Hook):
    """Base of trackers that another package stores: say how a run is opened, added to and closed.

    What fails there is told once, and nothing more is tracked: a run does not end for its curves.
    """

    package: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.works = importlib.util.find_spec(self.package) is not None
        if not self.works:
            raise KnobError(
                f"this tracker needs {self.package!r}, which is not installed; `pip install"
                f" {self.package}`"
            )

    def open(self, package: Any, configuration: Mapping[str, Any]) -> None:
        """Begin a run with what it was asked to do."""

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add the numbers of a step."""

    def close(self, summary: Mapping[str, Any], finished: bool) -> None:
        """Add the run's last numbers and texts, and end it."""

    def on_start(self, start: Start) -> None:
        """Open the run."""
        self._attempt(
            lambda: self.open(importlib.import_module(self.package), start.configuration.to_plain())
        )

    def on_evaluation(self, point: Point) -> None:
        """Add the point."""
        numbers = {name: value for name, value in point.to_plain().items() if name != "step"}
        self._attempt(lambda: self.add(numbers, point.step))

    def on_end(self, run: Run) -> None:
        """Add the result, and close the run."""
        end = run.record.end
        summary: dict[str, Any] = {f"test_{name}": value for name, value in end.test.items()}
        summary |= {f"tau/{name}": weight for name, weight in end.tau.items()}
        summary |= {"best_step": end.best_step, "seconds": end.seconds, "verdict": end.verdict}
        self._attempt(lambda: self.close(summary, run.stopped is None))

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self.works:
            return
        try:
            action()
        except Exception as error:  # another package's, and perhaps its server's
            self.works = False
            warnings.warn(f"{type(self).__name__} tracks this run no more: {error}", stacklevel=4)


@register_tracker("tensorboard")
class TensorBoard(Tracker):
    """Write every point to TensorBoard, into `tensorboard` in the run's folder."""

    package = "tensorboard"

    def open(self, package: Any, configuration: Mapping[str, Any]) -> None:
        """Open the file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / "tensorboard"))

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Write the numbers."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any], finished: bool) -> None:
        """Close the file."""
        self._writer.close()


@register_tracker("mlflow")
class MLflow(Tracker):
    """Add the run to MLflow.

    Where `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` say, or MLflow's defaults.
    """

    package = "mlflow"

    def open(self, package: Any, configuration: Mapping[str, Any]) -> None:
        """Begin a run, within the one that is open where there is one."""
        self._mlflow = package
        nested = package.active_run() is not None
        package.start_run(run_name=self.folder.name, nested=nested)
        package.log_params(
            {name: str(value)[:MAX_PARAMETER] for name, value in configuration.items()}
        )

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add metrics."""
        self._mlflow.log_metrics(
            {_plain_name(name): float(v) for name, v in numbers.items()}, step=step
        )

    def close(self, summary: Mapping[str, Any], finished: bool) -> None:
        """Add metrics, the verdict as a tag and the record as an artifact; end the run."""
        numbers = {name: value for name, value in summary.items() if not isinstance(value, str)}
        self.add(numbers, int(summary["best_step"]))
        self._mlflow.set_tags(
            {name: value for name, value in summary.items() if isinstance(value, str)}
        )
        if (self.folder / "record.jsonl").exists():
            self._mlflow.log_artifact(str(self.folder / "record.jsonl"))
        self._mlflow.end_run("FINISHED" if finished else "KILLED")


class _LikeWandb(Tracker):
    """What Weights & Biases and trackio have in common.

    A run that numbers are logged to by step.
    """

    project: ClassVar[str]
    """The environment variable that names the project."""

    def options(self) -> dict[str, Any]:
        """Return more arguments of `init`."""
        return {}

    def open(self, package: Any, configuration: Mapping[str, Any]) -> None:
        """Begin a run."""
        project = os.environ.get(self.project, "coterie")
        self._run = package.init(
            project=project, name=self.folder.name, config=dict(configuration), **self.options()
        )

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers."""
        self._run.log(dict(numbers), step=step)


@register_tracker("wandb")
class WandB(_LikeWandb):
    """Log the run to Weights & Biases, into the run's folder where `WANDB_MODE` is offline."""

    package, project = "wandb", "WANDB_PROJECT"

    def options(self) -> dict[str, Any]:
        """Return where its files go, and that a run which is open already stays so."""
        return {"dir": str(self.folder), "reinit": "create_new"}

    def close(self, summary: Mapping[str, Any], finished: bool) -> None:
        """Add the summary, and end the run."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if finished else 1)


@register_tracker("trackio")
class Trackio(_LikeWandb):
    """Log the run to trackio, on this machine: where `TRACKIO_DIR` says, or its default."""

    package, project = "trackio", "TRACKIO_PROJECT"

    def close(self, summary: Mapping[str, Any], finished: bool) -> None:
        """Log the run's last numbers and texts, and end it."""
        self._run.log(dict(summary))
        self._run.finish()


def _plain_name(name: str) -> str:
    """Return a name that MLflow takes: letters, digits, `_-./ ` and no others."""
    return re.sub(r"[^\w\-./ ]", "_", name)
