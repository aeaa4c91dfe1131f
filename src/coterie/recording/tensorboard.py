"""TensorBoard's events of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.recording.result import Point


@contextmanager
def tensorboard(folder: Path | None) -> Iterator[Callable[[Point], None]]:
    """Give a function that writes a point to TensorBoard, where it is installed and there is a folder."""
    if folder is None or importlib.util.find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def write(point: Point) -> None:
            for name, value in point.to_plain().items():
                if name != "step":
                    writer.add_scalar(name, value, point.step)
            writer.flush()

        yield write
