"""Measured constants as plain data."""

from __future__ import annotations

import json

from tests.support.planted import PLANTED, measured

from coterie.theory.estimates import Estimates


def test_plain_data_and_back() -> None:
    estimates = measured(PLANTED)
    plain = estimates.to_plain()
    assert json.loads(json.dumps(plain)) == plain
    assert Estimates.from_plain(plain) == estimates
