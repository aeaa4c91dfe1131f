"""Importing coterie stays light: torch, NumPy and SciPy, and nothing that only a command needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import coterie

HEAVY = {"matplotlib", "sklearn", "typer", "rich", "pandas", "pyarrow", "jinja2", "skops", "tensorboard", "click"}


def modules_after(*code: str) -> list[set[str]]:
    """Return the top-level modules of a fresh interpreter after each piece of code."""
    source = str(Path(coterie.__file__).parents[1])
    shown = [f"{piece}; print(json.dumps(sorted(sys.modules)))" for piece in code]
    process = subprocess.run(
        [sys.executable, "-c", "; ".join(["import json, sys", *shown])],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    return [{name.partition(".")[0] for name in json.loads(line)} for line in lines]


def test_what_an_import_brings_and_what_is_heavy_only_where_it_is_used() -> None:
    told = "from coterie.cli import app; app(['--help'], standalone_mode=False)"
    light, told_of, used = modules_after(
        "import coterie, coterie.theory.quadratic", told, "coterie.data.digits_by_writer()"
    )
    assert {"coterie", "torch", "numpy", "scipy"} <= light
    assert not light & HEAVY
    assert "typer" in told_of
    assert not told_of & {"matplotlib", "pandas", "jinja2", "sklearn"}
    assert "sklearn" in used


def test_public_names() -> None:
    assert all(hasattr(coterie, name) for name in coterie.__all__)
    assert sorted(coterie.__all__) == list(coterie.__all__)
