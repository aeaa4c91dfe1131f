"""Numbers of every kind: dtypes, non-finite rows, huge, tiny and nearly equal ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.aggregators import AGGREGATORS, F, every_aggregator, every_robust, normal

from coterie.aggregators import (
    Aggregator,
    Bucketing,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    NearestNeighbourMixing,
    Points,
)


@every_aggregator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_rows_stay(aggregator: Aggregator, dtype: torch.dtype) -> None:
    rows = normal(9, 40, 3, dtype)
    before = rows.clone()
    aggregate = aggregator(rows)
    assert aggregate.dtype == dtype
    assert aggregate.shape == (40,)
    assert torch.equal(rows, before)
    aggregate.zero_()
    assert torch.equal(rows, before)  # not a view of them
    if not isinstance(aggregator, Bucketing):  # whose order depends on every bit
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            aggregator(rows).double(),
            aggregator(rows.double()),
            rtol=0.7 * eps,
            atol=1e-5 if eps < 1e-5 else eps / 16,
        )


@every_aggregator
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["all", "one entry"])
def test_rows_that_are_not_finite_count_as_bad_ones(
    aggregator: Aggregator, dtype: torch.dtype, poison: float, where: str
) -> None:
    good, rows = normal(7, 12, 5, dtype), normal(9, 12, 5, dtype)
    rows[2:] = good
    rows[:2] = 1.0
    rows[:2, slice(None) if where == "all" else 4] = poison
    aggregate = aggregator(rows)
    assert aggregate.isfinite().all()
    torch.testing.assert_close(aggregate, _without_f(aggregator)(good), rtol=1e-5, atol=1e-6)


def _without_f(aggregator: Aggregator) -> Aggregator:
    """Return the same aggregator, told to expect no bad row."""
    then = getattr(aggregator, "then", None)
    knobs: dict[str, Any] = {} if then is None else {"then": _without_f(then)}
    if hasattr(aggregator, "n_byzantine"):
        knobs["n_byzantine"] = 0
    return dataclasses.replace(aggregator, **knobs)  # type: ignore[type-var]


@every_robust
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_huge_attackers_overflow_nothing(aggregator: Aggregator, dtype: torch.dtype) -> None:
    good = normal(7, 50, 1, dtype)
    huge = torch.finfo(dtype).max
    for attackers in ([huge, huge], [huge, -huge], [1e30 if huge > 1e30 else 6e4] * 2):
        rows = torch.cat([torch.tensor(attackers, dtype=dtype)[:, None].expand(2, 50), good])
        aggregate = aggregator(rows)
        assert aggregate.isfinite().all()
        if not isinstance(aggregator, Bucketing):
            assert aggregate.double().norm() <= 3 * good.double().norm(dim=1).max()


@pytest.mark.parametrize(
    "name", ["krum", "multi-krum", "geometric", "mixing, geometric", "mixing, trimmed", "clipping"]
)
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1e4])
def test_rows_far_from_zero_and_close_together_in_float32(name: str, offset: float) -> None:
    rows = (normal(9, 200, 2) + offset).float()
    rows[:F] += 3
    wanted = AGGREGATORS[name](rows.double())
    torch.testing.assert_close(AGGREGATORS[name](rows).double(), wanted, rtol=3e-7, atol=3e-6)


def test_copies_are_one_point_whatever_their_products_round_to() -> None:
    noisy = np.full((3, 3), 5.0) + 1e-15 * np.array([[1, 0, 1], [0, -1, 1], [1, 1, 0]])
    assert not Points(torch.ones(3, 5), known=noisy).distances().any()
    for seed in range(5):
        rows = normal(7, 3001, seed) / 3 + 1
        rows[[0, 2, 5, 6]] = rows[3].clone()  # five of seven
        assert torch.equal(GeometricMedian()(rows), rows[3])
        assert torch.equal(Krum(2)(rows), rows[3])
        torch.testing.assert_close(NearestNeighbourMixing(2, then=GeometricMedian())(rows), rows[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_largest_numbers_there_are(dtype: torch.dtype) -> None:
    rows = torch.full((4, 2), torch.finfo(dtype).max, dtype=dtype)
    assert CoordinateMedian()(rows).isfinite().all()
    assert not any(aggregator(rows).isnan().any() for aggregator in AGGREGATORS.values())


def test_tiny_rows() -> None:
    rows = normal(9, 20, 4).float()
    for name in ("krum", "multi-krum", "geometric", "mixing, krum"):
        torch.testing.assert_close(
            1e-30 * AGGREGATORS[name](rows), AGGREGATORS[name](1e-30 * rows), rtol=1e-4, atol=1e-36
        )
