"""The printed bounds and step sizes that fail on exact moments; see docs/errata.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.exact_moments import Array, Quadratics

from coterie import theory


def scalar(
    *,
    a: float,
    b: float = 1.0,
    k: float = 0.0,
    x: float = 1.0,
    own: float = 0.0,
    peers: float = 0.0,
    m1: float = 0.0,
) -> Quadratics:
    """Return one problem in one dimension."""
    return Quadratics(*(np.array([[value]]) for value in (a, b, k, x, own, peers, 0.0, m1)))


def printed_theorem_3(
    problem: Quadratics, alpha: float, lr: float, steps: int, batches: float = 1.0
) -> tuple[float, float]:
    """Return β and the right side of Theorem 3 as printed, for c_0 from `batches` batches and ζ = 0."""
    own, peers, delta = (
        float(v[0, 0]) for v in (problem.own, problem.peers, abs(problem.b - problem.a))
    )
    a, x = float(problem.a[0, 0]), float(problem.x[0, 0])
    s, variance = own + peers, (1 - alpha) ** 2 * own + alpha**2 * peers
    tilde = 2 * (1 + (delta / a) ** 2) * (a * x) ** 2 / steps + s
    beta = min(1.0, (10 * delta**2 * tilde / s) ** (1 / 3) * lr ** (2 / 3))
    start = a * x**2 / 2 / (lr * steps) + 4 * alpha**2 * s / batches / (beta * steps)
    cube = 12 * alpha**2 * (s * tilde) ** (1 / 3) * (delta * lr) ** (2 / 3)
    return beta, start + cube + a * variance * lr / 2 + 10 * alpha**2 * delta**2 * variance * lr**2


def first_bias(problem: Quadratics, batches: float = 1.0) -> tuple[Array, Array]:
    return (problem.b - problem.a) * problem.x + problem.k, (problem.own + problem.peers) / batches


def test_printed_theorem_3_step_size_diverges() -> None:
    """η ≤ 1/(6α²δ²) is not a step size: at a_0 = 0.01, a_1 = 0.1, α = 0.9 the iteration explodes."""
    problem, alpha, steps = scalar(a=0.01, b=0.1, own=1, peers=1), 0.9, 100
    lr = min(1 / 0.01, 1 / (6 * alpha**2 * 0.09**2))
    beta, bound = printed_theorem_3(problem, alpha, lr, steps)
    move = np.array([[1 - lr * (0.01 + alpha * 0.09), lr * alpha], [beta * 0.09, 1 - beta]])
    assert abs(np.linalg.eigvals(move)).max() == pytest.approx(2.2, abs=0.05)
    exact = problem.run(lr, steps, alpha=alpha, beta=beta, c=first_bias(problem))
    assert exact.squared_gradient[0] / 4 > 1e10 * bound


def test_printed_theorem_3_lacks_a_square() -> None:
    """((σ_0² + σ_a²)(…))^{1/3} is not a variance: with large noise the bound fails at small steps too."""
    lr, alpha, steps, batches = 1e-3, 1.0, 20_000, 1e9
    ratio = {}
    for own in (1.0, 1e12):
        problem = scalar(a=1, b=1.1, own=own)
        beta, bound = printed_theorem_3(problem, alpha, lr, steps, batches)
        exact = problem.run(lr, steps, alpha=alpha, beta=beta, c=first_bias(problem, batches))
        ratio[own] = exact.squared_gradient[0] / 4 / bound
        corrected = theory.correction_bound(
            problem.constants(np.ones(1)), alpha, beta, lr, steps, initial_error=own / batches
        )
        assert exact.squared_gradient[0] <= corrected
    assert ratio[1.0] < 1
    assert ratio[1e12] > 10


def test_the_appendix_variant_of_theorem_3_is_not_broken_by_that_example() -> None:
    """With σ²(α) for one σ_0² + σ_a² the printed bound is far above the example; only its power is wrong."""
    lr, steps, own, delta = 1e-3, 20_000, 1e12, 0.1
    problem = scalar(a=1, b=1 + delta, own=own)  # α = 1 and σ_a = 0: σ²(α) = 0
    tilde = 2 * (1 + delta**2) / steps
    beta = min(1.0, (10 * delta**2 * tilde / own) ** (1 / 3) * lr ** (2 / 3))
    exact = (
        problem.run(lr, steps, alpha=1.0, beta=beta, c=first_bias(problem, 1e9)).squared_gradient[0]
        / 4
    )
    cube = 12 * (own * tilde) ** (1 / 3) * (delta * lr) ** (2 / 3)
    printed = 0.5 / (lr * steps) + 4 * own / 1e9 / (beta * steps) + cube
    assert exact < printed / 1000
    # The minimum over β of A/β² + Bβ is of order (AB²)^{1/3}: printed is (AB)^{1/3}, so f → 10f is
    # answered by 10^{4/3} where a squared gradient is answered by 100.
    a, b = 10 * delta**2 * lr**2 * tilde, 2 * own
    least = min(a / x**2 + b * x for x in 10 ** np.linspace(-9, 0, 100_000))
    assert least == pytest.approx(3 * (a * b**2 / 4) ** (1 / 3), rel=1e-3)


def test_the_remark_after_theorem_2_needs_more_peers() -> None:
    """N ≥ v²/σ_0² + 1 does not give σ̃² = O(σ_0²/N): at v²/σ_0² = N − 1 it is σ_0²/2 for every N."""
    for n in (2, 100, 10_000):
        problem = theory.Constants(smoothness=1, initial_gap=1, noise=3, n_peers=n)
        v = 3 * np.sqrt(n - 1)
        alpha = theory.least_noise_alpha(problem, v)
        assert theory.oracle(problem, alpha, v).noise ** 2 == pytest.approx(9 / 2)
        assert theory.oracle_speedup(problem, v) == pytest.approx(2)


def test_the_final_form_of_a5_is_no_squared_gradient() -> None:
    """2δM_kD_k² with D_k a diameter: for δ = 10 the peer's noise is five times that at user 0's optimum.

    ∇f_1 = (a + δ)x − δz + ζ, and the noise has variance M(∇f_1 − ζ)²: the constant ζ adds none.
    """
    a, delta, z, growth = 1.0, 10.0, 1.0, 0.5
    variance = growth * (delta * z) ** 2  # at x = 0
    assert variance == pytest.approx(5 * (2 * delta * growth * z**2))
    problem = theory.Constants(
        smoothness=a,
        initial_gap=1,
        noise=0,
        hessian_gap=delta,
        bias_floor=7,
        peer_noise_growth=growth,
        diameter=z,
    )
    assert variance <= problem.peer_variance == 2 * growth * (delta * z) ** 2


def test_printed_theorem_2_step_size_lacks_the_horizon() -> None:
    """η = √(2F_0/(Lσ̃²)) does not fall with T: the gradient stays where it is, the printed bound falls."""
    steps, variance, own = 20_000, 100.0, scalar(a=1, own=100)
    lr = min(1, np.sqrt(2 * 0.5 / variance))
    printed = 0.5 / steps + np.sqrt(0.5 * variance / steps)
    assert own.run(lr, steps, alpha=0, oracle=0.0).squared_gradient[0] / 2 > 10 * printed
    descent = theory.oracle(own.constants(np.ones(1)), 0.0)
    good = descent.best_gradient_lr(steps)
    assert own.run(good, steps, alpha=0, oracle=0.0).squared_gradient[0] / 2 <= 2 * printed


def test_printed_pl_step_size_may_not_move_at_all() -> None:
    """log(max(1, 2μF_0T/(3Lσ̃²))) has an argument with a unit: in other units the step size is 0."""
    a, steps = 1000.0, 1000
    problem = scalar(a=a, x=np.sqrt(2 / a), own=700)  # F_0 = 1
    lr = min(1 / a, np.log(max(1, 2 * a * 1 * steps / (3 * a * 700))) / (a * steps))
    assert lr == 0
    printed = np.exp(-steps) + a * 700 / (a**2 * steps)
    assert problem.run(lr, steps, alpha=0).loss[0] > 100 * np.log(steps) * printed
    descent = theory.alone(problem.constants(np.ones(1)))
    assert (
        problem.run(descent.best_loss_lr(steps), steps, alpha=0).loss[0] < np.log(steps) * printed
    )


def test_printed_pl_rate_lacks_the_bias_growth() -> None:
    """exp(−μT/L) is faster than the method: without noise and ζ, peers s·f_0 give (α²m)^T exactly."""
    m, alpha, steps = 0.81, 1.0, 30
    # F_0 = 1, peers (1 − √m) f_0, the step size is 1/L
    problem = scalar(a=1, b=1 - np.sqrt(m), x=np.sqrt(2))
    loss = problem.run(1.0, steps, alpha=alpha).loss[0]
    assert loss == pytest.approx((alpha**2 * m) ** steps)
    assert loss > 1e9 * np.exp(-steps)
    constants = replace(problem.constants(np.ones(1)), bias_growth=m)
    assert loss <= theory.averaging(constants, alpha).loss_bound(1.0, steps)


def test_printed_appendix_pl_step_size_exceeds_its_limit() -> None:
    """2(1 − α²m)η/c = min(η_max, …) allows η = η_max/(1 − α²m): beyond 2/L it diverges."""
    m, alpha, steps = 0.9, 1.0, 50
    problem = scalar(a=1, b=1 + np.sqrt(m))  # without noise the logarithm does not bind
    assert problem.run(1 / (1 - alpha**2 * m), steps, alpha=alpha).loss[0] > 1e10
    assert problem.run(1.0, steps, alpha=alpha).loss[0] < 0.5


def test_printed_relaxed_noise_forgets_the_peers_own_gradient() -> None:
    """M = M_0 + mM_1 is 0 for a shifted copy (m = 0), whose noise M_1‖∇f_1‖² nevertheless grows with x."""
    alpha, growth, shift, steps = 1.0, 5.0, 0.1, 50
    problem = scalar(a=1, b=1, k=shift, m1=growth)
    printed = alpha**2 * shift**2 / 2  # c = 2, η = 1/L, no noise at stationarity: F_T ≤ cα²ζ²/(4μ)
    assert problem.run(1.0, steps, alpha=alpha).loss[0] > 1e10 * printed
    descent = theory.averaging(problem.constants(np.ones(1)), alpha)
    assert problem.run(descent.max_lr, steps, alpha=alpha).loss[0] <= descent.loss_bound(
        descent.max_lr, steps
    )


def test_printed_decreasing_steps_must_not_start_at_zero() -> None:
    """η_0 = 1/μ exceeds 2/L when L > 2μ: from t = 0 the first steps blow F up before the late ones help."""
    steps = 100
    a, none = np.array([[1.0, 100.0]]), np.zeros((1, 2))
    problem = Quadratics(a, a, none, np.array([[0.0, 1e-3]]), none + 1e-6, none, none, none)
    t = np.arange(float(steps))[:, None]
    printed = 4 * 100 * 2e-6 / (2 * steps)
    assert problem.run((2 * t + 1) / (t + 1) ** 2, steps, alpha=0).loss[0] > 1e10 * printed
    descent = theory.alone(problem.constants(np.ones(1)))
    assert problem.run(descent.decreasing_lr(t), steps, alpha=0).loss[
        0
    ] <= descent.decreasing_bound(steps)


def test_corollary_1_needs_a_good_first_estimate() -> None:
    """With δ² = o(1/√T) the printed β may be too small to forget c_0 = b_0: no O(1/√T), no speedup."""
    scaled = []
    for steps in (300, 3_000, 30_000):
        delta, alpha, own = steps**-1.75, 0.9, 1.0  # a = 1 in δ² = δ_0²/T^{3a + ½}
        problem = scalar(a=1, b=1 + delta, own=own, peers=own / 9)
        lr = np.sqrt(2 * 0.5 / (0.1 * steps))
        beta, _ = printed_theorem_3(problem, alpha, lr, steps)
        exact = problem.run(lr, steps, alpha=alpha, beta=beta, c=first_bias(problem))
        scaled.append(exact.squared_gradient[0] * np.sqrt(steps / (0.5 * own / 10)))
        better = theory.best_correction(problem.constants(np.ones(1)), steps)
        exact = problem.run(better.lr, steps, alpha=alpha, beta=better.beta, c=first_bias(problem))
        assert exact.squared_gradient[0] * np.sqrt(steps / (0.5 * own / 10)) < 20
    assert scaled[1] > 2 * scaled[0]
    assert scaled[2] > 2 * scaled[1] > 100  # O(1) by the corollary
