"""Trackers by name: hooks that are made for a run's folder. TensorBoard is the first."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.recording.result import Point
from coterie.registry import Registry
from coterie.training.hooks import Hook, Start
from coterie.training.run import Run

TRACKERS: Registry[Callable[[Path], Hook]] = Registry("tracker", "coterie.trackers")
"""What makes a hook from the folder of a run."""

register_tracker = TRACKERS.register


@register_tracker("tensorboard")
class TensorBoard(Hook):
    """Write every point to TensorBoard, where it is installed, into `tensorboard` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def on_start(self, start: Start) -> None:
        """Open the file."""
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard.writer import SummaryWriter

            with self._or_not_at_all():
                self._writer = SummaryWriter(str(self._folder))

    def on_evaluation(self, point: Point) -> None:
        """Write the point."""
        if self._writer is not None:
            with self._or_not_at_all():
                for name, value in point.to_plain().items():
                    if name != "step":
                        self._writer.add_scalar(name, value, point.step)
                self._writer.flush()

    def on_end(self, run: Run) -> None:
        """Close the file."""
        if self._writer is not None:
            with self._or_not_at_all():
                self._writer.close()

    @contextmanager
    def _or_not_at_all(self) -> Iterator[None]:
        """Write no more where that fails: a run does not end for its curves."""
        try:
            yield
        except OSError as error:
            self._writer = None
            warnings.warn(f"TensorBoard's {self._folder} is written no more: {error}", stacklevel=2)
