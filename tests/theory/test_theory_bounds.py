"""Every bound against exact moments of random quadratics, and the printed ones that fail (docs/errata.md).

The truth is a plain recursion of second moments, written here so that nothing is checked against itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie import theory
from coterie.theory import Constants

Array = NDArray[np.float64]
CASES = 200
HORIZONS = (1, 7, 60, 400)


class Exact(NamedTuple):
    loss: Array  # E f_0(x_T) − f_0*
    squared_gradient: Array  # the mean of E‖∇f_0(x_t)‖² over t < T


@dataclass(frozen=True)
class Quadratics:
    """Many problems at once, arrays of shape (cases, coordinates); x is measured from user 0's optimum.

    ∇f_0 = a x with noise of variance v_0 + M_0(a x)²; ∇f_avg = b x + k with noise v_1 + M_1(b x + k)².
    """

    a: Array
    b: Array
    k: Array
    x: Array
    own: Array
    peers: Array
    growth: Array
    peer_growth: Array

    def run(
        self,
        lr: Any,
        steps: int,
        *,
        alpha: Any,
        beta: Any = 0.0,
        c: tuple[Array, Array] | None = None,
        oracle: Any = None,
    ) -> Exact:
        """Return the exact moments of averaging, of bias correction from c = (mean, variance), of an oracle."""
        alpha, beta = (np.broadcast_to(np.reshape(knob, (-1, 1)), self.a.shape) for knob in (alpha, beta))
        rates = np.broadcast_to(lr, (steps, len(self.a)))[..., None]
        mean, variance = (np.zeros_like(self.a),) * 2 if c is None else c
        moments = np.einsum("...i,...j", state := np.stack([np.ones_like(self.x), self.x, mean], -1), state)
        moments[..., 2, 2] += variance
        total = np.zeros(self.a.shape)
        for eta in rates:
            total += self.a**2 * moments[..., 1, 1]
            own, peers = self._noise(moments)
            extra = 0.0 if oracle is None else alpha**2 * np.reshape(oracle, (-1, 1)) ** 2
            move = np.zeros((*self.a.shape, 3, 3))
            move[..., 0, 0] = 1
            bias = 0.0 if oracle is not None else 1.0
            move[..., 1, 0] = -eta * alpha * bias * self.k
            move[..., 1, 1] = 1 - eta * (self.a + alpha * bias * (self.b - self.a))
            move[..., 1, 2] = 0.0 if c is None else eta * alpha
            move[..., 2, 0], move[..., 2, 1] = beta * self.k, beta * (self.b - self.a)
            move[..., 2, 2] = 1 - beta
            moments = move @ moments @ np.swapaxes(move, -1, -2)
            moments[..., 1, 1] += eta**2 * ((1 - alpha) ** 2 * own + alpha**2 * peers + extra)
            moments[..., 1, 2] -= eta * beta * (alpha * peers - (1 - alpha) * own)
            moments[..., 2, 1] = moments[..., 1, 2]
            moments[..., 2, 2] += beta**2 * (own + peers)
        return Exact((self.a * moments[..., 1, 1] / 2).sum(-1), total.sum(-1) / steps)

    def _noise(self, moments: Array) -> tuple[Array, Array]:
        one, x, xx = moments[..., 0, 0], moments[..., 1, 0], moments[..., 1, 1]
        peers = self.b**2 * xx + 2 * self.b * self.k * x + self.k**2 * one
        return self.own + self.growth * self.a**2 * xx, self.peers + self.peer_growth * peers

    def constants(self, split: Array) -> Constants:
        """Return the least constants: (u + v)² ≤ (1 + split)u² + (1 + 1/split)v² gives m and ζ."""
        same = np.isclose(self.a, self.b).all(-1)
        return Constants(
            smoothness=self.a.max(-1),
            pl=self.a.min(-1),
            initial_gap=(self.a * self.x**2 / 2).sum(-1),
            noise=np.sqrt(self.own.sum(-1)),
            peer_noise=np.sqrt(self.peers.sum(-1)),
            bias_growth=np.where(same, 0, (1 + split) * ((self.b / self.a - 1) ** 2).max(-1)),
            bias_floor=np.sqrt(np.where(same, 1, 1 + 1 / split) * (self.k**2).sum(-1)),
            hessian_gap=abs(self.b - self.a).max(-1),
            noise_growth=self.growth[..., 0],
            peer_noise_growth=self.peer_growth[..., 0],
        )


def draw(rng: np.random.Generator, *, growing: bool = False) -> tuple[Quadratics, Constants, Array]:
    """Draw problems over many orders of magnitude, with their constants and an admissible α for each."""

    def log_uniform(low: float, high: float, *shape: int) -> Array:
        return 10 ** rng.uniform(low, high, shape)

    shape = (CASES, int(rng.integers(1, 4)))
    a = log_uniform(-1, 1, *shape)
    growth = log_uniform(-2, 1, CASES, 1) * (rng.random((CASES, 1)) < 0.8) * growing
    peer_growth = log_uniform(-2, 1, CASES, 1) * (rng.random((CASES, 1)) < 0.8) * growing
    problem = Quadratics(
        a=a,
        b=a * np.where(rng.random((CASES, 1)) < 0.3, 1, log_uniform(-1, 0.7, *shape)),
        k=log_uniform(-2, 1, *shape) * rng.choice([-1, 0, 1], shape),
        x=log_uniform(-2, 1, *shape) * rng.choice([-1, 1], shape),
        own=log_uniform(-4, 2, *shape) * (rng.random((CASES, 1)) < 0.8),
        peers=log_uniform(-4, 2, *shape) * (rng.random((CASES, 1)) < 0.8),
        growth=np.broadcast_to(growth, shape),
        peer_growth=np.broadcast_to(peer_growth, shape),
    )
    constants = problem.constants(log_uniform(-1, 1, CASES))
    most = np.minimum(1, 0.95 / np.sqrt(np.maximum(constants.bias_growth, 1e-9)))
    return problem, constants, most * rng.choice([0, 1, 0.3, 0.7], CASES) * rng.uniform(0.8, 1, CASES)


def some(rng: np.random.Generator, limit: Any) -> Any:
    """Return step sizes up to the limit, a third of them at it."""
    return limit * np.where(rng.random(CASES) < 0.3, 1, 10 ** rng.uniform(-2, 0, CASES))


def assert_bounds(exact: Array, bound: Any, *, tight: float) -> None:
    """Assert that the bound holds in every case, and is within a factor of the truth in one."""
    ratio = np.divide(exact, bound, out=np.where(exact > 0, np.inf, 0), where=bound > 0)
    assert (ratio <= 1 + 1e-9).all(), f"the bound fails in {np.sum(ratio > 1)} cases, by up to {ratio.max()}"
    assert ratio.max() >= tight


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("steps", HORIZONS)
def test_averaging_bounds_hold(steps: int, growing: bool) -> None:
    rng = np.random.default_rng([steps, growing])
    problem, constants, alpha = draw(rng, growing=growing)
    descent = theory.averaging(constants, alpha)
    lr = some(rng, descent.max_lr)
    exact = problem.run(lr, steps, alpha=alpha)
    assert_bounds(exact.squared_gradient, descent.gradient_bound(lr, steps), tight=0.4 if growing else 0.8)
    assert_bounds(exact.loss, descent.loss_bound(lr, steps), tight=0.3 if growing else 0.5)


def test_relaxed_noise_is_bounded_by_the_constants() -> None:
    problem, constants, alpha = draw(np.random.default_rng(7), growing=True)
    for scale in (0, 1e-3, 1, 1e3):  # from the optimum of f_0 outwards
        x = scale * problem.x
        own = problem.own + problem.growth * (problem.a * x) ** 2
        peers = problem.peers + problem.peer_growth * (problem.b * x + problem.k) ** 2
        exact = ((1 - alpha) ** 2 * own.sum(-1)) + alpha**2 * peers.sum(-1)
        gradient = ((problem.a * x) ** 2).sum(-1)
        assert_bounds(exact, constants.variance_growth(alpha) * gradient + constants.variance(alpha), tight=0.5)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("steps", HORIZONS)
def test_decreasing_bound_holds(steps: int, growing: bool) -> None:
    rng = np.random.default_rng([steps, growing, 1])
    problem, constants, alpha = draw(rng, growing=growing)
    descent = theory.averaging(constants, alpha)
    exact = problem.run(descent.decreasing_lr(np.arange(float(steps))[:, None]), steps, alpha=alpha)
    assert_bounds(exact.loss, descent.decreasing_bound(steps), tight=0.1)


@pytest.mark.parametrize("steps", HORIZONS)
def test_oracle_bounds_hold(steps: int) -> None:
    rng = np.random.default_rng([steps, 2])
    problem, constants, _ = draw(rng)
    alpha, v = rng.random(CASES), 10 ** rng.uniform(-2, 1, CASES)
    spread = v / np.sqrt(problem.a.shape[1])  # v² is the variance of the whole vector
    descent = theory.oracle(constants, alpha, v)
    lr = some(rng, descent.max_lr)
    exact = problem.run(lr, steps, alpha=alpha, oracle=spread)
    assert_bounds(exact.squared_gradient, descent.gradient_bound(lr, steps), tight=0.8)
    assert_bounds(exact.loss, descent.loss_bound(lr, steps), tight=0.5)
    rates = descent.decreasing_lr(np.arange(float(steps))[:, None])
    exact = problem.run(rates, steps, alpha=alpha, oracle=spread)
    assert_bounds(exact.loss, descent.decreasing_bound(steps), tight=0.1)


def starts(rng: np.random.Generator, problem: Quadratics) -> tuple[tuple[Array, Array], Array]:
    """Return (mean, variance) of c_0 and E_0: zero, or the mean of S biases observed beforehand."""
    bias = (problem.b - problem.a) * problem.x + problem.k
    zero = rng.random((CASES, 1)) < 0.4
    variance = np.where(zero, 0, (problem.own + problem.peers) / rng.integers(1, 20, (CASES, 1)))
    mean = np.where(zero, 0, bias)
    return (mean, variance), ((mean - bias) ** 2 + variance).sum(-1)


@pytest.mark.parametrize("steps", HORIZONS)
@pytest.mark.parametrize("seed", range(3))
def test_correction_bound_holds(steps: int, seed: int) -> None:
    rng = np.random.default_rng([steps, seed, 3])
    problem, constants, _ = draw(rng)
    alpha, beta = rng.choice([0, 0.3, 1], CASES) * rng.uniform(0.5, 1, CASES), 10 ** rng.uniform(-3, 0, CASES)
    lr = some(rng, theory.correction_max_lr(constants, alpha, beta))
    c, error = starts(rng, problem)
    exact = problem.run(lr, steps, alpha=alpha, beta=beta, c=c)
    bound = theory.correction_bound(constants, alpha, beta, lr, steps, initial_error=error)
    assert_bounds(exact.squared_gradient, bound, tight=0.5)


def test_correction_bound_holds_at_its_best_knobs() -> None:
    rng = np.random.default_rng(4)
    problem, constants, _ = draw(rng)
    c, error = starts(rng, problem)
    alpha, beta, lr, bound = theory.best_correction(constants, 100, initial_error=error)
    exact = problem.run(lr, 100, alpha=alpha, beta=beta, c=c)
    assert_bounds(exact.squared_gradient, bound, tight=0.1)


def simple_correction_bound(constants: Constants, alpha: Any, beta: Any, lr: Any, steps: int, *, error: Any) -> Any:
    """Return the coarser form of the bound, for lr ≤ β/(√72·αδ), as a bound on the mean squared gradient."""
    variance, s = constants.variance(alpha), constants.noise**2 + constants.peer_variance
    drift = (alpha * constants.hessian_gap * lr / beta) ** 2
    start = constants.initial_gap / (lr * steps) + 2 * alpha**2 * error / (beta * steps)
    noise = constants.smoothness * lr * variance / 2 + 2 * alpha**2 * beta * s + 6 * drift * variance
    return 4 * (start + noise)


def test_correction_bound_implies_the_simple_form() -> None:
    rng = np.random.default_rng(5)
    problem, constants, _ = draw(rng)
    alpha, beta = rng.random(CASES), 10 ** rng.uniform(-3, 0, CASES)
    lr = some(rng, np.minimum(1 / constants.smoothness, beta / (72**0.5 * alpha * constants.hessian_gap + 1e-99)))
    _, error = starts(rng, problem)
    for steps in HORIZONS:
        bound = theory.correction_bound(constants, alpha, beta, lr, steps, initial_error=error)
        coarse = simple_correction_bound(constants, alpha, beta, lr, steps, error=error)
        assert (bound <= 0.54 * coarse).all()


def test_correction_bound_is_alones_without_peers_and_nearly_the_oracles_with_a_known_bias() -> None:
    problem = Constants(smoothness=2, initial_gap=3, noise=1, n_peers=9)
    own = theory.alone(problem).gradient_bound(0.1, 100)
    assert theory.correction_bound(problem, 0.0, 0.5, 0.1, 100) == pytest.approx(own)
    known = theory.correction_bound(problem, 0.9, 1e-9, 0.1, 100, initial_error=0)
    assert known == pytest.approx(theory.oracle(problem, 0.9).gradient_bound(0.1, 100))


def test_correction_bound_ends_where_beta_no_longer_follows_the_drift() -> None:
    """It is infinite at q = ½, that is β² = 4(1 + β)(αδη)²."""
    problem, drift = Constants(smoothness=1, initial_gap=1, noise=1, hessian_gap=2), 0.5 * 2 * 0.1
    limit = 2 * drift**2 + np.sqrt(4 * drift**4 + 4 * drift**2)
    near, far = (theory.correction_bound(problem, 0.5, limit * (1 + gap), 0.1, 100) for gap in (1e-9, 1e-1))
    assert near > 1e6 * far


def test_unequal_peers_are_brought_to_equal_ones() -> None:
    """Five peers, each with its curvature, optimum and noise, in one dimension, with weights τ."""
    rng = np.random.default_rng(6)
    shape, split, steps = (CASES, 5), 0.5, 50
    tau = rng.dirichlet(np.ones(5), CASES)
    curvature, shift = 1 + rng.uniform(-0.3, 0.3, shape), rng.normal(0, 0.3, shape)
    noise = 10 ** rng.uniform(-1, 0.5, shape)
    column = {
        name: np.sum(value, -1, keepdims=True)
        for name, value in {
            "b": tau * curvature,
            "k": tau * curvature * shift,
            "peers": (tau * noise) ** 2,
        }.items()
    }
    one, none = np.ones((CASES, 1)), np.zeros((CASES, 1))
    problem = Quadratics(a=one, x=3 * one, own=4 * one, growth=none, peer_growth=none, **column)
    constants = Constants.from_peers(
        smoothness=1,
        pl=1,
        initial_gap=4.5,
        noise=2,
        tau=tau,
        peer_noise=noise,
        bias_floor=np.sqrt(1 + 1 / split) * abs(curvature * shift),
        bias_growth=((1 + split) * (curvature - 1) ** 2).max(-1),
        hessian_gap=abs(curvature - 1).max(-1),
    )
    np.testing.assert_allclose(constants.peer_variance, column["peers"][:, 0])
    for alpha in (0.2, 1.0):
        descent = theory.averaging(constants, alpha)
        exact = problem.run(0.3, steps, alpha=alpha)
        assert_bounds(exact.loss, descent.loss_bound(0.3, steps), tight=0.1)


def test_mean_estimation_is_the_weighted_mean() -> None:
    problem = theory.mean_estimation(noise=2.0, gap=0.5, n_peers=4)
    steps, alpha = 50, 0.3
    one = np.ones((1, 1))
    quadratics = Quadratics(one, one, 0.5 * one, 2 * one, 4 * one, one, 0 * one, 0 * one)
    mean = quadratics.run(1 / np.arange(1, steps + 1)[:, None], steps, alpha=alpha)
    assert 2 * mean.loss[0] == pytest.approx(theory.averaging_cost(problem, alpha, steps))
    descent = theory.averaging(problem, alpha)
    decreasing = quadratics.run(descent.decreasing_lr(np.arange(float(steps))[:, None]), steps, alpha=alpha)
    # The steps (2t + 1)/(t + 1)² weight the sample of step t by (2t + 1)/T².
    share = np.sum((2 * np.arange(steps) + 1.0) ** 2) / steps**4
    assert 2 * decreasing.loss[0] == pytest.approx((alpha * 0.5) ** 2 + share * float(problem.variance(alpha)))


# What is printed and does not hold.


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
    own, peers, delta = (float(v[0, 0]) for v in (problem.own, problem.peers, abs(problem.b - problem.a)))
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
    assert problem.run(descent.best_loss_lr(steps), steps, alpha=0).loss[0] < np.log(steps) * printed


def test_printed_pl_rate_lacks_the_bias_growth() -> None:
    """exp(−μT/L) is faster than the method: without noise and ζ, peers s·f_0 give (α²m)^T exactly."""
    m, alpha, steps = 0.81, 1.0, 30
    problem = scalar(a=1, b=1 - np.sqrt(m), x=np.sqrt(2))  # F_0 = 1, peers (1 − √m) f_0, the step size is 1/L
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
    assert problem.run(descent.max_lr, steps, alpha=alpha).loss[0] <= descent.loss_bound(descent.max_lr, steps)


def test_printed_decreasing_steps_must_not_start_at_zero() -> None:
    """η_0 = 1/μ exceeds 2/L when L > 2μ: from t = 0 the first steps blow F up before the late ones help."""
    steps = 100
    a, none = np.array([[1.0, 100.0]]), np.zeros((1, 2))
    problem = Quadratics(a, a, none, np.array([[0.0, 1e-3]]), none + 1e-6, none, none, none)
    t = np.arange(float(steps))[:, None]
    printed = 4 * 100 * 2e-6 / (2 * steps)
    assert problem.run((2 * t + 1) / (t + 1) ** 2, steps, alpha=0).loss[0] > 1e10 * printed
    descent = theory.alone(problem.constants(np.ones(1)))
    assert problem.run(descent.decreasing_lr(t), steps, alpha=0).loss[0] <= descent.decreasing_bound(steps)


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
