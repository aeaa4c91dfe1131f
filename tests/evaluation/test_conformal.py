"""Thresholds against brute force, coverage against what is known exactly, and who lends scores."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from coterie.errors import KnobError
from coterie.evaluation import conformal
from coterie.evaluation.conformal import Calibration, scores, scores_of_losses


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_the_threshold_is_the_least_that_fulfils_the_inequality(coverage: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        own, lent = rng.random(rng.integers(3, 30)), rng.random(rng.integers(1, 300))
        found = Calibration(own, {"a": lent}).threshold(coverage)
        used = lent if found.lenders else lent[:0]
        each = min(1.0, 4 * len(own) / len(used)) if len(used) else 0.0
        least = np.inf
        for q in sorted([*own, *used]):
            mass = sum(s <= q for s in own) + each * sum(s <= q for s in used)
            if mass >= coverage * (len(own) + 1 + each * len(used)) - 1e-9:
                least = q
                break
        assert found.score == least


@pytest.mark.parametrize(("n", "coverage"), [(10, 0.9), (19, 0.9), (40, 0.8)])
def test_own_scores_cover_as_the_theorem_says(n: int, coverage: float) -> None:
    """For n + 1 exchangeable scores without ties P(covered) is ⌈c(n + 1)⌉/(n + 1), exactly."""
    rng, times = np.random.default_rng(n), 4000
    covered = [
        rng.random() <= Calibration(rng.random(n)).threshold(coverage).score for _ in range(times)
    ]
    exact = np.ceil(coverage * (n + 1) - 1e-9) / (n + 1)
    assert np.mean(covered) == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / times))


def test_too_few_own_rows_have_no_finite_set_and_peers_alike_give_one_that_covers() -> None:
    rng, times = np.random.default_rng(1), 1500
    finite, covered = 0, 0
    for _ in range(times):
        own, lent = rng.exponential(size=5), {str(k): rng.exponential(size=40) for k in range(5)}
        assert np.isinf(Calibration(own).threshold(0.9).score)
        found = Calibration(own, lent).threshold(0.9)
        finite += bool(np.isfinite(found.score))
        covered += bool(rng.exponential() <= found.score)
    assert finite / times > 0.6
    assert covered / times > 0.88


def test_peers_with_other_scores_lend_nothing() -> None:
    rng = np.random.default_rng(2)
    own = rng.random(30)
    low, loud = rng.random(200) / 100, 10 * rng.random(200)
    lent = {"alike": np.tile(own, 6), "liar": low, "loud": loud, "none": low[:0]}
    assert Calibration(own, lent).lenders() == ("alike",)
    assert Calibration(own, lent).threshold(0.9) == Calibration(own).threshold(0.9), "30 are enough"
    assert Calibration(own[:8], {"alike": own[:8]}).threshold(0.9).lenders == ("alike",)
    assert Calibration(own, {"liar": lent["liar"]}).threshold(0.9) == Calibration(own).threshold(
        0.9
    )


def test_likeness_is_the_rank_test_of_scipy() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        own, lent = (
            rng.integers(0, 40, 12) / 40.0,
            np.r_[rng.random(100), 0.5] * rng.choice([0.6, 1.0, 1.5]),
        )
        p = {
            side: mannwhitneyu(
                own, lent, alternative=side, method="asymptotic", use_continuity=False
            ).pvalue
            for side in ("greater", "less")
        }
        expected = p["greater"] >= conformal.TOO_SMALL and p["less"] >= conformal.TOO_LARGE
        clear = all(
            abs(p[side] - limit) > 0.01 for side, limit in (("greater", 0.1), ("less", 0.3))
        )
        assert not clear or bool(Calibration(own, {"a": lent}).lenders()) == expected


def test_scores_are_residuals_and_what_is_missing_to_one() -> None:
    assert scores(np.array([[1.0], [4.0]]), np.array([3.0, 3.5])).tolist() == [2.0, 0.5]
    assert scores(np.array([[0.25, 0.75]]), np.array([1])).tolist() == [0.25]


def test_losses_tell_the_same_scores() -> None:
    rng = np.random.default_rng(4)
    logits, classes = rng.normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, 2])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(shares[np.arange(6), classes])
    assert np.allclose(scores_of_losses(losses, classes=True), scores(shares, classes))
    told, true = rng.normal(size=(2, 6))
    assert np.allclose(scores_of_losses((told - true) ** 2, classes=False), scores(told, true))


def test_a_coverage_that_is_none_is_refused() -> None:
    with pytest.raises(KnobError, match="`coverage` must lie between 0 and 1"):
        Calibration([1.0]).threshold(1.0)
