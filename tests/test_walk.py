"""The walk of a default step that docs/architecture.md shows is the one that is taken."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AT_MOST = {  # functions, files, packages and classes
    "plain": (32, 10, 7, 11),
    "judging": (55, 14, 7, 15),
    "over sites": (84, 19, 7, 23),
    "set-up": (210, 42, 12, 33),
}


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


def test_no_walk_grows() -> None:
    script = trace()
    here = script.traced(None, (script.FIRST, script.JUDGING, script.PLAIN))
    walks = {"plain": here[script.PLAIN], "judging": here[script.JUDGING], "set-up": here["set-up"]}
    walks["over sites"] = script.traced(None, (script.PLAIN,), script.sites)[script.PLAIN]
    counted = {name: walk.row()[1:5] for name, walk in walks.items()}
    for name, most in AT_MOST.items():
        assert all(map(int.__le__, counted[name], most)), counted
