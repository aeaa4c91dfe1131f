"""One folder for each user: its name, and checkpoints of one step to go on from together."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coterie.recording import checkpoint, files

POOLED = "pooled"
"""The folder of the model that was trained on everybody's examples."""
MAX_LETTERS = 60
"""Longer names are cut: file systems have limits."""


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name of each user's folder.

    Its own, with "_" for what may not stand in one; all different.

    Names that Windows keeps for itself get another, so that a folder can be carried anywhere.

    Example:
        >>> folder_names(["Bern", "St. Gallen", "a/b", "a_b", "BERN"])
        {'Bern': 'Bern', 'St. Gallen': 'St._Gallen', 'a/b': 'a_b', 'a_b': 'a_b-2', 'BERN': 'BERN-2'}
        >>> folder_names(["CON", "nul.txt", "x.", "com1", "Conny"])
        {'CON': '_CON', 'nul.txt': '_nul.txt', 'x.': 'x_', 'com1': '_com1', 'Conny': 'Conny'}
    """
    taken: set[str] = set()
    folders = {}
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", name)[:MAX_LETTERS]
        plain = f"_{plain[1:]}" if plain.startswith((".", "-")) else plain
        plain = f"{plain[:-1]}_" if plain.endswith(".") else plain
        plain = f"_{plain}" if _RESERVED.fullmatch(plain) else plain
        wanted, number = plain, 1
        # some systems ignore case
        while wanted.casefold() in taken or wanted.casefold() in _OTHERS:
            number += 1
            wanted = f"{plain}-{number}"
        taken.add(wanted.casefold())
        folders[name] = wanted
    return folders


_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Names of devices on Windows, with any ending."""

_OTHERS = frozenset({POOLED, "checkpoints", "lock", "index.html", "everyone.json", "splits"})
"""What else stands in the folder of everyone."""


def align(folders: Sequence[Path]) -> None:
    """Delete checkpoints that are newer than the step that most runs can go on from.

    A kill while checkpoints are written leaves some runs a checkpoint ahead of others. Each keeps
    two, so that the one before is there; the start is, too, while a run has fewer.
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
    return {checkpoint.step_of(path) for path in saved} | (
        {0} if len(saved) < checkpoint.KEPT else set()
    )
