"""Checkpoints of several runs that go on together: all from the same step, also after a kill between two saves."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coterie.recording import checkpoint, files


def align(folders: Sequence[Path]) -> None:
    """Delete checkpoints that are newer than the step that most runs can go on from.

    A kill while checkpoints are written leaves some runs a checkpoint ahead of others. Each keeps two, so that the
    one before is there; the start is, too, while a run has fewer.
    """
    held = {folder: _steps(folder) for folder in folders}
    counts = Counter(step for steps in held.values() for step in steps)
    if not counts:
        return
    common = max(counts, key=lambda step: (counts[step], step))
    for folder, steps in held.items():
        if common in steps:
            for path in checkpoint.saved(folder / "checkpoints"):
                if checkpoint.step_of(path) > common:
                    with files.writing(path):
                        path.unlink()


def _steps(folder: Path) -> set[int]:
    """Return the steps from which a run can go on."""
    saved = checkpoint.saved(folder / "checkpoints")
    return {checkpoint.step_of(path) for path in saved} | ({0} if len(saved) < checkpoint.KEPT else set())
