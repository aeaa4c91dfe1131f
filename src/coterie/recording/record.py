"""The record of a run: configuration, versions and curves, on disk as it grows."""

import functools
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy
import torch

from coterie.errors import DataError, FileError, KnobError
from coterie.recording import checkpoint
from coterie.recording.configuration import Configuration
from coterie.recording.files import ChainedLines
from coterie.recording.result import CURVES, End, Point

REMEDY = "put a whole copy of it back, or train again in another folder"
"""What to do about a record that is damaged."""


class Record:
    """What happened in a run: its configuration, a point for every evaluation, and how it ended.

    With a path, every addition is written to it at once, one JSON object a line: first the
    configuration and the versions, then the points, last the end. A run that is killed leaves what
    it had recorded. The lines are chained (`ChainedLines`), and a line before every checkpoint
    tells that all points up to it were there. Where a line cannot be written, a `FileError`, it
    stays in memory, and the next brings all; so it is where the file was deleted.

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
        >>> record
        Record(rule=Alone(), steps=20, not ended)
    """

    def __init__(self, configuration: Configuration, path: Path | None = None) -> None:
        self.configuration = configuration
        self.versions = versions()
        self.points: list[Point] = []
        self.path = path
        self._end: End | None = None
        self._saved = -1  # the step of the last checkpoint
        self._lines = None if path is None else ChainedLines(path, REMEDY)
        self._behind = False  # whether the file lacks what could not be written
        self._rewrite()

    def __repr__(self) -> str:
        state = "ended" if self.ended else "not ended"
        return f"Record(rule={self.configuration.rule}, steps={self.configuration.steps}, {state})"

    @property
    def ended(self) -> bool:
        """Whether the run has ended; one that is going on, or was killed, has not."""
        return self._end is not None

    @property
    def end(self) -> End:
        """How the run ended; a `DataError` where it has not, see `ended`."""
        if self._end is None:
            where = "" if self.path is None else f" in {self.path}"
            raise DataError(
                f"the run{where} has not ended: let it go on, or resume it (`resume=True`)"
            )
        return self._end

    def add(self, point: Point) -> None:
        """Add a point of the curves."""
        self.points.append(point)
        if self._lines is not None:
            self._append(point.to_plain())

    def finish(self, end: End) -> None:
        """Add how the run ended, in the place of what was said of it before."""
        again, self._end = self.ended, end
        if again:
            self._rewrite()
        else:
            self._append({"end": end.to_plain()})

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a quantity was recorded ("own_loss", "validation_loss", …), and its values.

        Names are the columns of `frame`; none is recorded of what the run did not have, such as a
        guard's.
        """
        names = dict.fromkeys(
            name for point in self.points for name in point.to_plain() if name != "step"
        )
        if name not in names and name not in CURVES:
            raise KnobError(
                f"the record has no {name!r}; it has {', '.join(names) or 'no point yet'}"
            )
        values = [(point.step, point.to_plain().get(name)) for point in self.points]
        recorded = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in recorded], [value for _, value in recorded]

    def frame(self) -> Any:
        """Return the points as a `pandas.DataFrame`.

        A row a point by its step, a column a quantity.

        Example:
            >>> from coterie.recording import Configuration, Point, UserSummary
            >>> record = Record(Configuration(rule="", me=UserSummary(name="me", examples=1), peers={}, steps=20))
            >>> record.add(Point(step=0, own_loss=0.5, validation={"loss": 0.75}))
            >>> record.frame()
                  own_loss  validation_loss
            step
            0          0.5             0.75
        """
        import pandas as pd

        return pd.DataFrame([point.to_plain() for point in self.points] or {"step": []}).set_index(
            "step"
        )

    def cut(self, step: int) -> None:
        """Forget what was recorded after a step, so that a run resumed there can record it again."""
        self.points = [point for point in self.points if point.step <= step]
        self._end, self._saved = None, min(self._saved, step)
        self._rewrite()

    def before_checkpoint(self, step: int) -> None:
        """Note that a checkpoint of a step comes next, and make sure that all lines are on the disk."""
        self._saved = step
        self._append({"saved": step})
        if self._lines is not None:
            self._lines.sync()

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record, of a run's folder or by its own path.

        A last line that was cut off by a kill is left out.

        One that was altered, or that has lost lines, is a `FileError`. So is one that lacks what
        was there when the newest checkpoint beside it was written.
        """
        path = Path(path)
        path = path / "record.jsonl" if path.is_dir() else path
        # before the lines, which may grow meanwhile
        checkpoints = checkpoint.saved(path.parent / "checkpoints")
        chained = ChainedLines(path, REMEDY)
        lines = chained.read()
        if not lines or "configuration" not in lines[0]:
            raise FileError(
                f"{path} is not the record of a run: its first line must hold the configuration;"
                f" {REMEDY}"
            )
        saved = max((int(line["saved"]) for line in lines if "saved" in line), default=-1)
        if checkpoints and checkpoint.step_of(checkpoints[-1]) > saved:
            raise FileError(
                f"{path} is damaged: its lines after line {len(lines)} are lost, since"
                f" {checkpoints[-1].name} was written after them; {REMEDY}"
            )
        written_by = lines[0].get("versions", {})
        try:
            record = cls(Configuration.from_plain(lines[0]["configuration"]))
            record.points = [Point.from_plain(line) for line in lines[1:] if "step" in line]
            record._end = next(
                (End.from_plain(line["end"]) for line in lines[1:] if "end" in line), None
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{path} holds a record that this version cannot read ({error}); read it with the"
                " version that wrote it (coterie"
                f" {written_by.get('coterie', 'of unknown version')}), or train again"
            ) from error
        record.path = path
        record.versions = written_by
        record._lines = chained
        record._saved = saved
        return record

    def _append(self, line: dict[str, Any]) -> None:
        if self._lines is None or self._behind or not self._lines.path.exists():
            return self._rewrite()  # of which the line is a part
        self._behind = True
        self._lines.append(line)
        self._behind = False

    def _rewrite(self) -> None:
        if self._lines is None:
            return
        lines: list[dict[str, Any]] = [
            {"configuration": self.configuration.to_plain(), "versions": self.versions}
        ]
        lines += [point.to_plain() for point in self.points]
        lines += [{"saved": self._saved}] * (self._saved >= 0)
        lines += [] if self._end is None else [{"end": self._end.to_plain()}]
        self._behind = True
        self._lines.write(lines)
        self._behind = False


@functools.cache  # reading it takes a millisecond, and `train_many` makes many records
def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    try:
        own = metadata.version("coterie")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        own = "not installed"
    return {
        "coterie": own,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
