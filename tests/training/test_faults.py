"""Twelve faults in the middle of a run: it goes on, or says in words what is wrong. See docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.faults import FAULTS


@pytest.mark.filterwarnings("ignore:.*cannot be written")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_run(name: str, tmp_path: Path) -> None:
    assert FAULTS[name](tmp_path) == (
        "refused" if name == "two processes in one folder" else "went on"
    )
