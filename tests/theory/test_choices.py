"""The best knobs: true minima, closed forms, and the plan that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from tests.support.constants import horizon, positive, problems, weight

from coterie import theory
from coterie.theory import Constants


def least(cost: Callable[[float], Any], low: float, high: float) -> float:
    """Return the least cost that a grid, refined by scipy around its best point, finds in [low, high]."""
    grid = np.geomspace(low, high, 41)
    best = grid[int(np.argmin([cost(point) for point in grid]))]
    around = float(np.log(max(low, best / 3))), float(np.log(min(high, best * 3)))
    refined = minimize_scalar(lambda u: float(cost(np.exp(u))), bounds=around, method="bounded")
    return min(float(refined.fun), float(cost(low)), float(cost(high)), float(cost(best)))


@given(problem=problems(growing=True), alpha=weight, steps=horizon)
def test_best_step_sizes_minimise(problem: Constants, alpha: float, steps: int) -> None:
    descent = theory.averaging(problem, alpha)
    top = float(descent.max_lr)
    bounds = (
        (descent.gradient_bound, descent.best_gradient_lr),
        (descent.loss_bound, descent.best_loss_lr),
    )
    for bound, best in bounds:
        minimum = least(lambda lr: bound(min(lr, top), steps), top * 1e-9, top)  # noqa: B023  # called at once
        assert bound(best(steps), steps) <= minimum * (1 + 1e-9)


@given(problem=problems(), steps=horizon)
def test_best_alpha_minimises(problem: Constants, steps: int) -> None:
    most = min(1.0, 0.999999 / np.sqrt(max(float(problem.bias_growth), 1e-9)))
    minimum = least(
        lambda alpha: theory.averaging_cost(problem, min(alpha, most), steps), 1e-9, most
    )
    assert theory.averaging_cost(problem, theory.best_alpha(problem, steps), steps) <= minimum * (
        1 + 1e-9
    )


@given(problem=problems(), m=st.floats(1, 1e3), steps=horizon)
def test_best_alpha_minimises_where_m_limits_it(problem: Constants, m: float, steps: int) -> None:
    problem = replace(problem, bias_growth=m)
    minimum = least(
        lambda alpha: theory.averaging_cost(problem, alpha, steps), 1e-9, (1 - 1e-9) / np.sqrt(m)
    )
    best = theory.best_alpha(problem, steps)
    assert best < 1 / np.sqrt(m)
    assert theory.averaging_cost(problem, best, steps) <= minimum * (1 + 1e-9)


@given(problem=problems(), v=positive)
def test_least_noise_alpha_minimises(problem: Constants, v: float) -> None:
    minimum = least(lambda alpha: theory.oracle(problem, min(alpha, 1.0), v).noise, 1e-9, 1.0)
    assert theory.oracle(problem, theory.least_noise_alpha(problem, v), v).noise <= minimum * (
        1 + 1e-9
    )


@given(problem=problems(), alpha=weight, steps=horizon, error=st.one_of(st.none(), positive))
def test_best_beta_minimises(
    problem: Constants, alpha: float, steps: int, error: float | None
) -> None:
    lr = 0.1 * float(theory.correction_max_lr(problem, alpha))

    def bound(beta: float) -> Any:
        return theory.correction_bound(
            problem, alpha, min(beta, 1.0), lr, steps, initial_error=error
        )

    low = max(3 * alpha * float(problem.hessian_gap) * lr, 1e-6 / steps)
    best = theory.best_beta(problem, alpha, lr, steps, initial_error=error)
    assert bound(float(best)) <= least(bound, low, 1.0) * (1 + 1e-9)


@settings(max_examples=40)
@given(problem=problems(), steps=horizon)
def test_best_correction_minimises(problem: Constants, steps: int) -> None:
    chosen = theory.best_correction(problem, steps)
    alpha, beta, lr, bound = (float(value) for value in chosen)
    top = float(theory.correction_max_lr(problem, alpha))

    def other(logs: Any) -> float:
        step, rate = np.exp(logs)
        if step > top or rate > 1 or 3 * alpha * problem.hessian_gap * step > rate:
            return 1e100
        return float(theory.correction_bound(problem, alpha, rate, step, steps))

    assert other(np.log([lr * (1 - 1e-12), beta])) == pytest.approx(bound, rel=1e-9)
    for start in ([lr, beta], [lr / 3, beta], [lr / 3, min(1, 3 * beta)]):
        simplex = minimize(
            other, np.log(start), method="Nelder-Mead", options={"fatol": 1e-13, "xatol": 1e-9}
        )
        assert bound <= simplex.fun * (1 + 1e-7)


def test_best_beta_has_the_limits_of_theory() -> None:
    problem = Constants(smoothness=1, initial_gap=1, noise=1, n_peers=4, hessian_gap=0.01)
    variance, s, lr = float(problem.variance(0.8)), 1.25, 1e-4
    drifting = theory.best_beta(problem, 0.8, lr, 10**9, initial_error=0)
    assert drifting == pytest.approx((2 * 0.01**2 * lr**2 * variance / s) ** (1 / 3), rel=0.01)
    forgetting = theory.best_beta(
        replace(problem, hessian_gap=0), 0.8, lr, 10**6, initial_error=0.5
    )
    assert forgetting == pytest.approx(np.sqrt(0.5 / (s * 10**6)), rel=0.01)


@given(problem=problems(), n_peers=st.integers(1, 1000), steps=horizon)
def test_closed_forms_for_equal_noises_and_bounded_bias(
    problem: Constants, n_peers: int, steps: int
) -> None:
    problem = replace(problem, peer_noise=None, bias_growth=0.0, n_peers=n_peers)
    cumulated = problem.pl * problem.bias_floor**2 * steps / (problem.smoothness * problem.noise**2)
    alpha = theory.best_alpha(problem, steps)
    assert alpha == pytest.approx(1 / (1 + 1 / n_peers + cumulated))
    assert theory.averaging_speedup(problem, steps) == pytest.approx(1 / (1 - alpha))
    tiny = replace(problem, bias_growth=1e-13)  # the cubic's root goes over into the closed form
    assert theory.best_alpha(tiny, steps) == pytest.approx(alpha, rel=1e-9)
    v = float(problem.noise) / 2
    assert theory.least_noise_alpha(problem, v) == pytest.approx(n_peers / (n_peers + 1 + 0.25))
    assert theory.oracle_speedup(problem, v) == pytest.approx((n_peers + 1.25) / 1.25)


def test_speedup_is_linear_for_copies_and_sublinear_for_scaled_ones() -> None:
    peers = np.array([1.0, 10.0, 100.0])
    copies = Constants(smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=peers)
    np.testing.assert_allclose(theory.averaging_speedup(copies, 100), peers + 1)
    speedups = np.array(
        [
            theory.averaging_speedup(replace(copies, bias_growth=m), 100)
            for m in (0.0, 0.2, 0.5, 1.0)
        ]
    )
    assert (np.diff(speedups, axis=0) < 0).all()
    assert np.all(theory.averaging_speedup(replace(copies, noise=0.0, peer_noise=0.0), 100) == 1)


@given(problem=problems(), steps=st.integers(2, 10**6))
def test_steps_alone_inverts_alones_bound(problem: Constants, steps: int) -> None:
    own = theory.alone(problem)
    bound = own.gradient_bound(own.best_gradient_lr(steps), steps)
    assert theory.steps_alone(problem, bound) == pytest.approx(steps, rel=1e-9)


@given(problem=problems(growing=True), alpha=weight)
def test_decreasing_steps_start_at_the_first_that_fits(problem: Constants, alpha: float) -> None:
    descent = theory.averaging(problem, alpha)
    lr = descent.decreasing_lr(np.arange(3.0))
    rate = 2 * problem.pl * descent.progress
    schedule = [
        (2 * t + 1) / (rate * (t + 1) ** 2) for t in range(int(2.2 / (rate * descent.max_lr)) + 3)
    ]
    expected = next(t for t, step in enumerate(schedule) if step <= descent.max_lr * (1 + 1e-8))
    assert lr == pytest.approx(schedule[expected : expected + 3])


def test_linear_speedup_below_the_limit_on_delta() -> None:
    """As T grows with δ at a tenth of its limit and a good c_0, the bound's speedup comes near N + 1."""
    steps, speedups = 10**10, {}
    for share in (0.01, 100.0):
        problem = Constants(smoothness=1, initial_gap=1, noise=1, n_peers=9)
        lr = theory.oracle(problem, 0.9).best_gradient_lr(steps)
        problem = replace(problem, hessian_gap=share * theory.hessian_gap_limit(problem, 0.9, lr))
        bound = theory.best_correction(problem, steps, initial_error=1e-6).bound
        speedups[share] = theory.steps_alone(problem, bound) / steps
    assert speedups[0.01] > 8
    assert speedups[100.0] < 1


def test_plan_is_made_of_the_bounds() -> None:
    problem = Constants(
        smoothness=2, pl=1, initial_gap=3, noise=2, n_peers=9, bias_floor=0.05, hessian_gap=0.01
    )
    plan = theory.plan(problem, 5000)
    assert list(plan) == ["alone", "wga", "bc_oracle", "bc"]
    assert plan["alone"].speedup == 1
    assert plan["wga"].alpha == theory.best_alpha(problem, 5000)
    assert plan["wga"].bound < plan["alone"].bound
    # the initial gap is forgotten otherwise
    assert plan["bc_oracle"].speedup == pytest.approx(10, rel=2e-3)
    bc = plan["bc"]
    bound = theory.correction_bound(problem, bc.alpha, bc.beta or 0, bc.lr, 5000)
    assert bc.bound == pytest.approx(bound / 2)
    assert theory.alone(problem).max_lr == 0.5


def test_a_step_size_of_nothing_is_not_minus_nothing() -> None:
    noisy = theory.alone(Constants(smoothness=1, pl=0.1, initial_gap=0.1, noise=10))
    assert str(float(noisy.best_loss_lr(10))) == "0.0"
