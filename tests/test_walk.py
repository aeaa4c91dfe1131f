"""The walk of a default step that docs/architecture.md shows is the one that is taken."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AT_MOST = {"functions": 32, "files": 10, "packages": 7, "classes": 11}


def trace() -> Any:
    """Return the script that counts."""
    spec = importlib.util.spec_from_file_location("trace_script", ROOT / "benchmarks" / "trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_walk_that_is_shown_is_taken() -> None:
    script = trace()
    walk = script.traced(None, (script.PLAIN,))[script.PLAIN]
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## The walk of a default step")[1].split("```")[1]
    shown = re.findall(r"^(\S+\.py)\s+(\S+)", section, flags=re.MULTILINE)
    taken = iter(walk.walk)
    assert len(shown) >= 8
    assert all(each in taken for each in shown), (
        "the functions shown are not called, or not in this order"
    )
    drawn = page.split("```")[1]
    assert {each.partition("/")[0] for each, _ in walk.walk} - {"errors.py"} <= set(
        re.findall(r"[a-z]+", drawn)
    )
    _, functions, files, packages, classes, _ = walk.row()
    counted = {"functions": functions, "files": files, "packages": packages, "classes": classes}
    assert all(counted[name] <= most for name, most in AT_MOST.items()), counted
