"""The theory's properties: invariance to units, true minima, closed forms, errors that name the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from coterie import theory
from coterie.errors import KnobError
from coterie.theory import Constants

settings.register_profile("untimed", deadline=None)  # no test depends on how long it takes
settings.load_profile("untimed")

positive = st.floats(0.1, 10)
weight = st.floats(0.01, 0.99)
horizon = st.integers(2, 10_000)


@st.composite
def problems(draw: st.DrawFn, *, growing: bool = False) -> Constants:
    smoothness = draw(positive)
    return Constants(
        smoothness=smoothness,
        pl=smoothness * draw(st.floats(0.01, 1)),
        initial_gap=draw(positive),
        noise=draw(positive),
        n_peers=float(draw(st.integers(1, 100))),
        peer_noise=draw(positive),
        bias_floor=draw(st.one_of(st.just(0.0), positive)),
        bias_growth=draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        hessian_gap=draw(st.one_of(st.just(0.0), positive)),
        noise_growth=draw(positive) if growing else 0.0,
        peer_noise_growth=draw(positive) if growing else 0.0,
    )


# How each constant answers to f → s·f and x → r·x, as powers of (s, r).
UNITS = {
    "smoothness": (1, -2),
    "pl": (1, -2),
    "hessian_gap": (1, -2),
    "initial_gap": (1, 0),
    "noise": (1, -1),
    "peer_noise": (1, -1),
    "bias_floor": (1, -1),
    "n_peers": (0, 0),
    "bias_growth": (0, 0),
    "noise_growth": (0, 0),
    "peer_noise_growth": (0, 0),
}
NUMBER, LOSS, SQUARED_GRADIENT, STEP, CURVATURE = (0, 0), (1, 0), (2, -2), (-1, 2), (1, -2)


def rescaled(problem: Constants, s: float, r: float) -> Constants:
    return replace(problem, **{name: getattr(problem, name) * s**f * r**x for name, (f, x) in UNITS.items()})


def some_lr(problem: Constants, alpha: float) -> Any:
    return 0.3 * np.minimum(theory.averaging(problem, alpha).max_lr, theory.correction_max_lr(problem, alpha, 0.5))


Quantity = Callable[[Constants, float, int], Any]
QUANTITIES: dict[str, tuple[Quantity, tuple[int, int]]] = {
    "averaging, gradient": (
        lambda p, a, t: theory.averaging(p, a).gradient_bound(some_lr(p, a), t),
        SQUARED_GRADIENT,
    ),
    "averaging, loss": (lambda p, a, t: theory.averaging(p, a).loss_bound(some_lr(p, a), t), LOSS),
    "averaging, decreasing": (lambda p, a, t: theory.averaging(p, a).decreasing_bound(t), LOSS),
    "oracle, gradient": (
        lambda p, a, t: theory.oracle(p, a, p.noise).gradient_bound(some_lr(p, a), t),
        SQUARED_GRADIENT,
    ),
    "oracle, loss": (lambda p, a, t: theory.oracle(p, a, p.noise).loss_bound(some_lr(p, a), t), LOSS),
    "oracle, decreasing": (lambda p, a, t: theory.oracle(p, a, p.noise).decreasing_bound(t), LOSS),
    "largest step": (lambda p, a, t: theory.averaging(p, a).max_lr, STEP),
    "best step, gradient": (lambda p, a, t: theory.averaging(p, a).best_gradient_lr(t), STEP),
    "best step, loss": (lambda p, a, t: theory.averaging(p, a).best_loss_lr(t), STEP),
    "decreasing steps": (lambda p, a, t: theory.averaging(p, a).decreasing_lr(t), STEP),
    "averaging cost": (theory.averaging_cost, LOSS),
    "best alpha": (lambda p, a, t: theory.best_alpha(p, t), NUMBER),
    "least noise alpha": (lambda p, a, t: theory.least_noise_alpha(p, p.noise), NUMBER),
    "averaging speedup": (lambda p, a, t: theory.averaging_speedup(p, t), NUMBER),
    "oracle speedup": (lambda p, a, t: theory.oracle_speedup(p, p.noise), NUMBER),
    "best tau": (
        lambda p, a, t: theory.best_tau(
            p,
            a,
            t,
            peer_noise=p.noise * np.array([1, 2, 3]),
            bias_floor=p.bias_floor * np.array([0.3, 0.2, 0.1]),
        ),
        NUMBER,
    ),
}
BOUNDED_NOISE: dict[str, tuple[Quantity, tuple[int, int]]] = {
    "correction": (lambda p, a, t: theory.correction_bound(p, a, 0.5, some_lr(p, a), t), SQUARED_GRADIENT),
    "correction, largest step": (lambda p, a, t: theory.correction_max_lr(p, a, 0.1), STEP),
    "correction, best bound": (lambda p, a, t: theory.best_correction(p, t).bound, SQUARED_GRADIENT),
    "Hessian gap": (lambda p, a, t: theory.hessian_gap_limit(p, a, some_lr(p, a)), CURVATURE),
    "steps alone": (lambda p, a, t: theory.steps_alone(p, p.noise**2 / 7), NUMBER),
}


def assert_invariant(
    quantity: Quantity, units: tuple[int, int], problem: Constants, alpha: float, steps: int
) -> None:
    before = np.asarray(quantity(problem, alpha, steps))
    for s, r in ((1e3, 1.0), (1.0, 1e3), (0.07, 13.0)):
        after = np.asarray(quantity(rescaled(problem, s, r), alpha, steps))
        np.testing.assert_allclose(after, before * s ** units[0] * r ** units[1], rtol=1e-7)


@pytest.mark.parametrize("name", QUANTITIES)
@given(problem=problems(growing=True), alpha=weight, steps=horizon)
def test_everything_is_invariant_to_units(name: str, problem: Constants, alpha: float, steps: int) -> None:
    assert_invariant(*QUANTITIES[name], problem, alpha, steps)


@pytest.mark.parametrize("name", BOUNDED_NOISE)
@given(problem=problems(), alpha=weight, steps=horizon)
def test_everything_about_correction_is_invariant_to_units(
    name: str, problem: Constants, alpha: float, steps: int
) -> None:
    assert_invariant(*BOUNDED_NOISE[name], problem, alpha, steps)


def test_the_printed_condition_on_delta_is_not_invariant() -> None:
    """δ² ≪ L³σ⁶(α)η/(σ_0² + σ_a²)² has the units of δ² times a squared gradient."""
    problem, alpha = Constants(smoothness=1, initial_gap=1, noise=1, peer_noise=1, n_peers=9), 0.9

    def printed(p: Constants) -> Any:
        spread = p.noise**2 + p.peer_variance
        return np.sqrt(p.smoothness**3 * p.variance(alpha) ** 3 * some_lr(p, alpha)) / spread

    with pytest.raises(AssertionError, match="Not equal"):
        assert_invariant(lambda p, a, t: printed(p), CURVATURE, problem, alpha, 10)


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
    bounds = (descent.gradient_bound, descent.best_gradient_lr), (descent.loss_bound, descent.best_loss_lr)
    for bound, best in bounds:
        found = least(lambda lr: bound(min(lr, top), steps), top * 1e-9, top)  # noqa: B023  # called at once
        assert bound(best(steps), steps) <= found * (1 + 1e-9)


@given(problem=problems(), steps=horizon)
def test_best_alpha_minimises(problem: Constants, steps: int) -> None:
    most = min(1.0, 0.999999 / np.sqrt(max(float(problem.bias_growth), 1e-9)))
    found = least(lambda alpha: theory.averaging_cost(problem, min(alpha, most), steps), 1e-9, most)
    assert theory.averaging_cost(problem, theory.best_alpha(problem, steps), steps) <= found * (1 + 1e-9)


@given(problem=problems(), m=st.floats(1, 1e3), steps=horizon)
def test_best_alpha_minimises_where_m_limits_it(problem: Constants, m: float, steps: int) -> None:
    problem = replace(problem, bias_growth=m)
    found = least(lambda alpha: theory.averaging_cost(problem, alpha, steps), 1e-9, (1 - 1e-9) / np.sqrt(m))
    best = theory.best_alpha(problem, steps)
    assert best < 1 / np.sqrt(m)
    assert theory.averaging_cost(problem, best, steps) <= found * (1 + 1e-9)


@given(problem=problems(), v=positive)
def test_least_noise_alpha_minimises(problem: Constants, v: float) -> None:
    found = least(lambda alpha: theory.oracle(problem, min(alpha, 1.0), v).noise, 1e-9, 1.0)
    assert theory.oracle(problem, theory.least_noise_alpha(problem, v), v).noise <= found * (1 + 1e-9)


@given(problem=problems(), alpha=weight, steps=horizon, error=st.one_of(st.none(), positive))
def test_best_beta_minimises(problem: Constants, alpha: float, steps: int, error: float | None) -> None:
    lr = 0.1 * float(theory.correction_max_lr(problem, alpha))

    def bound(beta: float) -> Any:
        return theory.correction_bound(problem, alpha, min(beta, 1.0), lr, steps, initial_error=error)

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
        found = minimize(other, np.log(start), method="Nelder-Mead", options={"fatol": 1e-13, "xatol": 1e-9})
        assert bound <= found.fun * (1 + 1e-7)


def test_best_beta_has_the_limits_of_theory() -> None:
    problem = Constants(smoothness=1, initial_gap=1, noise=1, n_peers=4, hessian_gap=0.01)
    variance, s, lr = float(problem.variance(0.8)), 1.25, 1e-4
    drifting = theory.best_beta(problem, 0.8, lr, 10**9, initial_error=0)
    assert drifting == pytest.approx((2 * 0.01**2 * lr**2 * variance / s) ** (1 / 3), rel=0.01)
    forgetting = theory.best_beta(replace(problem, hessian_gap=0), 0.8, lr, 10**6, initial_error=0.5)
    assert forgetting == pytest.approx(np.sqrt(0.5 / (s * 10**6)), rel=0.01)


@given(problem=problems(), n_peers=st.integers(1, 1000), steps=horizon)
def test_closed_forms_for_equal_noises_and_bounded_bias(problem: Constants, n_peers: int, steps: int) -> None:
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
        [theory.averaging_speedup(replace(copies, bias_growth=m), 100) for m in (0.0, 0.2, 0.5, 1.0)]
    )
    assert (np.diff(speedups, axis=0) < 0).all()
    assert np.all(theory.averaging_speedup(replace(copies, noise=0.0, peer_noise=0.0), 100) == 1)


@given(problem=problems(), alpha=weight, steps=st.integers(10, 1000))
def test_best_tau_minimises_the_cost(problem: Constants, alpha: float, steps: int) -> None:
    noise, bias = np.array([1.0, 2.0, 0.5]), np.array([0.3, 0.0, 0.6])

    def cost(tau: Any) -> float:
        peers = Constants.from_peers(
            smoothness=problem.smoothness,
            pl=problem.pl,
            initial_gap=1,
            noise=problem.noise,
            bias_growth=problem.bias_growth,
            tau=tau,
            peer_noise=noise,
            bias_floor=bias,
        )
        return float(theory.averaging_cost(peers, alpha, steps))

    best = theory.best_tau(problem, alpha, steps, peer_noise=noise, bias_floor=bias)
    for other in np.vstack([np.eye(3), np.random.default_rng(0).dirichlet(np.ones(3), 8)]):
        assert cost(best) <= cost(0.5 * best + 0.5 * other) * (1 + 1e-12)
        assert cost(best) <= cost(0.99 * best + 0.01 * other) * (1 + 1e-12)


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
    schedule = [(2 * t + 1) / (rate * (t + 1) ** 2) for t in range(int(2.2 / (rate * descent.max_lr)) + 3)]
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


def test_everything_broadcasts() -> None:
    problem = Constants(
        smoothness=1,
        pl=np.array([0.1, 0.5])[:, None],
        initial_gap=1,
        noise=np.array([0.5, 1, 2]),
        n_peers=4,
        bias_floor=0.1,
        hessian_gap=0.2,
    )
    together = theory.plan(problem, 1000)
    for i, j in np.ndindex(2, 3):
        alone = replace(problem, pl=problem.pl[i, 0], noise=problem.noise[j])  # type: ignore[index]
        for name, choice in theory.plan(alone, 1000).items():
            for field in fields(choice):
                value = getattr(together[name], field.name)
                expected = getattr(choice, field.name)
                if expected is not None:
                    assert np.broadcast_to(value, (2, 3))[i, j] == pytest.approx(expected), (name, field.name)


def test_plan_is_made_of_the_bounds() -> None:
    problem = Constants(smoothness=2, pl=1, initial_gap=3, noise=2, n_peers=9, bias_floor=0.05, hessian_gap=0.01)
    plan = theory.plan(problem, 5000)
    assert list(plan) == ["alone", "wga", "bc_oracle", "bc"]
    assert plan["alone"].speedup == 1
    assert plan["wga"].alpha == theory.best_alpha(problem, 5000)
    assert plan["wga"].bound < plan["alone"].bound
    assert plan["bc_oracle"].speedup == pytest.approx(10)
    bc = plan["bc"]
    bound = theory.correction_bound(problem, bc.alpha, bc.beta or 0, bc.lr, 5000)
    assert bc.bound == pytest.approx(bound / 2)
    assert theory.alone(problem).max_lr == 0.5


GOOD: dict[str, Any] = {"smoothness": 1, "pl": 0.5, "initial_gap": 1, "noise": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pl": 2}, "`pl` must not exceed `smoothness`, got pl = 2 and smoothness = 1"),
        ({"pl": [0.5, 3], "smoothness": [1, 2]}, "got pl = 3 and smoothness = 2"),
        ({"noise": -1}, "`noise` must not be negative, got -1"),
        ({"peer_noise": -0.5}, "`peer_noise` must not be negative, got -0.5"),
        ({"bias_floor": -2}, "`bias_floor` must not be negative, got -2"),
        ({"smoothness": 0, "pl": 0}, "`smoothness` must be positive, got 0"),
        ({"initial_gap": 0}, "`initial_gap` must be positive, got 0"),
        ({"n_peers": 0}, "`n_peers` must be at least 1, got 0"),
        ({"hessian_gap": np.inf}, "`hessian_gap` must be finite, got inf"),
        ({"noise": "loud"}, "`noise` must be a number, got 'loud'"),
    ],
)
def test_inconsistent_constants_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        Constants(**(GOOD | wrong))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: theory.averaging(p, 0.6), "`alpha` must be below 1/√m.* got 0.6; take less than 0.5"),
        (lambda p: theory.averaging(p, 1.2), r"`alpha` must lie in \[0, 1\], got 1.2"),
        (lambda p: theory.best_tau(p, 0.6, 9, peer_noise=[1], bias_floor=[1]), "`alpha` must be below 1/√m"),
        (
            lambda p: theory.alone(p).loss_bound(1.5, 10),
            "`lr` must not exceed `max_lr`, got 1.5; take at most 1",
        ),
        (lambda p: theory.alone(p).loss_bound(-1, 10), "`lr` must not be negative, got -1"),
        (lambda p: theory.alone(p).gradient_bound(0, 10), "`lr` must be positive, got 0"),
        (lambda p: theory.alone(p).loss_bound(1, 0), "`steps` must be at least 1, got 0"),
        (lambda p: theory.alone(replace(p, pl=0)).loss_bound(1, 9), "`pl` must be positive"),
        (lambda p: theory.best_alpha(replace(p, pl=0), 9), "`pl` must be positive"),
        (lambda p: theory.oracle(p, 0.5, -1), "`oracle_noise` must not be negative, got -1"),
        (lambda p: theory.correction_bound(p, 0.5, 0.0, 0.1, 9), r"`beta` must lie in \(0, 1\], got 0"),
        (lambda p: theory.correction_bound(p, 0.5, 0.01, 0.1, 9), "`beta` must exceed √8·αδη, got 0.01"),
        (lambda p: theory.correction_bound(p, 0.5, 0.5, 2, 9), "`lr` must not exceed 1/L, got 2; take 1"),
        (lambda p: theory.best_beta(p, 1, 0.9, 9), r"`lr` must lie in \(0, .* got 0.9; take 0.333"),
        (
            lambda p: theory.best_correction(replace(p, noise_growth=1), 9),
            "`noise_growth` must be 0 here, got 1",
        ),
        (
            lambda p: theory.best_correction(p, 9, initial_error=-1),
            "`initial_error` must not be negative, got -1",
        ),
        (lambda p: theory.hessian_gap_limit(p, 0, 0.1), "`alpha` must be positive here, got 0"),
        (
            lambda p: Constants.from_peers(smoothness=1, initial_gap=1, noise=1, tau=[1, 1], peer_noise=[1, 1]),
            "`tau` must sum to 1, got 2; divide",
        ),
    ],
)
def test_wrong_knobs_are_named(act: Callable[[Constants], Any], message: str) -> None:
    problem = Constants(**GOOD, bias_growth=4, hessian_gap=1)
    with pytest.raises(KnobError, match=message):
        act(problem)


# Peers that differ.


@given(seed=st.integers(0, 2**32 - 1), steps=horizon)
@settings(max_examples=15)
def test_best_averaging_is_the_joint_minimum_over_alpha_and_tau(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    peers = theory.Peers(
        smoothness=2.0,
        pl=rng.uniform(0.1, 2),
        initial_gap=1.0,
        noise=rng.uniform(0.5, 2),
        peer_noise=rng.uniform(0.5, 2, 3),
        bias_floor=rng.uniform(0, 0.2, 3),
        bias_growth=rng.uniform(0, 3, 3) ** 3,
    )
    found = theory.best_averaging(peers, steps)
    assert found.tau.sum() == pytest.approx(1.0)
    assert found.cost == pytest.approx(float(theory.averaging_cost(peers.constants(found.tau), found.alpha, steps)))

    def cost(v: Any) -> float:
        tau = np.exp(v[1:] - v[1:].max())
        alpha = 1 / (1 + np.exp(-v[0]))
        return min(float(theory.averaging_cost(peers.constants(tau / tau.sum()), alpha, steps)), 1e6)

    starts = [np.append(-1.0, 3 * np.eye(3)[k]) for k in range(3)]
    tried = [minimize(cost, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts]
    assert found.cost <= min(tried) * (1 + 1e-6)


def test_best_averaging_without_growth_is_water_filling() -> None:
    floors, noises = np.array([0.0, 0.05, 0.4]), np.array([1.0, 2.0, 0.5])
    peers = theory.Peers(smoothness=2, pl=0.5, initial_gap=1, noise=1, peer_noise=noises, bias_floor=floors)
    found = theory.best_averaging(peers, 300)
    problem = peers.constants(found.tau)
    wanted = theory.best_tau(problem, found.alpha, 300, peer_noise=noises, bias_floor=floors)
    assert found.tau == pytest.approx(wanted)
    assert found.alpha == pytest.approx(float(theory.best_alpha(problem, 300)))
    given_tau = theory.best_averaging(peers, 300, [0, 0, 1])
    assert given_tau.tau.tolist() == [0, 0, 1]
    assert given_tau.cost > found.cost


def test_corrected_peers_are_those_of_smallest_gap_and_knobs_the_bounds_own() -> None:
    peers = theory.Peers(
        smoothness=1, initial_gap=1, noise=5, peer_noise=[5, 4, 6, 5], hessian_gap=[3e-4, 20.0, 1e-4, 90.0]
    )
    tau, knobs = theory.best_corrected_peers(peers, 5000)
    assert tau.tolist() == [0.5, 0.0, 0.5, 0.0]
    alone = theory.best_correction(peers.constants(tau), 5000)
    assert knobs == pytest.approx(alone)
    fixed = theory.best_corrected_peers(peers, 5000, alpha=0.3, lr=0.01, tau=[0, 1, 0, 0]).knobs
    assert (fixed.alpha, fixed.lr) == (0.3, 0.01)
    assert fixed.beta == pytest.approx(float(theory.best_beta(peers.constants([0, 1, 0, 0]), 0.3, 0.01, 5000)))
    with pytest.raises(KnobError, match="at least one peer"):
        theory.Peers(smoothness=1, initial_gap=1, noise=1, peer_noise=[])
