"""Exact moments and sample paths against closed forms and a plain scalar loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.quadratics import (
    CASES,
    DRIFTING,
    IDS,
    PAIR,
    Lr,
    moment_loop,
    notebook,
    paper,
    within,
)

from coterie import (
    AdaptiveAveraging,
    Alone,
    BiasCorrection,
    OracleCorrection,
    Rule,
    WeightedAveraging,
)
from coterie.errors import KnobError
from coterie.methods import FedAvg
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


@pytest.mark.parametrize("lr", [5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4])
def test_alone_settles_at_its_closed_form(lr: float) -> None:
    assert paper().stationary(Alone(), lr) == pytest.approx(lr * 100 / (2 * (2 - lr)), rel=1e-10)


@pytest.mark.parametrize(
    ("n_peers", "level"), [(1, 5.15e-3), (10, 1.72e-3), (20, 1.44e-3), (50, 1.26e-3)]
)
def test_bias_correction_settles_at_the_known_levels(n_peers: int, level: float) -> None:
    exact = paper(n_peers).stationary(notebook(n_peers / (n_peers + 1)), lr=5e-4)
    assert float(f"{exact:.2e}") == level


@pytest.mark.parametrize("shift", [4, 10, 1e2, 1e3, 1e4, 1e5])
def test_bias_correction_settles_at_one_level_whatever_the_bias(shift: float) -> None:
    # For η = β → 0 and N = 10 the continuous-time Lyapunov equation has the solution E e² = 18.75
    # η.
    problem, rule = paper(shift=shift), notebook(10 / 11 * (1 - 5e-5))
    assert problem.stationary(rule, lr=1e-4) == pytest.approx(18.75e-4 / 2, rel=1e-4)
    assert problem.expected(rule, 1e-4, [700_000]).loss[0] == pytest.approx(18.75e-4 / 2, rel=1e-4)


def test_weighted_averaging_settles_where_the_mixed_gradient_vanishes() -> None:
    alpha, shift = 1e-3, 1e5
    where = 2 * alpha * shift / (1 + alpha)  # (1 − α) e + 2 α (e − shift) = 0
    assert paper(shift=shift).stationary(WeightedAveraging(alpha), 5e-4) == pytest.approx(
        where**2 / 2, rel=1e-5
    )


def test_an_oracle_settles_at_the_level_of_its_variance() -> None:
    alpha, noise, lr = 0.8, 3.0, 1e-2
    variance = (1 - alpha) ** 2 * 100 + alpha**2 * (10 + noise**2)
    exact = paper().stationary(paper().oracle(alpha, noise=noise), lr)
    assert exact == pytest.approx(lr * variance / (2 * (2 - lr)), rel=1e-10)


def test_a_drifting_optimum_adds_its_lag() -> None:
    problem = NoisyQuadratic(Quadratic(1, 0, 10), drift=0.01)
    lr = 1e-3
    exact = (lr**2 * 100 + 1e-4) / (2 * lr - lr**2) / 2
    assert problem.stationary(Alone(), lr) == pytest.approx(exact, rel=1e-10)


def test_what_diverges_has_no_level() -> None:
    assert paper().spectral_radius(Alone(), lr=3.0) == pytest.approx(2.0)
    assert paper().stationary(Alone(), lr=3.0) == math.inf


def test_a_warm_up_spares_most_of_what_the_start_costs() -> None:
    # The bump that c_0 = 0 leaves at the start makes up most of a run's squared gradients.
    steps = np.unique(np.concatenate([np.arange(2_000), np.arange(2_000, 700_001, 500)]))

    def time_average(rule: Rule) -> float:
        squares = paper().expected(rule, 1e-4, steps).squared_gradient
        return float(np.diff(steps) @ (squares[1:] + squares[:-1]) / 2)

    alone, alpha = time_average(Alone()), 10 / 11 * (1 - 5e-5)
    assert time_average(notebook(alpha)) / alone == pytest.approx(5.50, abs=0.01)
    assert time_average(BiasCorrection(alpha, 1e-4)) / alone == pytest.approx(1.15, abs=0.01)


@pytest.mark.parametrize(("name", "rule", "lr"), CASES, ids=IDS)
@pytest.mark.parametrize("average_from", [None, 0, 17])
def test_expected_agrees_with_a_plain_scalar_loop(
    name: str, rule: Rule, lr: Lr, average_from: int | None
) -> None:
    steps = [0, 1, 2, 3, 17, 18, 40, 61, 200]
    for problem in (PAIR, DRIFTING):
        squares = moment_loop(problem, rule, lr, 200, average_from)[steps]
        exact = problem.expected(rule, lr, steps, average_from=average_from)
        np.testing.assert_allclose(exact.loss, 1.5 / 2 * squares, rtol=1e-10)
        np.testing.assert_allclose(exact.squared_gradient, 1.5**2 * squares, rtol=1e-10)


def test_long_schedules_agree_with_the_scalar_loop_across_chunks() -> None:
    def lr(t: int) -> float:
        return 0.5 / (1 + t / 100)

    squares = moment_loop(PAIR, CASES[6][1], lr, 40_000)
    exact = PAIR.expected(CASES[6][1], lr, [32_768, 39_999, 40_000]).loss
    np.testing.assert_allclose(exact, 1.5 / 2 * squares[[32_768, 39_999, 40_000]], rtol=1e-10)


def test_the_recorded_steps_do_not_matter() -> None:
    rule = BiasCorrection(0.9, 1e-3)
    dense = paper().expected(rule, 1e-3, range(3_000)).loss
    sparse = paper().expected(rule, 1e-3, [0, 7, 999, 1_000, 1_001, 2_999]).loss
    np.testing.assert_allclose(dense[[0, 7, 999, 1_000, 1_001, 2_999]], sparse, rtol=1e-11)


def test_coordinates_add_up() -> None:
    rule, steps = BiasCorrection(0.7, 0.05), [0, 5, 50]
    other = NoisyQuadratic(Quadratic(0.4, -1, 0.5), [Quadratic(1.1, 0.2, 3.0)], x0=2.0)
    both = NoisyQuadratic(
        Quadratic([1.5, 0.4], [0.3, -1], [2.0, 0.5]),
        [Quadratic([0.7, 1.1], [2.0, 0.2], [0.8, 3.0])],
        x0=[-1, 2],
        x0_spread=[0.5, 0],
    )
    curves = [problem.expected(rule, 0.05, steps) for problem in (both, PAIR, other)]
    np.testing.assert_allclose(curves[0].loss, curves[1].loss + curves[2].loss, rtol=1e-12)
    levels = [problem.stationary(rule, 0.05) for problem in (both, PAIR, other)]
    assert levels[0] == pytest.approx(levels[1] + levels[2], rel=1e-12)


def test_unequal_peers_act_as_their_weighted_average() -> None:
    tau = {"1": 0.2, "2": 0.8}
    peers = [Quadratic(0.5, 3.0, 1.0), Quadratic(2.0, -1.0, 4.0)]
    curvature = 0.2 * 0.5 + 0.8 * 2.0
    average = Quadratic(
        curvature, (0.2 * 0.5 * 3.0 - 0.8 * 2.0) / curvature, math.hypot(0.2 * 1.0, 0.8 * 4.0)
    )
    own = Quadratic(1.0, 0.5, 2.0)
    each = (
        NoisyQuadratic(own, peers).expected(BiasCorrection(0.6, 0.1, tau=tau), 0.05, [3, 30]).loss
    )
    together = NoisyQuadratic(own, [average]).expected(BiasCorrection(0.6, 0.1), 0.05, [3, 30]).loss
    np.testing.assert_allclose(each, together, rtol=1e-12)


def test_mean_estimation_is_the_weighted_mean() -> None:
    # f_k = ½ (x − μ_k)², η_t = 1/(t + 1): x_T = (1 − α) mean of own samples + α mean of the peers'.
    alpha, n_peers, sigma, gap = 0.3, 5, 2.0, 0.7
    problem = NoisyQuadratic(
        Quadratic(1, 1.0, sigma), [Quadratic(1, 1.0 + gap, sigma)] * n_peers, x0=9.0
    )
    steps = np.array([1, 10, 1000])
    exact = problem.expected(WeightedAveraging(alpha), lambda t: 1 / (t + 1), steps).loss
    variance = ((1 - alpha) ** 2 + alpha**2 / n_peers) * sigma**2 / steps
    np.testing.assert_allclose(exact, (variance + (alpha * gap) ** 2) / 2, rtol=1e-10)


@pytest.mark.parametrize(("name", "rule", "lr"), CASES, ids=IDS)
def test_paths_have_the_exact_moments(name: str, rule: Rule, lr: Lr) -> None:
    steps = [0, 1, 3, 30, 60]
    drawn = DRIFTING.paths(rule, lr, steps, trials=20_000, seed=1)
    squares = moment_loop(DRIFTING, rule, lr, 60)
    assert drawn.shape == (20_000, len(steps), 1)
    assert within(drawn[..., 0] ** 2, squares[steps])


def test_paths_have_the_exact_autocovariance() -> None:
    rule, steps = BiasCorrection(0.7, 0.05), range(21, 61)
    exact = moment_loop(PAIR, rule, 0.05, 60, average_from=20)[60]
    each = PAIR.paths(rule, 0.05, steps, trials=20_000, seed=2)[..., 0]
    averaged = PAIR.paths(rule, 0.05, [7, 33, 60], trials=20_000, seed=3, average_from=20)[..., 0]
    assert within(each.mean(1) ** 2, exact)  # the variance of a mean holds every autocovariance
    assert within(averaged[:, -1] ** 2, exact)


def test_paths_depend_on_the_seed_alone() -> None:
    draws = [paper().paths(Alone(), 1e-3, [5, 9], trials=3, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quadratic(noise=-1), "`noise` must be a finite number of at least 0"),
        (lambda: Quadratic(optimum=math.nan), "`optimum` must be a finite number"),
        (lambda: NoisyQuadratic(Quadratic(0)), "`curvature` must be positive"),
        (lambda: paper().expected(Alone(), -1, [1]), "`lr` must be a number of at least 0"),
        (lambda: paper().expected(Alone(), 0.1, [5, 3]), "in increasing order"),
        (lambda: paper().expected(WeightedAveraging(lambda t: t), 0.1, [5]), "got 2 at step 2"),
        (lambda: paper().stationary(WeightedAveraging(lambda t: 0.5), 0.1), "never settles"),
        (
            lambda: NoisyQuadratic(Quadratic()).expected(WeightedAveraging(0.5), 0.1, [1]),
            "no peers",
        ),
        (lambda: paper().expected(OracleCorrection(0.5, lambda x: x), 0.1, [1]), "problem.oracle"),
        (lambda: DRIFTING.oracle(0.5).bias(torch.zeros(1)), "cannot follow a `drift`"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        make()


def test_what_is_no_rule_of_the_family_is_refused_with_those_that_are() -> None:
    for other in (AdaptiveAveraging(), FedAvg(), object()):
        with pytest.raises(
            KnobError, match=r"nothing exact is known of .*; use Alone, WeightedAveraging"
        ):
            paper().expected(other, 1e-4, [1])  # type: ignore[arg-type]
