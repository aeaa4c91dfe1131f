"""Exact moments against what does not use them: closed forms, plain scalar loops, the ordinary rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from coterie import Alone, BiasCorrection, OracleCorrection, Rule, User, WeightedAveraging, train
from coterie.errors import KnobError
from coterie.theory.linear_gaussian import FloatArray, Powers, Transition, chain, square_root
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

Lr = float | Callable[[int], float]


def paper(n_peers: int = 10, shift: float = 4.0) -> NoisyQuadratic:
    """The authors' problem, with the peers given by their average."""
    average = Quadratic(2, 1 + shift, 10 / math.sqrt(n_peers))
    return NoisyQuadratic(Quadratic(1, 1, 10), [average], x0_spread=1)


def notebook(alpha: float, beta: float = 1e-4) -> BiasCorrection:
    return BiasCorrection(alpha, beta, start="zero", warm_up=False)


# Stationary levels: closed forms, and the known levels to three digits.


@pytest.mark.parametrize("lr", [5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4])
def test_alone_settles_at_its_closed_form(lr: float) -> None:
    assert paper().stationary(Alone(), lr) == pytest.approx(lr * 100 / (2 * (2 - lr)), rel=1e-10)


@pytest.mark.parametrize(("n_peers", "level"), [(1, 5.15e-3), (10, 1.72e-3), (20, 1.44e-3), (50, 1.26e-3)])
def test_bias_correction_settles_at_the_known_levels(n_peers: int, level: float) -> None:
    exact = paper(n_peers).stationary(notebook(n_peers / (n_peers + 1)), lr=5e-4)
    assert float(f"{exact:.2e}") == level


@pytest.mark.parametrize("shift", [4, 10, 1e2, 1e3, 1e4, 1e5])
def test_bias_correction_settles_at_one_level_whatever_the_bias(shift: float) -> None:
    # For η = β → 0 and N = 10 the continuous-time Lyapunov equation has the solution E e² = 18.75 η.
    problem, rule = paper(shift=shift), notebook(10 / 11 * (1 - 5e-5))
    assert problem.stationary(rule, lr=1e-4) == pytest.approx(18.75e-4 / 2, rel=1e-4)
    assert problem.expected(rule, 1e-4, [700_000]).loss[0] == pytest.approx(18.75e-4 / 2, rel=1e-4)


def test_weighted_averaging_settles_where_the_mixed_gradient_vanishes() -> None:
    alpha, shift = 1e-3, 1e5
    where = 2 * alpha * shift / (1 + alpha)  # (1 − α) e + 2 α (e − shift) = 0
    assert paper(shift=shift).stationary(WeightedAveraging(alpha), 5e-4) == pytest.approx(where**2 / 2, rel=1e-5)


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


# Every step: a plain scalar loop over means and second moments, written from Algorithms 1 to 3.


def moment_loop(
    problem: NoisyQuadratic, rule: Any, lr: Lr, steps: int, average_from: int | None = None
) -> FloatArray:
    """E e² at every step, from scalars: means and covariances of (x, c, sum), with the paper's c."""

    def at(knob: Any, t: int) -> float:
        return float(knob(t)) if callable(knob) else float(knob)

    own, peer = problem.own, problem.peers[0]
    a0, s0, x_own = float(own.curvature), float(own.noise) ** 2, float(own.optimum)  # type: ignore[arg-type]
    a1, s1, x_peer = float(peer.curvature), float(peer.noise) ** 2, float(peer.optimum)  # type: ignore[arg-type]
    drift = float(problem.drift) ** 2  # type: ignore[arg-type]
    w = getattr(rule, "correction", 0.0)
    if isinstance(rule, OracleCorrection):
        a1, x_peer, s1 = a0, x_own, s1 + rule.bias.noise**2  # type: ignore[attr-defined]
    # x = x_own + e: g_0 = a0 e + n0, g_avg = a1 e − pull + n1.
    pull = a1 * (x_peer - x_own)
    mean = [float(problem.x0) - x_own, 0.0, 0.0]  # type: ignore[arg-type]
    cov = [[0.0] * 3 for _ in range(3)]
    cov[0][0] = float(problem.x0_spread) ** 2  # type: ignore[arg-type]
    out = []
    for t in range(steps + 1):
        count = 0 if average_from is None else t - average_from
        i, scale = (2, 1 / count) if count > 0 else (0, 1.0)
        out.append((scale * mean[i]) ** 2 + scale**2 * cov[i][i])
        alpha, eta = at(getattr(rule, "alpha", 0.0), t), at(lr, t)
        beta = at(getattr(rule, "beta", 1.0), t)
        if getattr(rule, "warm_up", False):
            beta = max(beta, 1 / (t + 1))
        # the next (e, c) as coefficients of (e, c, 1, n0, n1); c_0 is b_0 with start="first"
        b = [a1 - a0, 0.0, -pull, -1.0, 1.0]
        c = b if t == 0 and getattr(rule, "start", "") == "first" else [0.0, 1.0, 0.0, 0.0, 0.0]
        g0, g1 = [a0, 0.0, 0.0, 1.0, 0.0], [a1, 0.0, -pull, 0.0, 1.0]
        d = [(1 - alpha) * p + alpha * (q - w * r) for p, q, r in zip(g0, g1, c, strict=True)]
        e_next = [(1.0 if j == 0 else 0.0) - eta * d[j] for j in range(5)]
        c_next = [(1 - beta) * r + beta * q for r, q in zip(c, b, strict=True)]
        summed = 1.0 if count > 0 else 0.0
        rows = [[*e_next[:2], 0.0], [*c_next[:2], 0.0], [*e_next[:2], summed]]
        constants, noises = [e_next[2], c_next[2], e_next[2]], [e_next[3:], c_next[3:], e_next[3:]]
        mean = [sum(r[j] * mean[j] for j in range(3)) + v for r, v in zip(rows, constants, strict=True)]
        cov = [
            [
                sum(rows[p][j] * cov[j][k] * rows[q][k] for j in range(3) for k in range(3))
                + noises[p][0] * noises[q][0] * s0
                + noises[p][1] * noises[q][1] * s1
                + (drift if p in (0, 2) and q in (0, 2) else 0.0)
                for q in range(3)
            ]
            for p in range(3)
        ]
    return np.array(out)


PAIR = NoisyQuadratic(Quadratic(1.5, 0.3, 2.0), [Quadratic(0.7, 2.0, 0.8)], x0=-1.0, x0_spread=0.5)
DRIFTING = NoisyQuadratic(Quadratic(1.5, 0.3, 2.0), [Quadratic(0.7, 2.0, 0.8)], x0=-1.0, x0_spread=0.5, drift=0.2)
CASES: list[tuple[str, Rule, Lr]] = [
    ("alone", Alone(), 0.05),
    ("alone, decreasing", Alone(), lambda t: 1 / (1.5 * (t + 1))),
    ("wga", WeightedAveraging(0.4), 0.05),
    ("wga, scheduled", WeightedAveraging(lambda t: 0.5 / (t + 1)), lambda t: 0.3 / (1 + t / 20)),
    ("bc, notebook", BiasCorrection(0.7, 0.05, start="zero", warm_up=False), 0.05),
    ("bc, paper", BiasCorrection(0.7, 0.05, start="first", warm_up=False), 0.05),
    ("bc, warm-up", BiasCorrection(0.7, 0.05), 0.05),
    ("bc, warm-up from zero", BiasCorrection(0.7, 0.05, start="zero"), 0.05),
    ("bc, mean of all biases", BiasCorrection(0.7, 0.0), 0.05),
    ("bc, half corrected", BiasCorrection(0.7, 0.05, correction=0.5), 0.05),
    ("bc, scheduled beta", BiasCorrection(0.7, lambda t: 1 / math.sqrt(t + 4), warm_up=False), 0.05),
    (
        "bc, all scheduled",
        BiasCorrection(lambda t: 0.9 - 0.5 / (t + 1), lambda t: 0.3, correction=0.9),
        lambda t: 0.1,
    ),
    ("oracle", PAIR.oracle(0.6), 0.05),
    ("noisy oracle", PAIR.oracle(0.6, noise=1.5), lambda t: 0.2 / (1 + t / 10)),
]
IDS = [name for name, _, _ in CASES]


@pytest.mark.parametrize(("name", "rule", "lr"), CASES, ids=IDS)
@pytest.mark.parametrize("average_from", [None, 0, 17])
def test_expected_agrees_with_a_plain_scalar_loop(name: str, rule: Rule, lr: Lr, average_from: int | None) -> None:
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
    average = Quadratic(curvature, (0.2 * 0.5 * 3.0 - 0.8 * 2.0) / curvature, math.hypot(0.2 * 1.0, 0.8 * 4.0))
    own = Quadratic(1.0, 0.5, 2.0)
    each = NoisyQuadratic(own, peers).expected(BiasCorrection(0.6, 0.1, tau=tau), 0.05, [3, 30]).loss
    together = NoisyQuadratic(own, [average]).expected(BiasCorrection(0.6, 0.1), 0.05, [3, 30]).loss
    np.testing.assert_allclose(each, together, rtol=1e-12)


def test_mean_estimation_is_the_weighted_mean() -> None:
    # f_k = ½ (x − μ_k)², η_t = 1/(t + 1): x_T = (1 − α) mean of own samples + α mean of the peers'.
    alpha, n_peers, sigma, gap = 0.3, 5, 2.0, 0.7
    problem = NoisyQuadratic(Quadratic(1, 1.0, sigma), [Quadratic(1, 1.0 + gap, sigma)] * n_peers, x0=9.0)
    steps = np.array([1, 10, 1000])
    exact = problem.expected(WeightedAveraging(alpha), lambda t: 1 / (t + 1), steps).loss
    variance = ((1 - alpha) ** 2 + alpha**2 / n_peers) * sigma**2 / steps
    np.testing.assert_allclose(exact, (variance + (alpha * gap) ** 2) / 2, rtol=1e-10)


# Sample paths: exact in law.


def within(samples: FloatArray, exact: FloatArray | float, sigmas: float = 4.0) -> bool:
    """Whether the mean over trials lies within `sigmas` standard errors of the exact value, everywhere."""
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    return bool((np.abs(samples.mean(0) - exact) < sigmas * error).all())


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


# The same problem through the ordinary rules: brute force, one coordinate a trial.

TRIALS = 1_000


def simulate(problem: NoisyQuadratic, rule: Rule, lr: Lr, steps: list[int], *, rows: bool = False) -> FloatArray:
    """The squared distances to the optimum at the recorded steps, of shape (steps, d)."""
    engine = problem.engine(seed=5)
    start = np.random.default_rng(6).standard_normal(problem.dim)
    x = torch.tensor(problem.vector(problem.x0) + problem.vector(problem.x0_spread) * start)
    weights, state, out = rule.weights(engine.names), rule.init(x), []
    for t in range(max(steps) + 1):
        if t in steps:
            out.append((x.numpy() - engine.optimum(t)) ** 2)
        direction, state = rule(engine.gradients(x, t, weights, rows=rows), state)
        x = x - (lr(t) if callable(lr) else lr) * direction
    return np.array(out)


def copies(problem: NoisyQuadratic) -> NoisyQuadratic:
    """The same problem in TRIALS coordinates."""
    return NoisyQuadratic(problem.own, problem.peers, np.full(TRIALS, problem.x0), problem.x0_spread, problem.drift)


@pytest.mark.parametrize(("name", "rule", "lr"), CASES, ids=IDS)
def test_expected_agrees_with_the_ordinary_rules(name: str, rule: Rule, lr: Lr) -> None:
    steps, problem = [0, 1, 2, 10, 60], copies(PAIR)
    if isinstance(rule, OracleCorrection):
        rule = problem.oracle(0.6, noise=rule.bias.noise)  # type: ignore[attr-defined]
    squares = simulate(problem, rule, lr, steps)
    assert within(0.75 * squares.T, PAIR.expected(CASES[IDS.index(name)][1], lr, steps).loss)
    assert problem.expected(rule, lr, steps).loss == pytest.approx(
        TRIALS * PAIR.expected(CASES[IDS.index(name)][1], lr, steps).loss, rel=1e-10
    )


@pytest.mark.parametrize("rule", [Alone(), WeightedAveraging(0.4), BiasCorrection(0.7, 0.05)])
def test_expected_agrees_with_the_ordinary_rules_under_drift(rule: Rule) -> None:
    squares = simulate(copies(DRIFTING), rule, 0.05, [0, 5, 60])
    assert within(0.75 * squares.T, DRIFTING.expected(rule, 0.05, [0, 5, 60]).loss)


@pytest.mark.parametrize("rows", [False, True])
def test_unequal_peers_agree_with_the_ordinary_rules(rows: bool) -> None:
    peers = [Quadratic(0.5, 3.0, 1.0), Quadratic(2.0, -1.0, 4.0), Quadratic(1.0, 1.0, 0.1)]
    problem = NoisyQuadratic(Quadratic(1.0, 0.5, 2.0), peers)
    rule = BiasCorrection(0.6, 0.1, tau={"1": 0.2, "2": 0.5, "3": 0.3}, correction=0.8)
    squares = simulate(copies(problem), rule, 0.1, [1, 5, 40], rows=rows)
    assert within(0.5 * squares.T, problem.expected(rule, 0.1, [1, 5, 40]).loss)


def test_unequal_coordinates_agree_with_the_ordinary_rules() -> None:
    def problem(times: int) -> NoisyQuadratic:
        return NoisyQuadratic(
            Quadratic(np.tile([1.0, 0.3], times), np.tile([0.0, 2.0], times), np.tile([1.0, 3.0], times)),
            [Quadratic(np.tile([0.5, 0.9], times), np.tile([4.0, -2.0], times), 0.5)] * 2,
        )

    rule, steps = BiasCorrection(0.6, 0.1), [1, 5, 40]
    squares = simulate(problem(TRIALS), rule, 0.1, steps).reshape(3, TRIALS, 2)
    assert within((squares @ np.array([0.5, 0.15])).T, problem(1).expected(rule, 0.1, steps).loss)


def test_the_ordinary_training_loop_agrees_with_the_exact_loss() -> None:
    problem, rule = copies(PAIR), BiasCorrection(0.7, 0.05)
    model = torch.nn.Linear(1, TRIALS, bias=False, dtype=torch.float64)
    start = -1 + 0.5 * np.random.default_rng(6).standard_normal(TRIALS)
    model.load_state_dict({"weight": torch.tensor(start)[:, None]})
    me = User("0", torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, TRIALS, dtype=torch.float64))
    run = train(
        model,
        torch.nn.functional.mse_loss,
        me,
        [],
        rule,
        optimizer=torch.optim.SGD,
        lr=0.05,
        steps=60,
        engine=problem.engine(seed=5),
    )
    trained = next(run.model.parameters()).detach().numpy()[:, 0]
    np.testing.assert_allclose((trained - 0.3) ** 2, simulate(problem, rule, 0.05, [60])[0], rtol=1e-9)
    assert within(0.75 * (trained - 0.3) ** 2, PAIR.expected(rule, 0.05, [60]).loss[0])


def test_noise_depends_on_seed_user_and_step_alone() -> None:
    problem, x = paper(), torch.zeros(1, dtype=torch.float64)
    asked = {"1": 1.0}
    first = problem.engine(seed=1).gradients(x, 3, asked)
    late = problem.engine(seed=1)
    late.gradients(x, 9, asked)
    again = late.gradients(x, 3, asked)
    other = problem.engine(seed=2).gradients(x, 3, asked)
    assert first.peers is not None
    assert again.peers is not None
    assert torch.equal(first.own, again.own)
    assert torch.equal(first.peers, again.peers)
    assert not torch.equal(first.own, other.own)
    assert not torch.equal(first.own + 1, first.peers / 2 + 5)  # g_0 = x − 1 + n_0, g_1 = 2(x − 5) + n_1


def test_a_drifting_engine_can_go_back() -> None:
    problem = NoisyQuadratic(Quadratic(1, 0, 0), drift=1.0)
    engine = problem.engine(seed=3)
    forward = [engine.optimum(t)[0] for t in range(6)]
    assert [engine.optimum(t)[0] for t in (4, 2, 5)] == [forward[4], forward[2], forward[5]]


# Linear-Gaussian systems.


def test_powers_and_chains_agree_with_composition() -> None:
    rng = np.random.default_rng(0)
    steps = Transition(rng.normal(size=(7, 2, 2)) / 2, rng.normal(size=(7, 2)), np.eye(2) + np.zeros((7, 2, 2)))
    one_by_one = Transition(np.eye(2), np.zeros(2), np.zeros((2, 2)))
    for i in range(7):
        one_by_one = one_by_one.then(Transition(steps.matrix[i], steps.offset[i], steps.noise[i]))
    for name in ("matrix", "offset", "noise"):
        np.testing.assert_allclose(getattr(chain(steps), name), getattr(one_by_one, name), rtol=1e-12)
    first = Transition(steps.matrix[0], steps.offset[0], steps.noise[0])
    np.testing.assert_allclose(Powers(first)(5).matrix, np.linalg.matrix_power(first.matrix, 5), rtol=1e-12)


def test_square_roots_of_singular_covariances() -> None:
    factor = np.random.default_rng(0).normal(size=(5, 3, 2))
    covariance = factor @ np.swapaxes(factor, 1, 2)
    root = square_root(covariance)
    np.testing.assert_allclose(root @ np.swapaxes(root, 1, 2), covariance, atol=1e-7)


# What is refused.


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
        (lambda: NoisyQuadratic(Quadratic()).expected(WeightedAveraging(0.5), 0.1, [1]), "no peers"),
        (lambda: paper().expected(OracleCorrection(0.5, lambda x: x), 0.1, [1]), "problem.oracle"),
        (lambda: DRIFTING.oracle(0.5).bias(torch.zeros(1)), "cannot follow a `drift`"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        make()
