"""The audit of a private peer in a short form: it finds less than is stated, and would find out who cheats."""

from __future__ import annotations

import itertools

import audit
import numpy as np
import pytest
from scipy.stats import binomtest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: the extra `privacy`")
RUNS = {1: 8000, 50: 960}
"""By steps, so many that chance alone does not show an honest peer as a cheat."""
TRIES = 3
"""One audit in thirty chooses an event that is too rare to tell anything; three in a row, hardly ever."""


@pytest.mark.parametrize("name", audit.HONEST)
def test_a_private_peer_keeps_its_word(name: str) -> None:
    case = audit.HONEST[name]
    found = audit.ratios(case, RUNS[case.steps])
    assert audit.lower_bound(*found, confidence=0.9999) < case.stated
    tries = itertools.chain(
        [found], (audit.ratios(case, RUNS[case.steps]) for _ in range(TRIES - 1))
    )
    assert any(audit.lower_bound(*each, confidence=0.9) > 0.1 * case.stated for each in tries)


@pytest.mark.parametrize(
    "name", [name for name in audit.CHEATS if name != "50 steps, half of the noise"]
)
def test_who_cheats_is_found_out(name: str) -> None:
    case = audit.CHEATS[name]
    tries = (audit.audited(case, RUNS[case.steps], confidence=0.9999) for _ in range(TRIES))
    assert any(bound > case.stated for bound in tries)


def test_the_bound_is_that_of_exact_binomial_intervals() -> None:
    """With a threshold that nothing but chance chooses, the two shares are binomial."""
    rng = np.random.default_rng(0)
    with_it, without = (
        rng.binomial(1, 0.6, 2000).astype(float),
        rng.binomial(1, 0.1, 2000).astype(float),
    )
    found, taken = (int(each[1000:].sum()) for each in (with_it, without))
    least, most = (binomtest(k, 1000).proportion_ci(0.95, "exact") for k in (found, taken))
    expected = np.log((least.low - audit.DELTA) / most.high)
    assert audit.lower_bound(with_it, without) == pytest.approx(expected)
