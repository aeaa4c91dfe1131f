"""The geometric median against another solver, and where it is one of the rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from tests.support.aggregators import normal, sum_of_distances

from coterie.aggregators import GeometricMedian


@pytest.mark.parametrize("seed", range(8))
def test_the_geometric_median_is_the_minimum_another_solver_finds(seed: int) -> None:
    rows = normal(4 + seed, 3, seed)
    rows[0] *= 50
    x = rows.numpy()
    median = GeometricMedian()(rows).numpy()
    other = scipy.optimize.minimize(
        sum_of_distances,
        x.mean(0),
        args=(x,),
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12},
    )
    assert sum_of_distances(median, x) <= other.fun + 1e-9
    units = (median - x) / np.linalg.norm(median - x, axis=1, keepdims=True).clip(1e-12)
    at_a_row = np.linalg.norm(median - x, axis=1).min() < 1e-9
    assert at_a_row or np.linalg.norm(units.mean(0)) < 1e-6


def test_the_geometric_median_where_it_is_a_row() -> None:
    cross = torch.tensor(
        [[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64
    )
    # Weiszfeld's starting point, the mean, is this very row
    assert torch.equal(GeometricMedian()(cross), cross[0])
    line = torch.tensor([[0.0], [1.0], [2.0], [7.0], [100.0]])
    assert torch.equal(GeometricMedian()(line), torch.tensor([2.0]))
    majority = torch.tensor([[5.0, 5.0]] * 3 + [[0.0, 1.0], [9.0, 2.0]])
    assert torch.equal(GeometricMedian()(majority), majority[0])
    torch.testing.assert_close(GeometricMedian()(torch.ones(4, 3)), torch.ones(3))
    assert torch.equal(GeometricMedian()(torch.ones(1, 3)), torch.ones(3))


def test_the_geometric_median_leaves_a_row_that_is_the_best_row_but_not_the_best_point() -> None:
    rows = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [3.0, 3.0]], dtype=torch.float64)
    x, median = rows.numpy(), GeometricMedian()(rows).numpy()
    assert sum_of_distances(median, x) < min(sum_of_distances(row, x) for row in x) - 1e-3
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]], dtype=torch.float64)
    torch.testing.assert_close(GeometricMedian()(triangle), triangle.mean(0))
