"""Importing coterie stays light: torch, NumPy and SciPy, and nothing that only a command needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import coterie

HEAVY = {"matplotlib", "sklearn", "typer", "rich", "pandas", "pyarrow", "jinja2", "skops", "tensorboard", "click"}


def modules_after(code: str) -> set[str]:
    """Return the top-level modules of a fresh interpreter after some code."""
    source = str(Path(coterie.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", f"{code}; import json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    return {name.partition(".")[0] for name in json.loads(process.stdout)}


def test_what_an_import_brings() -> None:
    found = modules_after("import coterie")
    assert {"coterie", "torch", "numpy", "scipy"} <= found
    assert not found & HEAVY


def test_what_is_heavy_is_found_when_it_is_there() -> None:
    assert "sklearn" in modules_after("import coterie; coterie.data.digits_by_writer()")


def test_public_names() -> None:
    assert all(hasattr(coterie, name) for name in coterie.__all__)
    assert sorted(coterie.__all__) == list(coterie.__all__)
