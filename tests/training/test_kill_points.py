"""A run that is killed while it writes any of its files goes on to the same bits; a ledger counts what left."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.kill_points import LEDGER_POINTS, POINTS, killed_at_every_point, ledger_killed_at


def test_a_run_killed_at_every_point_comes_to_the_same_bits(tmp_path: Path) -> None:
    outcome = killed_at_every_point(tmp_path)
    assert outcome == dict.fromkeys([*POINTS, "same bits"], True)


@pytest.mark.parametrize("point", LEDGER_POINTS)
def test_a_ledger_counts_every_gradient_that_left(tmp_path: Path, point: str) -> None:
    left, counted, more = ledger_killed_at(point, tmp_path / "requests.jsonl")
    assert left <= counted <= left + 1
    assert counted + more == 5
