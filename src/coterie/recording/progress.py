"""The progress bar."""

import functools
import importlib.util
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Show: TypeAlias = Callable[[int, float, float, float | None], None]
"""Show a step: how many are done, the own loss and the weight on peers (not shown where NaN), the best validation
loss if there is one."""


@contextmanager
def progress_bar(wanted: bool | None, description: str, steps: int) -> Iterator[Show]:
    """Give a function that shows progress.

    It does nothing where no bar is wanted (None: outside a terminal).
    """
    wanted = sys.stderr.isatty() if wanted is None else wanted
    if not wanted or importlib.util.find_spec("rich") is None:
        yield lambda *_: None
        return
    with rich_bar(description, steps) as update:

        def show(step: int, own_loss: float, weight: float, validation: float | None) -> None:
            update(completed=step, numbers=numbers_of(own_loss, weight, validation))

        yield show


@contextmanager
def rich_bar(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Give what updates a bar in the terminal: `completed` or `advance`, `description`, `numbers`."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total, numbers=""))


def numbers_of(own_loss: float, weight: float, validation: float | None) -> str:
    """Return the numbers of a step in words, without those that are not known.

    Example:
        >>> numbers_of(0.51234, 0.25, None)
        "own loss 0.5123 · peers' weight 0.25"
    """
    shown = [f"own loss {own_loss:.4g}"] * (not math.isnan(own_loss))
    shown += [f"peers' weight {weight:.2f}"] * (not math.isnan(weight))
    shown += [] if validation is None else [f"best validation loss {validation:.4g}"]
    return " · ".join(shown)


class TimeLeft:
    """Says how long a run will still take, by the steps since it was made.

    Example:
        >>> left = TimeLeft(0, 100)
        >>> left(0)
        ''
    """

    def __init__(self, step: int, steps: int) -> None:
        self._first, self._steps, self._began = step, steps, time.monotonic()

    def __call__(self, step: int) -> str:
        """Return it in words, with what parts them from others; nothing where it is not known."""
        if not self._first < step < self._steps:
            return ""
        passed = time.monotonic() - self._began
        seconds = passed * (self._steps - step) / (step - self._first)
        return f" · {seconds / 60:.0f} min left" if seconds > 90 else f" · {seconds:.0f} s left"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; a second Ctrl-C stops at once.

    A step is thus never left half done. Outside the main thread signals cannot be caught: nothing
    changes there.
    """
    pressed = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
