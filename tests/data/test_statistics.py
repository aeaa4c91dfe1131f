"""Sums that users share: those of all rows together, wherever the numbers lie."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data.statistics import ColumnSums


@pytest.mark.parametrize("far", [0.0, 2e9, -1e12])
def test_sums_of_parts_are_those_of_the_whole(far: float) -> None:
    values = far + np.random.default_rng(0).normal(3, 2, 60)
    values[7] = np.nan
    parts = [
        ColumnSums.of(part) for part in (values[:10], values[10:10], values[10:45], values[45:])
    ]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert (total.count, total.missing) == (59, 1)
    assert total.mean == pytest.approx(np.nanmean(values), rel=1e-12)
    assert total.variance == pytest.approx(np.nanvar(values), rel=1e-3 if far else 1e-12)
