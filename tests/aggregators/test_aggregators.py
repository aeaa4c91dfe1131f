"""Robust aggregators against a plain loop, against byzfl, and by their properties."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import coterie
from coterie.aggregators import (
    Aggregator,
    Bucketing,
    CentredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    NearestNeighbourMixing,
    Points,
    TrimmedMean,
)
from coterie.errors import KnobError

F = 2
POOLS: dict[str, Aggregator] = {
    "mean": Mean(),
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(F),
    "geometric": GeometricMedian(),
    "krum": Krum(F),
    "multi-krum": MultiKrum(F),
    "multi-krum of 3": MultiKrum(F, m=3),
    "clipping": CentredClipping(3.0),
    "clipping once": CentredClipping(3.0, iterations=1),
    "mixing, trimmed": NearestNeighbourMixing(F, then=TrimmedMean(F)),
    "mixing, krum": NearestNeighbourMixing(F, then=Krum(F)),
    "mixing, geometric": NearestNeighbourMixing(F, then=GeometricMedian()),
    "mixing, clipping": NearestNeighbourMixing(F, then=CentredClipping(3.0)),
    "bucketing, median": Bucketing(2, then=CoordinateMedian()),
    "bucketing, geometric": Bucketing(2, then=GeometricMedian()),
}
ROBUST = {name: aggregator for name, aggregator in POOLS.items() if name != "mean"}
NOT = (
    "clipping",
    "bucketing",
    "mixing, krum",
)  # by design; and means of neighbours tie, which Krum decides by order
EQUIVARIANT = {name: aggregator for name, aggregator in POOLS.items() if not any(word in name for word in NOT)}
every_pool = pytest.mark.parametrize("aggregator", POOLS.values(), ids=POOLS)
every_robust = pytest.mark.parametrize("aggregator", ROBUST.values(), ids=ROBUST)
every_equivariant = pytest.mark.parametrize("aggregator", EQUIVARIANT.values(), ids=EQUIVARIANT)


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Readable twins, one loop over rows or coordinates each.


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


def sum_of_distances(v: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> float:
    return sum(math.dist(v, row) for row in x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [5, 6, 11])
def test_each_pool_is_its_loop(n: int, seed: int) -> None:
    rows = normal(n, 7, seed) + torch.tensor([3.0] + [0.0] * 6, dtype=torch.float64)
    x = rows.numpy()
    mixed = loop_mixing(x, F)
    wanted: dict[Aggregator, Any] = {
        CoordinateMedian(): loop_median(x),
        TrimmedMean(F): loop_trimmed(x, F),
        Krum(F): loop_multi_krum(x, F, 1),
        MultiKrum(F): loop_multi_krum(x, F, n - F),
        MultiKrum(F, m=3): loop_multi_krum(x, F, 3),
        CentredClipping(2.0, 1): loop_clipping(x, 2.0, 1),
        CentredClipping(2.0, 7): loop_clipping(x, 2.0, 7),
        NearestNeighbourMixing(F, then=TrimmedMean(F)): loop_trimmed(mixed, F),
        NearestNeighbourMixing(F, then=CentredClipping(2.0, 3)): loop_clipping(mixed, 2.0, 3),
        NearestNeighbourMixing(1, then=NearestNeighbourMixing(1, then=Mean())): loop_mixing(
            loop_mixing(x, 1), 1
        ).mean(0),
        Bucketing(n, then=NearestNeighbourMixing(1, then=CoordinateMedian())): x.mean(0),
        NearestNeighbourMixing(1, then=MultiKrum(F, m=2)): loop_multi_krum(loop_mixing(x, 1), F, 2),
    }
    for aggregator, value in wanted.items():
        np.testing.assert_allclose(aggregator(rows).numpy(), value, rtol=1e-9, atol=1e-9, err_msg=str(aggregator))


@pytest.mark.parametrize("seed", range(8))
def test_the_geometric_median_is_the_minimum_another_solver_finds(seed: int) -> None:
    rows = normal(4 + seed, 3, seed)
    rows[0] *= 50
    x = rows.numpy()
    found = GeometricMedian()(rows).numpy()
    other = scipy.optimize.minimize(
        sum_of_distances, x.mean(0), args=(x,), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    assert sum_of_distances(found, x) <= other.fun + 1e-9
    units = (found - x) / np.linalg.norm(found - x, axis=1, keepdims=True).clip(1e-12)
    at_a_row = np.linalg.norm(found - x, axis=1).min() < 1e-9
    assert at_a_row or np.linalg.norm(units.mean(0)) < 1e-6


def test_the_geometric_median_where_it_is_a_row() -> None:
    cross = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    assert torch.equal(GeometricMedian()(cross), cross[0])  # Weiszfeld's starting point, the mean, is this very row
    line = torch.tensor([[0.0], [1.0], [2.0], [7.0], [100.0]])
    assert torch.equal(GeometricMedian()(line), torch.tensor([2.0]))
    majority = torch.tensor([[5.0, 5.0]] * 3 + [[0.0, 1.0], [9.0, 2.0]])
    assert torch.equal(GeometricMedian()(majority), majority[0])
    torch.testing.assert_close(GeometricMedian()(torch.ones(4, 3)), torch.ones(3))
    assert torch.equal(GeometricMedian()(torch.ones(1, 3)), torch.ones(3))


def test_the_geometric_median_leaves_a_row_that_is_the_best_row_but_not_the_best_point() -> None:
    rows = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [3.0, 3.0]], dtype=torch.float64)
    x, found = rows.numpy(), GeometricMedian()(rows).numpy()
    assert sum_of_distances(found, x) < min(sum_of_distances(row, x) for row in x) - 1e-3
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]], dtype=torch.float64)
    torch.testing.assert_close(GeometricMedian()(triangle), triangle.mean(0))


# What another library finds.


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
        Mean(): theirs.Average()(x),
        CoordinateMedian(): theirs.Median()(x),
        TrimmedMean(F): theirs.TrMean(F)(x),
        GeometricMedian(): least(x),
        Krum(F): theirs.Krum(F)(x),
        MultiKrum(F): theirs.MultiKrum(F)(x),
        CentredClipping(4.0, 1): theirs.CenteredClipping(tau=4.0, L=1)(x),
        CentredClipping(4.0, 6): theirs.CenteredClipping(tau=4.0, L=6)(x),
        NearestNeighbourMixing(F, then=Mean()): mixed.mean(0),
        NearestNeighbourMixing(F, then=CoordinateMedian()): theirs.Median()(mixed),
        NearestNeighbourMixing(F, then=GeometricMedian()): least(mixed),
        NearestNeighbourMixing(F, then=CentredClipping(4.0, 6)): theirs.CenteredClipping(tau=4.0, L=6)(mixed),
        Bucketing(n, then=Krum(0)): theirs.Average()(x),
        Bucketing(1, then=TrimmedMean(F)): theirs.TrMean(F)(theirs.Bucketing(1)(x)),
    }.items():
        np.testing.assert_allclose(aggregator(rows).numpy(), wanted, rtol=1e-7, atol=1e-7, err_msg=str(aggregator))


# Values that byzfl 0.0.11 gave for these rows, for where it is not installed.
ROWS = [[1.0, 2.0, 0.5], [1.5, 1.0, 0.0], [0.5, 1.5, 1.0], [2.0, 2.5, -0.5], [1.0, 0.0, 1.5], [40.0, -30.0, 9.0]]
GOLDEN: dict[Aggregator, list[float]] = {
    CoordinateMedian(): [1.25, 1.25, 0.75],
    TrimmedMean(1): [1.375, 1.125, 0.75],
    GeometricMedian(): [1.34285818, 1.26614958, 0.45058974],
    Krum(1): [1.0, 2.0, 0.5],
    MultiKrum(1): [1.2, 1.4, 0.5],
    CentredClipping(2.0, 1): [1.11366528, 0.76795944, 0.49702251],
    CentredClipping(2.0, 6): [1.50647234, 1.15188208, 0.56715232],
    NearestNeighbourMixing(1, then=TrimmedMean(1)): [1.2, 1.4, 0.5],
    NearestNeighbourMixing(1, then=Krum(1)): [1.2, 1.4, 0.5],
}


@pytest.mark.parametrize("aggregator", GOLDEN, ids=str)
def test_values_of_byzfl(aggregator: Aggregator) -> None:
    np.testing.assert_allclose(
        aggregator(torch.tensor(ROWS, dtype=torch.float64)).numpy(), GOLDEN[aggregator], atol=1e-6
    )


# Properties.

NUMBERS = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    n, d = draw(st.integers(2 * F + 1, 9)), draw(st.integers(1, 5))
    noise = normal(n, d, draw(st.integers(0, 2**20)))  # so that no two distances tie
    return torch.from_numpy(draw(hnp.arrays(np.float64, (n, d), elements=NUMBERS))) + noise


@every_equivariant
@given(rows=matrices(), data=st.data())
def test_order_does_not_matter(aggregator: Aggregator, rows: Tensor, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    assume("Geometric" not in str(aggregator) or rows.shape[1] > 1)  # on a line the median may be an interval
    torch.testing.assert_close(aggregator(rows), aggregator(rows[order]), rtol=1e-6, atol=1e-6)


@every_equivariant
@given(rows=matrices(), shift=st.floats(-50, 50), scale=st.sampled_from([-2.0, 0.25, 3.0, 1024.0]))
def test_moved_and_scaled_rows_give_the_moved_and_scaled_pool(
    aggregator: Aggregator, rows: Tensor, shift: float, scale: float
) -> None:
    assume("Geometric" not in str(aggregator) or rows.shape[1] > 1)
    torch.testing.assert_close(
        aggregator(scale * rows + shift), scale * aggregator(rows) + shift, rtol=1e-5, atol=1e-5 * abs(scale)
    )


@given(rows=matrices(), scale=st.sampled_from([0.25, 3.0, 1024.0]))
def test_clipping_scales_with_its_radius(rows: Tensor, scale: float) -> None:
    small, large = CentredClipping(2.0)(rows), CentredClipping(2.0 * scale)(scale * rows)
    torch.testing.assert_close(scale * small, large, rtol=1e-9, atol=1e-9)
    assert small.norm() <= 2.0 * 10 + 1e-9  # a radius an iteration


@pytest.mark.parametrize("name", ["median", "trimmed"])
@given(rows=matrices(), bad=st.floats(-1e30, 1e30), n_bad=st.integers(0, F))
def test_coordinates_stay_in_the_range_of_the_good(name: str, rows: Tensor, bad: float, n_bad: int) -> None:
    good = rows[n_bad:].clone()
    rows[:n_bad] = bad * rows[:n_bad].sign()
    found = POOLS[name](rows)
    slack = 1e-9 * (1 + good.abs().amax())
    assert (found >= good.amin(0) - slack).all()
    assert (found <= good.amax(0) + slack).all()


@given(rows=matrices(), far=st.sampled_from([1e3, 1e12, 1e30, 1e100, 1e200, 1e308]), n_bad=st.integers(0, F))
def test_bad_rows_carry_no_robust_pool_away(rows: Tensor, far: float, n_bad: int) -> None:
    good = rows[n_bad:].clone()
    rows[:n_bad] = far * rows[:n_bad].sign()
    length, n = float(good.norm(dim=1).max()), len(rows)
    bound = 2 * (n - n_bad) / (n - 2 * n_bad) * length  # Minsker (2015), Lemma 2.1, about 0
    assert GeometricMedian()(rows).norm() <= bound * (1 + 1e-6)
    assert CentredClipping(3.0)(rows).norm() <= 30.0 + 1e-9  # the radius, ten times
    chosen = Krum(F)(rows)
    assert (rows == chosen).all(1).any()
    if far >= 1e12:
        assert (good == chosen).all(1).any()
        assert MultiKrum(F)(rows).norm() <= length + 1e-9
        for then in (CoordinateMedian(), Krum(F), GeometricMedian()):
            assert NearestNeighbourMixing(F, then=then)(rows).norm() <= math.sqrt(rows.shape[1]) * length + 1e-6


@every_pool
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_rows_stay(aggregator: Aggregator, dtype: torch.dtype) -> None:
    rows = normal(9, 40, 3, dtype)
    before = rows.clone()
    found = aggregator(rows)
    assert found.dtype == dtype
    assert found.shape == (40,)
    assert torch.equal(rows, before)
    found.zero_()
    assert torch.equal(rows, before)  # not a view of them
    if not isinstance(aggregator, Bucketing):  # whose order depends on every bit
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            aggregator(rows).double(),
            aggregator(rows.double()),
            rtol=0.7 * eps,
            atol=1e-5 if eps < 1e-5 else eps / 16,
        )


@every_pool
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
    found = aggregator(rows)
    assert found.isfinite().all()
    torch.testing.assert_close(found, _without_f(aggregator)(good), rtol=1e-5, atol=1e-6)


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
        found = aggregator(rows)
        assert found.isfinite().all()
        if not isinstance(aggregator, Bucketing):
            assert found.double().norm() <= 3 * good.double().norm(dim=1).max()


@pytest.mark.parametrize(
    "name", ["krum", "multi-krum", "geometric", "mixing, geometric", "mixing, trimmed", "clipping"]
)
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1e4])
def test_rows_far_from_zero_and_close_together_in_float32(name: str, offset: float) -> None:
    rows = (normal(9, 200, 2) + offset).float()
    rows[:F] += 3
    wanted = POOLS[name](rows.double())
    torch.testing.assert_close(POOLS[name](rows).double(), wanted, rtol=3e-7, atol=3e-6)


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
    assert not any(aggregator(rows).isnan().any() for aggregator in POOLS.values())


def test_tiny_rows() -> None:
    rows = normal(9, 20, 4).float()
    for name in ("krum", "multi-krum", "geometric", "mixing, krum"):
        torch.testing.assert_close(1e-30 * POOLS[name](rows), POOLS[name](1e-30 * rows), rtol=1e-4, atol=1e-36)


def test_bucketing_deals_every_row_once_and_anew() -> None:
    class Kept(Aggregator):
        def of(self, points: Points) -> Tensor:
            seen.append(points.rows.clone())
            return points.rows[0]

    seen: list[Tensor] = []
    rows = torch.eye(7)
    for seed in range(4):
        Bucketing(3, then=Kept(), seed=seed)(rows)
    for means in seen:
        assert means.shape == (3, 7)
        assert sorted((means > 0).sum(1).tolist()) == [1, 3, 3]
        torch.testing.assert_close((means > 0).sum(0), torch.ones(7, dtype=torch.int64))
        torch.testing.assert_close(means.sum(1), torch.ones(3))
    assert len({str(means) for means in seen}) > 1
    again = Bucketing(3, then=Kept(), seed=0)
    again(rows)
    assert torch.equal(seen[-1], seen[0])
    before = len({str(means > 0) for means in seen})
    for k in range(1, 5):
        again(k * rows)
    assert len({str(means > 0) for means in seen}) > before


def test_missing_rows_lower_f_and_never_end_a_run() -> None:
    rows = torch.tensor([[0.0], [1.0], [50.0]])
    assert torch.equal(TrimmedMean(2)(rows), torch.tensor([1.0]))
    for aggregator in POOLS.values():
        for n in range(1, 5):
            assert aggregator(rows[:n]).isfinite().all()


def test_errors() -> None:
    for make in (TrimmedMean, Krum, MultiKrum):
        for f in [-1, 1.5, True]:
            wrong: Any = f
            with pytest.raises(KnobError, match="`n_byzantine` must be a whole number of rows, 0 or more, got"):
                make(wrong)
    with pytest.raises(KnobError, match="`m` must be a whole number of rows, 1 or more, or None for n − f, got 0"):
        MultiKrum(1, m=0)
    with pytest.raises(KnobError, match="`size` must be a whole number of rows, 1 or more, got 0"):
        Bucketing(0, then=Mean())
    for radius in (0.0, math.inf, math.nan):
        with pytest.raises(KnobError, match="`radius` must be positive and finite"):
            CentredClipping(radius)
    with pytest.raises(KnobError, match="`iterations` must be a whole number, 1 or more, got 0"):
        CentredClipping(1.0, 0)
    with pytest.raises(KnobError, match="`tolerance` must lie between 0 and 1, got 0"):
        GeometricMedian(0)
    for aggregator in POOLS.values():
        with pytest.raises(KnobError, match="nothing to aggregator: none of 2 rows is finite"):
            aggregator(torch.full((2, 3), math.nan))
        with pytest.raises(KnobError, match="nothing to aggregator: none of 0 rows is finite"):
            aggregator(torch.zeros(0, 3))
        with pytest.raises(KnobError, match="`rows` must be a matrix of numbers, one row a user"):
            aggregator(torch.zeros(3))


# In the rules.

MAKE: dict[str, Callable[[Aggregator | None], Any]] = {
    "averaging": lambda aggregator: coterie.WeightedAveraging(0.4, aggregator=aggregator),
    "correction": lambda aggregator: coterie.BiasCorrection(0.4, 0.3, aggregator=aggregator),
}
every_make = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@every_make
@pytest.mark.parametrize("answered", [1.0, 0.75])
def test_a_rule_takes_the_pool_for_the_average(make: Callable[[Aggregator | None], Any], answered: float) -> None:
    aggregator, pooled, plain = TrimmedMean(1), make(TrimmedMean(1)), make(None)
    assert (pooled.needs_rows, plain.needs_rows) == (True, False)
    state, other = (rule.init(torch.zeros(6, dtype=torch.float64)) for rule in (pooled, plain))
    for step in range(3):
        own, *rows = normal(6, 6, step)
        each = torch.stack(rows)
        g = coterie.Gradients(own=own, rows=each, names=tuple("abcde"), answered=answered)
        wanted = answered * aggregator(each) + (1 - answered) * own
        direction, state = pooled(g, state)
        expected, other = plain(coterie.Gradients(own=own, peers=wanted, answered=answered), other)
        torch.testing.assert_close(direction, expected)
        assert state["weight"] == other["weight"]


@every_make
def test_with_every_peer_gone_a_pool_is_alone_to_the_bit(make: Callable[[Aggregator | None], Any]) -> None:
    own, rule = normal(1, 4)[0], make(Krum(1))
    g = coterie.Gradients(own=own, rows=own.new_empty(0, 4), answered=0.0)
    direction, state = rule(g, rule.init(own))
    assert torch.equal(direction, own)
    assert state["weight"] == 0


@every_make
def test_errors_in_rules(make: Callable[[Aggregator | None], Any]) -> None:
    with pytest.raises(KnobError, match="needs 5 peers, got 4; lower `n_byzantine`"):
        make(Krum(2)).weights(tuple("abcd"))
    with pytest.raises(KnobError, match="needs 9 peers at least"):
        make(Bucketing(2, then=NearestNeighbourMixing(1, then=TrimmedMean(2)))).weights(tuple("abcd"))
    assert make(Krum(2)).weights(tuple("abcde")) == dict.fromkeys("abcde", 0.2)
    with pytest.raises(KnobError, match="`aggregator` must be an aggregator such as"):
        make(torch.mean)  # type: ignore[arg-type]
    rule, state = make(Krum(1)), make(Krum(1)).init(torch.zeros(2))
    with pytest.raises(KnobError, match="an aggregator needs every peer's gradient"):
        rule(coterie.Gradients(own=torch.zeros(2), peers=torch.zeros(2)), state)
    with pytest.raises(KnobError, match="`tau` and `aggregator` were both given"):
        coterie.WeightedAveraging(0.5, {"a": 1.0}, aggregator=Mean())
    with pytest.raises(KnobError, match="`tau` and `aggregator` were both given"):
        coterie.BiasCorrection(0.5, 0.5, {"a": 1.0}, aggregator=Mean())
