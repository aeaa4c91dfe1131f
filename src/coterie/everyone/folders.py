"""One folder for each user, named after it as far as a file system allows."""

import re
from collections.abc import Sequence

POOLED = "pooled"
"""The folder of the model that was trained on everybody's examples."""
MAX_LETTERS = 60
"""Longer names are cut: file systems have limits."""


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name of each user's folder: its own, with "_" for what may not stand in one; all different.

    Example:
        >>> folder_names(["Bern", "St. Gallen", "a/b", "a_b", "BERN"])
        {'Bern': 'Bern', 'St. Gallen': 'St._Gallen', 'a/b': 'a_b', 'a_b': 'a_b-2', 'BERN': 'BERN-2'}
    """
    taken: set[str] = set()
    found = {}
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", name)[:MAX_LETTERS]
        plain = f"_{plain[1:]}" if plain.startswith((".", "-")) else plain
        wanted, number = plain, 1
        while wanted.casefold() in taken or wanted.casefold() in _OTHERS:  # some systems ignore case
            number += 1
            wanted = f"{plain}-{number}"
        taken.add(wanted.casefold())
        found[name] = wanted
    return found


_OTHERS = frozenset({POOLED, "checkpoints", "lock", "index.html"})
"""What else stands in the folder of everyone."""
