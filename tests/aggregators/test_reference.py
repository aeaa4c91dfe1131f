"""Aggregators against a plain loop and against byzfl."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.aggregators import F, normal

from coterie import aggregators


def loop_median(x: np.ndarray[Any, Any]) -> list[float]:
    middle = [sorted(column) for column in x.T.tolist()]
    n = len(x)
    return [(column[(n - 1) // 2] + column[n // 2]) / 2 for column in middle]


def loop_trimmed(x: np.ndarray[Any, Any], f: int) -> list[float]:
    return [sum(sorted(column)[f : len(x) - f]) / (len(x) - 2 * f) for column in x.T.tolist()]


def loop_scores(x: np.ndarray[Any, Any], f: int) -> list[float]:
    n, scores = len(x), []
    for i in range(n):
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 1]))
    return scores


def loop_multi_krum(x: np.ndarray[Any, Any], f: int, m: int) -> np.ndarray[Any, Any]:
    scores = loop_scores(x, f)
    best = sorted(range(len(x)), key=lambda i: scores[i])[:m]
    return np.asarray(sum(x[i] for i in best) / m)


def loop_clipping(x: np.ndarray[Any, Any], radius: float, iterations: int) -> np.ndarray[Any, Any]:
    v = np.zeros(x.shape[1])
    for _ in range(iterations):
        v = v + sum((row - v) * min(1.0, radius / math.dist(row, v)) for row in x) / len(x)
    return v


def loop_mixing(x: np.ndarray[Any, Any], f: int) -> np.ndarray[Any, Any]:
    means = []
    for row in x:
        nearest = sorted(x, key=lambda other: math.dist(row, other))[: len(x) - f]
        means.append(sum(nearest) / len(nearest))
    return np.array(means)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [5, 6, 11])
def test_each_aggregator_is_its_loop(n: int, seed: int) -> None:
    rows = normal(n, 7, seed) + torch.tensor([3.0] + [0.0] * 6, dtype=torch.float64)
    x = rows.numpy()
    mixed = loop_mixing(x, F)
    wanted: dict[aggregators.Aggregator, Any] = {
        aggregators.CoordinateMedian(): loop_median(x),
        aggregators.TrimmedMean(F): loop_trimmed(x, F),
        aggregators.Krum(F): loop_multi_krum(x, F, 1),
        aggregators.MultiKrum(F): loop_multi_krum(x, F, n - F),
        aggregators.MultiKrum(F, m=3): loop_multi_krum(x, F, 3),
        aggregators.CentredClipping(2.0, 1): loop_clipping(x, 2.0, 1),
        aggregators.CentredClipping(2.0, 7): loop_clipping(x, 2.0, 7),
        aggregators.NearestNeighbourMixing(F, then=aggregators.TrimmedMean(F)): loop_trimmed(
            mixed, F
        ),
        aggregators.NearestNeighbourMixing(
            F, then=aggregators.CentredClipping(2.0, 3)
        ): loop_clipping(mixed, 2.0, 3),
        aggregators.NearestNeighbourMixing(
            1, then=aggregators.NearestNeighbourMixing(1, then=aggregators.Mean())
        ): loop_mixing(loop_mixing(x, 1), 1).mean(0),
        aggregators.Bucketing(
            n, then=aggregators.NearestNeighbourMixing(1, then=aggregators.CoordinateMedian())
        ): x.mean(0),
        aggregators.NearestNeighbourMixing(1, then=aggregators.MultiKrum(F, m=2)): loop_multi_krum(
            loop_mixing(x, 1), F, 2
        ),
    }
    for aggregator, value in wanted.items():
        np.testing.assert_allclose(
            aggregator(rows).numpy(), value, rtol=1e-9, atol=1e-9, err_msg=str(aggregator)
        )


@pytest.mark.parametrize("n", [7, 8, 20])
@pytest.mark.parametrize("seed", range(3))
def test_byzfl_finds_the_same(byzfl: Callable[[str], Any], n: int, seed: int) -> None:
    theirs = byzfl("aggregators")
    rows = normal(n, 30, seed) + 0.3
    rows[:F] += 4
    x = rows.numpy()
    mixed = theirs.NNM(F)(x)
    least = theirs.GeometricMedian(nu=1e-12, T=5000)
    for aggregator, wanted in {
        aggregators.Mean(): theirs.Average()(x),
        aggregators.CoordinateMedian(): theirs.Median()(x),
        aggregators.TrimmedMean(F): theirs.TrMean(F)(x),
        aggregators.GeometricMedian(): least(x),
        aggregators.Krum(F): theirs.Krum(F)(x),
        aggregators.MultiKrum(F): theirs.MultiKrum(F)(x),
        aggregators.CentredClipping(4.0, 1): theirs.CenteredClipping(tau=4.0, L=1)(x),
        aggregators.CentredClipping(4.0, 6): theirs.CenteredClipping(tau=4.0, L=6)(x),
        aggregators.NearestNeighbourMixing(F, then=aggregators.Mean()): mixed.mean(0),
        aggregators.NearestNeighbourMixing(F, then=aggregators.CoordinateMedian()): theirs.Median()(
            mixed
        ),
        aggregators.NearestNeighbourMixing(F, then=aggregators.GeometricMedian()): least(mixed),
        aggregators.NearestNeighbourMixing(
            F, then=aggregators.CentredClipping(4.0, 6)
        ): theirs.CenteredClipping(tau=4.0, L=6)(mixed),
        aggregators.Bucketing(n, then=aggregators.Krum(0)): theirs.Average()(x),
        aggregators.Bucketing(1, then=aggregators.TrimmedMean(F)): theirs.TrMean(F)(
            theirs.Bucketing(1)(x)
        ),
    }.items():
        np.testing.assert_allclose(
            aggregator(rows).numpy(), wanted, rtol=1e-7, atol=1e-7, err_msg=str(aggregator)
        )


# Values that byzfl 0.0.11 gave for these rows, for where it is not installed.
ROWS = [
    [1.0, 2.0, 0.5],
    [1.5, 1.0, 0.0],
    [0.5, 1.5, 1.0],
    [2.0, 2.5, -0.5],
    [1.0, 0.0, 1.5],
    [40.0, -30.0, 9.0],
]
GOLDEN: dict[aggregators.Aggregator, list[float]] = {
    aggregators.CoordinateMedian(): [1.25, 1.25, 0.75],
    aggregators.TrimmedMean(1): [1.375, 1.125, 0.75],
    aggregators.GeometricMedian(): [1.34285818, 1.26614958, 0.45058974],
    aggregators.Krum(1): [1.0, 2.0, 0.5],
    aggregators.MultiKrum(1): [1.2, 1.4, 0.5],
    aggregators.CentredClipping(2.0, 1): [1.11366528, 0.76795944, 0.49702251],
    aggregators.CentredClipping(2.0, 6): [1.50647234, 1.15188208, 0.56715232],
    aggregators.NearestNeighbourMixing(1, then=aggregators.TrimmedMean(1)): [1.2, 1.4, 0.5],
    aggregators.NearestNeighbourMixing(1, then=aggregators.Krum(1)): [1.2, 1.4, 0.5],
}


@pytest.mark.parametrize("aggregator", GOLDEN, ids=str)
def test_values_of_byzfl(aggregator: aggregators.Aggregator) -> None:
    np.testing.assert_allclose(
        aggregator(torch.tensor(ROWS, dtype=torch.float64)).numpy(), GOLDEN[aggregator], atol=1e-6
    )
