"""Hooks: what is called while a run goes on. Checkpoints, TensorBoard and the progress bar are hooks too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from coterie.errors import KnobError
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration
from coterie.recording.progress import progress_bar
from coterie.recording.result import Point
from coterie.training.choose import Followed
from coterie.training.run import Run, Step


@dataclass(frozen=True, eq=False)
class Start:
    """What hooks are told before the first step.

    Args:
        spec: the run, with the model that is trained.
        rule: the rule that is followed, as it was chosen, or the method.
        configuration: what the record says of the run.
        step: how many steps were taken before, in a run that is resumed.
    """

    spec: RunSpec
    rule: Followed
    configuration: Configuration
    step: int = 0


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


class Hooks:
    """The hooks of a run, called in order.

    Args:
        hooks: `Hook`s and functions of a `Step`.
    """

    def __init__(self, hooks: Iterable[HookLike] = ()) -> None:
        self._hooks = [as_hook(hook) for hook in hooks]
        self._on_step = [hook for hook in self._hooks if type(hook).on_step is not Hook.on_step]

    @property
    def want_every_step(self) -> bool:
        """Whether any hook must be told of every step."""
        return any(hook.every_step for hook in self._on_step)

    def start(self, start: Start) -> None:
        """Tell all hooks that a run starts."""
        for hook in self._hooks:
            hook.on_start(start)

    def step(self, step: Step) -> bool:
        """Tell all hooks of a step; say whether one of them ends the run."""
        return True in [hook.on_step(step) is True for hook in self._on_step]

    def evaluation(self, point: Point) -> None:
        """Tell all hooks of a point."""
        for hook in self._hooks:
            hook.on_evaluation(point)

    def end(self, run: Run) -> None:
        """Tell all hooks that a run has ended."""
        for hook in self._hooks:
            hook.on_end(run)


def as_hook(hook: HookLike) -> Hook:
    """Return a hook; a function becomes one.

    Example:
        >>> as_hook(print).every_step
        True
    """
    if isinstance(hook, Hook):
        return hook
    if callable(hook) and not isinstance(hook, type):
        return _OnStep(hook)
    raise KnobError(f"`hooks` must be functions of a `Step` or instances of `coterie.Hook`, got {hook!r}")


class _OnStep(Hook):
    """A function that is called after every step."""

    def __init__(self, function: Callable[[Step], object]) -> None:
        self._function = function

    def on_step(self, step: Step) -> object:
        return self._function(step)


class CheckpointHook(Hook):
    """Save the run every so many steps.

    Args:
        save: writes a checkpoint.
        every: steps between checkpoints.
    """

    every_step = False

    def __init__(self, save: Callable[[], Path | None], every: int) -> None:
        self._save, self._every = save, every

    def on_step(self, step: Step) -> None:
        """Save where it is time."""
        if step.step % self._every == 0:
            self._save()


class ProgressHook(Hook):
    """Show every step in a progress bar.

    Args:
        wanted: whether to show a bar; None: when standard error is a terminal.
        stack: closes the bar.
    """

    every_step = False

    def __init__(self, wanted: bool | None, stack: ExitStack) -> None:
        self._wanted, self._stack = wanted, stack

    def on_start(self, start: Start) -> None:
        """Open the bar."""
        bar = progress_bar(self._wanted, type(start.rule).__name__, start.spec.steps)
        self._show = self._stack.enter_context(bar)

    def on_step(self, step: Step) -> None:
        """Show the step."""
        self._show(step.step, step.own_loss, step.weight, step.best_loss)
