"""The record of a run: configuration, versions and curves, on disk as it grows."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

from coterie.errors import DataError


class Record:
    """What happened in a run: its configuration, a point for every evaluation, and how it ended.

    With a path, every addition is written to it at once, one JSON object a line: first the configuration and
    the versions, then the points, last the end. A run that is killed leaves what it had recorded.

    Args:
        configuration: what the run was asked to do; plain values only.
        path: the file to write; None keeps the record in memory.

    Example:
        >>> record = Record({"seed": 0})
        >>> record.add({"step": 10, "own_loss": 0.5})
        >>> record.curve("own_loss")
        ([10], [0.5])
    """

    def __init__(self, configuration: Mapping[str, Any], path: Path | None = None) -> None:
        self.configuration = dict(configuration)
        self.versions = versions()
        self.points: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite()

    def add(self, point: Mapping[str, Any]) -> None:
        """Add a point of the curves; `step` says when."""
        self.points.append(dict(point))
        self._append(self.points[-1])

    def finish(self, end: Mapping[str, Any]) -> None:
        """Add how the run ended."""
        self.end = dict(end)
        self._append({"end": self.end})

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a quantity was recorded, and its values."""
        points = [point for point in self.points if point.get(name) is not None]
        return [point["step"] for point in points], [point[name] for point in points]

    def cut(self, step: int) -> None:
        """Forget what was recorded after a step, so that a run resumed there can record it again."""
        self.points = [point for point in self.points if point["step"] <= step]
        self.end = {}
        self._rewrite()

    def sync(self) -> None:
        """Make sure that all lines are on the disk, not only with the operating system."""
        if self.path is not None:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record; a last line that was cut off by a kill is left out.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "record.jsonl"
            >>> Record({"seed": 3}, path).add({"step": 1, "own_loss": 2.0})
            >>> Record.load(path).points
            [{'step': 1, 'own_loss': 2.0}]
        """
        lines = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        if not lines or "configuration" not in lines[0]:
            raise DataError(f"{path} is not the record of a run: its first line must hold the configuration")
        record = cls.__new__(cls)
        record.path = path
        record.configuration, record.versions = lines[0]["configuration"], lines[0]["versions"]
        record.points = [line for line in lines[1:] if "step" in line]
        record.end = next((line["end"] for line in lines[1:] if "end" in line), {})
        return record

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _rewrite(self) -> None:
        if self.path is None:
            return
        lines: list[Mapping[str, Any]] = [{"configuration": self.configuration, "versions": self.versions}]
        lines += self.points
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(self.path)


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on.

    Example:
        >>> sorted(versions())
        ['coterie', 'numpy', 'platform', 'python', 'scipy', 'torch']
    """
    return {
        "coterie": _version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def _version() -> str:
    """Return the installed version; from a source tree that is not installed, none is known."""
    try:
        return metadata.version("coterie")
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(thing: Any) -> str:
    """Return what a rule, loss or optimizer is in one line that is the same in every process.

    Example:
        >>> from coterie import WeightedAveraging
        >>> describe(WeightedAveraging(0.5)), describe(torch.nn.functional.mse_loss)
        ('WeightedAveraging(alpha=0.5)', 'mse_loss')
    """
    if is_dataclass(thing) and not isinstance(thing, type):
        shown = [
            f"{f.name}={describe(getattr(thing, f.name))}"
            for f in fields(thing)
            if getattr(thing, f.name) != f.default
        ]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    if isinstance(thing, functools.partial):
        keywords = "".join(f", {name}={describe(value)}" for name, value in thing.keywords.items())
        return f"partial({describe(thing.func)}{''.join(f', {describe(a)}' for a in thing.args)}{keywords})"
    if callable(thing):
        return str(getattr(thing, "__qualname__", getattr(thing, "__name__", type(thing).__name__)))
    return repr(thing)
