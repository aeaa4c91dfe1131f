"""What a run costs grows no faster than the work, by counts of `benchmarks/growth.py`."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.everyone import train as everyone

ROOT = Path(__file__).parents[1]
MOST = 1.1
"""An exponent of what is counted is at most this."""


@pytest.fixture(scope="module")
def growth() -> Any:
    spec = importlib.util.spec_from_file_location("growth", ROOT / "benchmarks" / "growth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["growth"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("by", ["closed form", "averaging"])
@pytest.mark.parametrize("grows", ["rows", "peers"])
def test_counts_grow_no_faster_than_the_work(growth: Any, grows: str, by: str) -> None:
    few, many = growth.SMALLEST[grows]
    first, second = (growth.counted(growth.Cell(grows, by, size)) for size in (few, many))
    for what, before in first.items():
        exponent = math.log(max(1, second[what]) / max(1, before)) / math.log(many / few)
        assert exponent <= MOST, (what, before, second[what])


def test_many_users_are_work_in_proportion_to_their_number(
    growth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each asks a sample of the others, in closed form: counted from where the sample begins."""
    few, many = growth.SMALLEST["users"]
    monkeypatch.setattr(everyone, "MOST_ASKED", few - 1)
    first, second = (
        growth.counted(growth.Cell("users", "closed form", size)) for size in (few, many)
    )
    for what, before in first.items():
        exponent = math.log(max(1, second[what]) / max(1, before)) / math.log(many / few)
        assert exponent <= MOST, (what, before, second[what])
