"""What the library computes stays as it was, to the bit; see `tests.support.frozen`."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from tests.support import frozen


@functools.cache
def before() -> tuple[dict[str, Any], bool]:
    """Return what was written, and whether this machine computes as the one that wrote it."""
    written = frozen.stored()
    return written, written["machine"] == frozen.machine()


@pytest.mark.parametrize("name", frozen.CASES)
def test_nothing_has_changed(name: str) -> None:
    written, alike = before()
    if not alike and name in frozen.DRAWS and frozen.draws() != written["draws"]:
        pytest.skip("torch draws other random numbers here")
    if not alike and name in frozen.BITS:
        pytest.skip("one bit decides of all that follows, and bits are others here")
    changes = frozen.differences(frozen.taken(name), written["cases"][name])
    worst = max((far for far, _ in changes.values()), default=0.0)
    assert not changes if alike else worst <= frozen.TOLERANCE, f"{name}: {frozen.said(changes)}"


def test_all_that_was_written_is_compared() -> None:
    assert list(before()[0]["cases"]) == list(frozen.CASES)


def test_what_a_comparison_says() -> None:
    vectors = {
        "numbers": {"a": torch.tensor([1.0, math.nan]), "b": torch.arange(50.0)},
        "state": {},
    }
    stored = frozen.frozen(vectors)
    assert frozen.differences(frozen.frozen(vectors), stored) == {}
    vectors["numbers"]["b"] = torch.arange(50.0).double() * (1 + 1e-6)
    changes = frozen.differences(frozen.frozen(vectors), stored)
    assert changes["numbers"][0] == pytest.approx(1e-6, rel=0.1)
    assert frozen.said(changes).startswith("rounding (1e-06) in numbers")
    vectors["numbers"]["a"] = torch.tensor([1.1, math.nan])
    assert frozen.said(frozen.differences(frozen.frozen(vectors), stored)).startswith(
        "CHANGED (0.091)"
    )
    del vectors["numbers"]["a"]
    assert "'a' is gone" in frozen.said(frozen.differences(frozen.frozen(vectors), stored))
    assert frozen.apart([math.nan, 1.0], [1.0, 1.0]) == math.inf
