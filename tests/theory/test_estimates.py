"""Measured constants as plain data."""

from __future__ import annotations

import json

from tests.support.planted import PLANTED, measured

from coterie.theory.estimates import Estimates


def test_plain_data_and_back() -> None:
    found = measured(PLANTED)
    plain = found.to_plain()
    assert json.loads(json.dumps(plain)) == plain
    assert Estimates.from_plain(plain) == found
