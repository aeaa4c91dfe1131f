"""The record of a run: configuration, versions and curves, on disk as it grows."""

import functools
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy
import torch

from coterie.errors import DataError
from coterie.recording.configuration import Configuration
from coterie.recording.result import End, Point


class Record:
    """What happened in a run: its configuration, a point for every evaluation, and how it ended.

    With a path, every addition is written to it at once, one JSON object a line: first the configuration and
    the versions, then the points, last the end. A run that is killed leaves what it had recorded.

    Args:
        configuration: what the run was asked to do.
        path: the file to write; None keeps the record in memory.

    Example:
        >>> from coterie.recording import Configuration, Point, UserSummary
        >>> me = UserSummary(name="me", examples=12)
        >>> record = Record(Configuration(rule="Alone()", me=me, peers={}, steps=20))
        >>> record.add(Point(step=10, own_loss=0.5))
        >>> record.curve("own_loss")
        ([10], [0.5])
    """

    def __init__(self, configuration: Configuration, path: Path | None = None) -> None:
        self.configuration = configuration
        self.versions = versions()
        self.points: list[Point] = []
        self.path = path
        self._end: End | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite()

    @property
    def ended(self) -> bool:
        """Whether the run has ended; one that is going on, or was killed, has not."""
        return self._end is not None

    @property
    def end(self) -> End:
        """How the run ended; a `DataError` where it has not, see `ended`."""
        if self._end is None:
            where = "" if self.path is None else f" in {self.path}"
            raise DataError(f"the run{where} has not ended: let it go on, or resume it (`resume=True`)")
        return self._end

    def add(self, point: Point) -> None:
        """Add a point of the curves."""
        self.points.append(point)
        self._append(point.to_plain())

    def finish(self, end: End) -> None:
        """Add how the run ended."""
        self._end = end
        self._append({"end": end.to_plain()})

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a quantity was recorded ("own_loss", "validation_loss", …), and its values."""
        values = [(point.step, point.to_plain().get(name)) for point in self.points]
        recorded = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in recorded], [value for _, value in recorded]

    def cut(self, step: int) -> None:
        """Forget what was recorded after a step, so that a run resumed there can record it again."""
        self.points = [point for point in self.points if point.step <= step]
        self._end = None
        self._rewrite()

    def sync(self) -> None:
        """Make sure that all lines are on the disk, not only with the operating system."""
        if self.path is not None:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record; a last line that was cut off by a kill is left out."""
        path, lines = Path(path), []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        if not lines or "configuration" not in lines[0]:
            raise DataError(f"{path} is not the record of a run: its first line must hold the configuration")
        written_by = lines[0].get("versions", {})
        try:
            record = cls(Configuration.from_plain(lines[0]["configuration"]))
            record.points = [Point.from_plain(line) for line in lines[1:] if "step" in line]
            record._end = next((End.from_plain(line["end"]) for line in lines[1:] if "end" in line), None)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} holds a record that this version cannot read ({error}); read it with the version that "
                f"wrote it (coterie {written_by.get('coterie', 'of unknown version')}), or train again"
            ) from error
        record.path, record.versions = path, written_by
        return record

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _rewrite(self) -> None:
        if self.path is None:
            return
        lines = [{"configuration": self.configuration.to_plain(), "versions": self.versions}]
        lines += [point.to_plain() for point in self.points]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(self.path)


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "coterie": _own_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


@functools.cache  # reading it takes a millisecond, and `train_many` makes many records
def _own_version() -> str:
    try:
        return metadata.version("coterie")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "not installed"
