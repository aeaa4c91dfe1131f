"""The audit of a private peer in a short form: it finds less than is stated, and would find out who cheats."""

from __future__ import annotations

import audit
import numpy as np
import pytest
from scipy.stats import binomtest

pytest.importorskip("dp_accounting", reason='dp-accounting is not installed: pip install "coterie[privacy]"')
RUNS = {1: 8000, 50: 960}
"""By steps, so many that chance alone does not fail a test."""


@pytest.mark.parametrize("name", audit.HONEST)
def test_a_private_peer_keeps_its_word(name: str) -> None:
    case = audit.HONEST[name]
    assert 0.1 * case.stated < audit.audited(case, RUNS[case.steps], confidence=0.9999) < case.stated


@pytest.mark.parametrize("name", [name for name in audit.CHEATS if name != "50 steps, half of the noise"])
def test_who_cheats_is_found_out(name: str) -> None:
    case = audit.CHEATS[name]
    assert audit.audited(case, RUNS[case.steps], confidence=0.9999) > case.stated


def test_the_bound_is_that_of_exact_binomial_intervals() -> None:
    """With a threshold that nothing but chance chooses, the two shares are binomial."""
    rng = np.random.default_rng(0)
    with_it, without = rng.binomial(1, 0.6, 2000).astype(float), rng.binomial(1, 0.1, 2000).astype(float)
    found, taken = (int(each[1000:].sum()) for each in (with_it, without))
    least, most = (binomtest(k, 1000).proportion_ci(0.95, "exact") for k in (found, taken))
    expected = np.log((least.low - audit.DELTA) / most.high)
    assert audit.lower_bound(with_it, without) == pytest.approx(expected)
