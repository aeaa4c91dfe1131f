"""Properties of aggregators: equivariance, bounds under bad rows, knobs, missing rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.aggregators import AGGREGATORS, F, every_equivariant, normal
from torch import Tensor

from coterie import aggregators
from coterie.errors import KnobError

NUMBERS = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    n, d = draw(st.integers(2 * F + 1, 9)), draw(st.integers(1, 5))
    noise = normal(n, d, draw(st.integers(0, 2**20)))  # so that no two distances tie
    return torch.from_numpy(draw(hnp.arrays(np.float64, (n, d), elements=NUMBERS))) + noise


@every_equivariant
@given(rows=matrices(), data=st.data())
def test_order_does_not_matter(
    aggregator: aggregators.Aggregator, rows: Tensor, data: st.DataObject
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    # on a line the median may be an interval
    assume("Geometric" not in str(aggregator) or rows.shape[1] > 1)
    torch.testing.assert_close(aggregator(rows), aggregator(rows[order]), rtol=1e-6, atol=1e-6)


@every_equivariant
@given(rows=matrices(), shift=st.floats(-50, 50), scale=st.sampled_from([-2.0, 0.25, 3.0, 1024.0]))
def test_moved_and_scaled_rows_give_the_moved_and_scaled_result(
    aggregator: aggregators.Aggregator, rows: Tensor, shift: float, scale: float
) -> None:
    assume("Geometric" not in str(aggregator) or rows.shape[1] > 1)
    torch.testing.assert_close(
        aggregator(scale * rows + shift),
        scale * aggregator(rows) + shift,
        rtol=1e-5,
        atol=1e-5 * abs(scale),
    )


@given(rows=matrices(), scale=st.sampled_from([0.25, 3.0, 1024.0]))
def test_clipping_scales_with_its_radius(rows: Tensor, scale: float) -> None:
    small, large = (
        aggregators.CentredClipping(2.0)(rows),
        aggregators.CentredClipping(2.0 * scale)(scale * rows),
    )
    torch.testing.assert_close(scale * small, large, rtol=1e-9, atol=1e-9)
    assert small.norm() <= 2.0 * 10 + 1e-9  # a radius an iteration


@pytest.mark.parametrize("name", ["median", "trimmed"])
@given(rows=matrices(), bad=st.floats(-1e30, 1e30), n_bad=st.integers(0, F))
def test_coordinates_stay_in_the_range_of_the_good(
    name: str, rows: Tensor, bad: float, n_bad: int
) -> None:
    good = rows[n_bad:].clone()
    rows[:n_bad] = bad * rows[:n_bad].sign()
    aggregate = AGGREGATORS[name](rows)
    slack = 1e-9 * (1 + good.abs().amax())
    assert (aggregate >= good.amin(0) - slack).all()
    assert (aggregate <= good.amax(0) + slack).all()


@given(
    rows=matrices(),
    far=st.sampled_from([1e3, 1e12, 1e30, 1e100, 1e200, 1e308]),
    n_bad=st.integers(0, F),
)
def test_bad_rows_carry_no_robust_aggregator_away(rows: Tensor, far: float, n_bad: int) -> None:
    good = rows[n_bad:].clone()
    rows[:n_bad] = far * rows[:n_bad].sign()
    length, n = float(good.norm(dim=1).max()), len(rows)
    bound = 2 * (n - n_bad) / (n - 2 * n_bad) * length  # Minsker (2015), Lemma 2.1, about 0
    assert aggregators.GeometricMedian()(rows).norm() <= bound * (1 + 1e-6)
    assert aggregators.CentredClipping(3.0)(rows).norm() <= 30.0 + 1e-9  # the radius, ten times
    chosen = aggregators.Krum(F)(rows)
    assert (rows == chosen).all(1).any()
    if far >= 1e12:
        assert (good == chosen).all(1).any()
        assert aggregators.MultiKrum(F)(rows).norm() <= length + 1e-9
        for then in (
            aggregators.CoordinateMedian(),
            aggregators.Krum(F),
            aggregators.GeometricMedian(),
        ):
            assert (
                aggregators.NearestNeighbourMixing(F, then=then)(rows).norm()
                <= math.sqrt(rows.shape[1]) * length + 1e-6
            )


def test_missing_rows_lower_f_and_never_end_a_run() -> None:
    rows = torch.tensor([[0.0], [1.0], [50.0]])
    assert torch.equal(aggregators.TrimmedMean(2)(rows), torch.tensor([1.0]))
    for aggregator in AGGREGATORS.values():
        for n in range(1, 5):
            assert aggregator(rows[:n]).isfinite().all()


def test_errors() -> None:
    for make in (aggregators.TrimmedMean, aggregators.Krum, aggregators.MultiKrum):
        for f in [-1, 1.5, True]:
            wrong: Any = f
            with pytest.raises(
                KnobError, match="`n_byzantine` must be a whole number, at least 0, got"
            ):
                make(wrong)
    with pytest.raises(KnobError, match="`m` must be a whole number, at least 1, or None, got 0"):
        aggregators.MultiKrum(1, m=0)
    with pytest.raises(KnobError, match="`size` must be a whole number, at least 1, got 0"):
        aggregators.Bucketing(0, then=aggregators.Mean())
    for radius in (0.0, math.inf, math.nan):
        with pytest.raises(KnobError, match="`radius` must be a finite number above 0"):
            aggregators.CentredClipping(radius)
    with pytest.raises(KnobError, match="`iterations` must be a whole number, at least 1, got 0"):
        aggregators.CentredClipping(1.0, 0)
    with pytest.raises(KnobError, match="`tolerance` must lie between 0 and 1, got 0"):
        aggregators.GeometricMedian(0)
    for aggregator in AGGREGATORS.values():
        with pytest.raises(KnobError, match="nothing to aggregate: none of 2 rows is finite"):
            aggregator(torch.full((2, 3), math.nan))
        with pytest.raises(KnobError, match="nothing to aggregate: none of 0 rows is finite"):
            aggregator(torch.zeros(0, 3))
        with pytest.raises(KnobError, match="`rows` must be a matrix of numbers, one row a user"):
            aggregator(torch.zeros(3))
