"""Every file that is read again is refused where it is damaged: a short form of the campaign."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.damage import KINDS, corrupt


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_and_named(kind: str, tmp_path: Path) -> None:
    outcome = corrupt(kind, tmp_path, truncations=20, flips=30)
    assert (outcome.silent, outcome.raw) == (0, [])
    assert outcome.refused + outcome.survived == 50
    assert outcome.survived == 0 or kind == "record"
