"""Weights on the simplex against a general solver and against their optimality conditions."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, minimize

from coterie.errors import KnobError
from coterie.gradients.simplex import (
    simplex_minimum,
    simplex_minimum_low_rank,
    water_filling,
)

Array = NDArray[np.float64]


def general_solver(noise: Array, bias: Array, kappa: float) -> Array:
    """Solve with SLSQP, then solve for what is still missing: one run stops at seven or eight digits."""
    tau, curvature = np.full(len(noise), 1 / len(noise)), kappa * noise**2

    def cost(change: Array, slope: Array) -> float:
        return float(np.sum(curvature * change**2 + slope * change))

    def gradient(change: Array, slope: Array) -> Array:
        return 2 * curvature * change + slope

    for _ in range(3):
        slope = gradient(tau, bias**2)
        slope -= slope @ tau  # a constant changes nothing on the simplex, and its rounding would
        result = minimize(
            cost,
            np.zeros(len(noise)),
            args=(slope,),
            jac=gradient,
            method="SLSQP",
            bounds=Bounds(-tau, 1 - tau),
            constraints=LinearConstraint(np.ones(len(noise)), 0, 0),
            options={"ftol": 1e-20, "maxiter": 500},
        )
        tau = np.maximum(tau + result.x, 0)
    return np.asarray(tau)


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")  # older SciPy
@pytest.mark.parametrize("seed", range(60))
def test_water_filling_matches_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    noise, bias, kappa = rng.uniform(0.5, 2, n), rng.uniform(0, 1.5, n), float(rng.uniform(0.2, 5))
    expected = general_solver(noise, bias, kappa)
    np.testing.assert_allclose(water_filling(noise, bias, kappa), expected, rtol=0, atol=1e-7)


sizes = st.floats(1e-3, 1e3)
peers = st.lists(
    st.tuples(st.one_of(st.just(0.0), sizes), st.one_of(st.just(0.0), sizes)), min_size=1
)


@given(peers, st.one_of(st.just(0.0), sizes))
def test_water_filling_meets_the_optimality_conditions(
    peers: list[tuple[float, float]], kappa: float
) -> None:
    noise, bias = np.array(peers).T
    tau = water_filling(noise, bias, kappa)
    slope = 2 * kappa * noise**2 * tau + bias**2
    level = slope[tau > 0].max()
    assert tau.sum() == pytest.approx(1, abs=1e-12)
    assert (tau >= 0).all()
    # weighted: at the water level
    np.testing.assert_allclose(slope[tau > 1e-9], level, rtol=1e-6, atol=1e-9)
    assert (slope >= level * (1 - 1e-6) - 1e-9).all()  # dry: above it


def test_batches_are_separate_problems() -> None:
    rng = np.random.default_rng(0)
    noise, bias, kappa = (
        rng.uniform(0, 2, (5, 4)),
        rng.uniform(0, 2, (5, 4)),
        rng.uniform(0.1, 3, 5),
    )
    together = water_filling(noise, bias, kappa)
    one_by_one = [water_filling(noise[i], bias[i], kappa[i]) for i in range(5)]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-14)


def test_limits() -> None:
    noise, bias = [1.0, 2.0, 1.0], [0.5, 0.1, 0.5]
    # inverse variances
    assert water_filling(noise, 0.0).tolist() == pytest.approx([4 / 9, 1 / 9, 4 / 9])
    # without a price of noise, the least bias
    assert water_filling(noise, bias, 0.0).tolist() == [0, 1, 0]
    # without bias, the noiseless share
    assert water_filling([0.0, 1.0, 0.0]).tolist() == [0.5, 0, 0.5]
    # A noiseless peer, biased: the unbiased one is filled up to ζ² = ½ and the noiseless takes the
    # rest.
    assert water_filling([1.0, 0.0], [0.0, np.sqrt(0.5)]).tolist() == pytest.approx([0.25, 0.75])


def test_a_nearly_noiseless_peer_keeps_its_digits() -> None:
    tau = water_filling([1.0, 1e-7], [0.0, np.sqrt(0.5)])
    assert tau.tolist() == pytest.approx([0.25, 0.75], abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": [1.0, -1.0]}, "`noise` must be finite and not negative, got -1"),
        ({"noise": [1.0, np.nan]}, "`noise` .* got nan"),
        ({"noise": [1.0], "bias": [-2.0]}, "`bias` .* got -2"),
        ({"noise": [1.0], "kappa": np.inf}, "`kappa` .* got inf"),
        ({"noise": []}, "one value for each peer"),
    ],
)
def test_wrong_inputs_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        water_filling(**arguments)


def simplex_by_slsqp(matrix: Array) -> Array:
    n = len(matrix)

    def cost(kappa: Array) -> float:
        return float(kappa @ matrix @ kappa)

    def gradient(kappa: Array) -> Array:
        return np.asarray(2 * matrix @ kappa)

    result = minimize(
        cost,
        np.full(n, 1 / n),
        jac=gradient,
        method="SLSQP",
        bounds=Bounds(np.zeros(n), np.ones(n)),
        constraints=LinearConstraint(np.ones(n), 1, 1),
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(result.x)


@pytest.mark.parametrize("seed", range(40))
def test_simplex_minimum_matches_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    rows = rng.normal(rng.normal(size=n + 3), rng.uniform(0.1, 2, (n, 1)), (n, n + 3))
    matrix = rows @ rows.T * 10.0 ** rng.integers(-8, 8)
    kappa, expected = simplex_minimum(matrix), simplex_by_slsqp(matrix / np.trace(matrix))
    assert kappa.sum() == pytest.approx(1, abs=1e-14)
    assert (kappa >= 0).all()
    assert kappa @ matrix @ kappa <= expected @ matrix @ expected * (1 + 1e-12) + 1e-15 * np.trace(
        matrix
    )
    np.testing.assert_allclose(kappa, expected, atol=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 8))
def test_simplex_minimum_meets_the_optimality_conditions(seed: int, n: int, rank: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(n, rank))
    matrix = rows @ rows.T
    kappa = simplex_minimum(matrix)
    slope = matrix @ kappa
    # no weight would gain by moving
    assert (slope >= kappa @ slope - 1e-9 * np.trace(matrix)).all()


def test_simplex_minimum_in_cases_known() -> None:
    assert simplex_minimum(np.diag([1.0, 2.0, 4.0])).tolist() == pytest.approx(
        [4 / 7, 2 / 7, 1 / 7]
    )
    assert simplex_minimum(np.zeros((3, 3))).tolist() == [1 / 3] * 3
    assert simplex_minimum([[5.0]]).tolist() == [1.0]
    # Noise may leave a matrix that is not semidefinite; its negative part counts as nothing.
    assert np.isfinite(simplex_minimum([[1.0, -2.0], [-2.0, 1.0]])).all()


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((2, 3)), r"square and not empty, got the shape \(2, 3\)"),
        (np.zeros((0, 0)), "square and not empty"),
        ([[np.nan]], "must be finite"),
    ],
)
def test_wrong_matrices_are_named(matrix: Any, message: str) -> None:
    with pytest.raises(KnobError, match=message):
        simplex_minimum(matrix)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_many_weights_by_a_factor_are_those_by_the_matrix(scale: float) -> None:
    random = np.random.default_rng(3)
    lacking = scale * random.normal(size=(120, 15)) - random.normal(size=15)
    diagonal = 0.1 * np.square(lacking).sum(1)
    weights = simplex_minimum_low_rank(lacking, diagonal)
    exact = simplex_minimum(lacking @ lacking.T + np.diag(diagonal))
    np.testing.assert_allclose(weights, exact, atol=1e-9)
    assert (weights >= 0).all()
    near = random.dirichlet(np.ones(120))
    for begin in (exact, near, np.eye(120)[0]):  # from wherever it begins
        np.testing.assert_allclose(
            simplex_minimum_low_rank(lacking, diagonal, begin), exact, atol=1e-9
        )
