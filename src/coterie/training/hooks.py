"""Hooks: what is called while a run goes on. TensorBoard and the progress bar are hooks too."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from coterie.choosing.chooser import TellsCost
from coterie.errors import KnobError, UserCodeError, attributing_errors_to
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration, describe
from coterie.recording.progress import progress_bar
from coterie.recording.result import Point
from coterie.training.algorithm import Followed
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
    """Show every step in a progress bar, which the stack closes.

    None: when standard error is a terminal.
    """

    every_step = False

    def __init__(self, wanted: bool | None, stack: ExitStack) -> None:
        self._wanted, self._stack = wanted, stack

    def on_start(self, start: Start) -> None:
        """Say what a rule will cost that asks much, and open the bar."""
        if isinstance(start.rule, TellsCost) and (
            sys.stderr.isatty() if self._wanted is None else self._wanted
        ):
            print(start.rule.cost_in_words(), file=sys.stderr)
        bar = progress_bar(self._wanted, type(start.rule).__name__, start.spec.steps)
        self._show = self._stack.enter_context(bar)

    def on_step(self, step: Step) -> None:
        """Show the step."""
        self._show(step.step, step.own_loss, step.weight, step.best_loss)
