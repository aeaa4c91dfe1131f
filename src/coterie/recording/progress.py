"""The progress bar, TensorBoard, and a Ctrl-C that waits for the step to end."""

from __future__ import annotations

import importlib.util
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

Show: TypeAlias = Callable[[int, float, float, float | None], None]
"""Show a step: how many are done, the own loss and the weight on peers (not shown where NaN), the best validation
loss if there is one."""


@contextmanager
def progress_bar(wanted: bool | None, description: str, steps: int) -> Iterator[Show]:
    """Give a function that shows progress; it does nothing where no bar is wanted.

    Args:
        wanted: whether to show a bar; None: when standard error is a terminal.
        description: what is running.
        steps: how many steps there will be.
    """
    if wanted is None:
        wanted = sys.stderr.isatty()
    if not wanted or importlib.util.find_spec("rich") is None:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=steps, numbers="")

        def show(step: int, own_loss: float, weight: float, validation: float | None) -> None:
            shown = [f"own loss {own_loss:.4g}"] * (not math.isnan(own_loss))
            shown += [f"peers' weight {weight:.2f}"] * (not math.isnan(weight))
            if validation is not None:
                shown.append(f"best validation loss {validation:.4g}")
            bar.update(task, completed=step, numbers=" · ".join(shown))

        yield show


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; a second Ctrl-C stops at once.

    A step is thus never left half done. Outside the main thread signals cannot be caught: nothing changes there.
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


@contextmanager
def tensorboard(folder: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give a function that writes a point to TensorBoard, where it is installed and there is a folder."""
    if folder is None or importlib.util.find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def write(point: dict[str, Any]) -> None:
            for name, value in point.items():
                if isinstance(value, int | float) and name != "step":
                    writer.add_scalar(name, value, point["step"])
            writer.flush()

        yield write
