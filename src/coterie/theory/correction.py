"""Bias correction with an estimated bias: Theorem 3, corrected; and AuxMom, which estimates it once for K steps."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from coterie.theory.choices import least_noise_alpha
from coterie.theory.constants import (
    Constants,
    Numbers,
    as_numbers,
    check,
    check_alpha,
    check_lr,
    check_steps,
)


class Correction(NamedTuple):
    """The knobs of bias correction and the bound on the mean squared gradient that they give."""

    alpha: Numbers
    beta: Numbers
    lr: Numbers
    bound: Numbers


def correction_bound(
    problem: Constants,
    alpha: Numbers,
    beta: Numbers,
    lr: Numbers,
    steps: Numbers,
    *,
    initial_error: Numbers | None = None,
    warm_up: bool | None = None,
) -> Numbers:
    """Bound the mean squared gradient of bias correction with constant knobs.

        (1/T) Σ_t E‖∇f_0(x_t)‖² ≤ [ (1 − q)(2F_0/(ηT) + Lησ²(α))
                                     + α²E_0/(βT) + (1 + β)(α²βs + r²σ²(α)) ] / (1 − 2q)

        s = σ_0² + σ_a²,   r = αδη/β,   q = 2(1 + β)r² < 1/2

    At α = 0 it is Alone's bound; with δ = 0 what it adds to an oracle's is the price of estimating
    the bias. It holds for η ≤ 1/L and bounded noise (no `noise_growth`).

    Args:
        problem: the constants.
        alpha: α in [0, 1].
        beta: β in (0, 1].
        lr: η, at most `correction_max_lr`.
        steps: T.
        initial_error: E_0 = E‖c_0 − (∇f_avg − ∇f_0)(x_0)‖²: s/S where c_0 is the mean of S observed
            biases drawn before the first step, ‖(∇f_avg − ∇f_0)(x_0)‖² where c_0 = 0; s when None.
        warm_up: what `BiasCorrection` does in a run: the first step is taken alone, c_1 is the bias
            it shows, and β_t = max(β, 1/(t + 1)), or β after it where False. Then E_0, 0 when None,
            is that of a c_0 which the first step uses all the same. None: the formula above, with β
            from the first step on.

    In a run, with π_t = 1/t in the warm-up, which falls to β/(2 − β) after it, and any θ > 0 (the
    best is taken),

        (1/T) Σ_t E‖∇f_0(x_t)‖² ≤ [ (1 − q)(2F_0/(ηT) + Lησ²(α)) + (1 + θ)α²s Σπ_t/T + (1 +
        1/θ)r²σ²(α) ] / (1 − 2q)

    with q = 2(1 + 1/θ)r², where σ²(α) is the mean over the steps: the first has σ_0².

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, hessian_gap=0.01)
        >>> print(f"{correction_bound(problem, alpha=0.9, beta=0.02, lr=0.1, steps=10_000):.4f}")
        0.0373
        >>> print(f"{correction_bound(problem, 0.9, beta=0.02, lr=0.1, steps=10_000, warm_up=True):.4f}")
        0.0276

    Reference: Theorem 3; what is printed does not hold, see `docs/errata.md` for that and for the
    proof.
    """
    alpha, steps = check_alpha(alpha), check_steps(steps)
    lr = check_lr(lr, 1 / problem.smoothness, "must not exceed 1/L")
    beta = as_numbers("beta", beta)
    check("beta", beta, np.greater(beta, 0) & np.less_equal(beta, 1), "must lie in (0, 1]")
    follows = 4 * (1 + beta) * (alpha * problem.hessian_gap * lr / beta) ** 2 < 1
    check("beta", beta, follows, "must exceed √8·αδη", "take a larger `beta` or a smaller `lr`")
    start = _start(problem, initial_error, warm_up)
    return start.bound(problem, alpha, beta, lr, steps)


def correction_max_lr(problem: Constants, alpha: Numbers, beta: Numbers = 1.0) -> Numbers:
    """Return a step size up to which `correction_bound` holds, min(1/L, β/(3αδ)).

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=1, noise=1, hessian_gap=2)
        >>> print(f"{correction_max_lr(problem, alpha=0.5, beta=0.3):.3f}")
        0.100

    Reference: Theorem 3, where 1/(6α²δ²), not a step size, is printed.
    """
    gap = 3 * check_alpha(alpha) * problem.hessian_gap
    return beta / np.maximum(gap, beta * problem.smoothness)


def best_beta(
    problem: Constants,
    alpha: Numbers,
    lr: Numbers,
    steps: Numbers,
    *,
    initial_error: Numbers | None = None,
    warm_up: bool | None = None,
) -> Numbers:
    """Return the β with the least `correction_bound` for a step size of at most `correction_max_lr`.

    Where the drift of the bias decides it is near (2δ²η²σ²(α)/s)^{1/3}, where forgetting c_0
    decides near √(E_0/(sT)).

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, hessian_gap=0.01)
        >>> print(f"{best_beta(problem, alpha=0.9, lr=0.1, steps=10_000):.4f}")
        0.0114

    Reference: the minimum that the proof of Theorem 3 (Appendix C.4) takes for two of the terms.
    """
    alpha, lr, steps = check_alpha(alpha), as_numbers("lr", lr), check_steps(steps)
    limit = correction_max_lr(problem, alpha)
    fits = np.greater(lr, 0) & np.less_equal(lr, limit * (1 + 1e-9))
    check("lr", lr, fits, "must lie in (0, min(1/L, 1/(3αδ))]", f"take {np.min(limit):g}")
    return _best_beta(problem, alpha, lr, steps, _start(problem, initial_error, warm_up))


def best_correction(
    problem: Constants,
    steps: Numbers,
    alpha: Numbers | None = None,
    *,
    initial_error: Numbers | None = None,
    warm_up: bool | None = None,
) -> Correction:
    """Return the knobs with the least `correction_bound`, and that bound.

    Α is that of least noise unless given.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, hessian_gap=0.01)
        >>> print(" ".join(f"{value:.4f}" for value in best_correction(problem, steps=10_000)))
        0.9000 0.0105 0.0583 0.0313

    Reference: Theorem 3 and Corollary 1.
    """
    alpha = least_noise_alpha(problem) if alpha is None else check_alpha(alpha)
    steps = check_steps(steps)
    start = _start(problem, initial_error, warm_up)
    largest = correction_max_lr(problem, alpha)

    def bound(lr: NDArray[np.float64]) -> Numbers:
        return start.bound(problem, alpha, _best_beta(problem, alpha, lr, steps, start), lr, steps)

    lr = _minimise(bound, largest * 1e-12, largest)
    beta = _best_beta(problem, alpha, lr, steps, start)
    return Correction(alpha, beta, lr, start.bound(problem, alpha, beta, lr, steps))


def hessian_gap_limit(problem: Constants, alpha: Numbers, lr: Numbers) -> Numbers:
    """Return the δ up to which following the bias as it drifts costs no more than the noise does.

        (3/2)α²βs ≤ Lησ²(α) at β = (2δ²η²σ²(α)/s)^{1/3}:   δ² ≤ 4L³ησ⁴(α)/(27α⁶s²)

    Below it the noise term, and with it the linear speedup, is what remains for large T, as long as
    c_0 is
    good: S ≫ s²/(LF_0σ²(α)) first batches. With η ∝ 1/√T it shrinks as T^{−1/4}.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9)
        >>> print(f"{hessian_gap_limit(problem, alpha=0.9, lr=0.01):.4f}")
        0.0048

    Reference: Section 5.2, “Condition on the dissimilarity δ”, where σ⁶(α) is printed for σ⁴(α).
    """
    alpha, lr = check_alpha(alpha), as_numbers("lr", lr)
    check("alpha", alpha, np.greater(alpha, 0), "must be positive here")
    noise = np.sqrt(4 * problem.smoothness**3 * lr / 27) * problem.variance(alpha)
    return noise / (alpha**3 * _bias_variance(problem))


class _Start(NamedTuple):
    """How the bias estimate starts.

    C_0 with its error, or the bias of the first step, with or without warm-up.
    """

    error: Numbers
    warm_up: bool | None = None

    def bound(
        self, problem: Constants, alpha: Numbers, beta: Numbers, lr: Numbers, steps: Numbers
    ) -> Numbers:
        """Return the bound, as `correction_bound` says."""
        variance, s = problem.variance(alpha), _bias_variance(problem)
        drift = (alpha * problem.hessian_gap * lr / beta) ** 2
        if self.warm_up is None:
            q = 2 * (1 + beta) * drift
            descent = 2 * problem.initial_gap / (lr * steps) + problem.smoothness * lr * variance
            bias = alpha**2 * self.error / (beta * steps) + (1 + beta) * (
                alpha**2 * beta * s + drift * variance
            )
            return ((1 - q) * descent + bias) / (1 - 2 * q)
        variance = variance + np.maximum(problem.noise**2 - variance, 0) / steps
        descent = 2 * problem.initial_gap / (lr * steps) + problem.smoothness * lr * variance
        noise = alpha**2 * (
            s * _noise_in_run(beta, steps, warm_up=self.warm_up) + self.error / steps
        )
        best: Numbers = np.inf
        for theta in _THETAS:
            q = 2 * (1 + 1 / theta) * drift
            with np.errstate(divide="ignore", invalid="ignore"):
                one = ((1 - q) * descent + (1 + theta) * noise + q / 2 * variance) / (1 - 2 * q)
            best = np.minimum(best, np.where(2 * q < 1, one, np.inf))
        return np.asarray(best)[()]


_THETAS = np.geomspace(1e-3, 10, 25)


def _noise_in_run(beta: Numbers, steps: Numbers, *, warm_up: bool) -> Numbers:
    """Return the mean of π_t over the steps.

    The share of s that is in c_t, which the first step does not use.

    π_1 = 1,   π_{t+1} = (1 − β_t)²π_t + β_t²:   1/t while β_t = 1/(t + 1), then to β/(2 − β) by (1
    − β)²
    """
    warm = np.floor(1 / beta + 1e-9) if warm_up else np.ones_like(beta)
    rest, kept, level = np.maximum(steps - 1 - warm, 0), (1 - beta) ** 2, beta / (2 - beta)
    with_beta = rest * level + (1 / warm - level) * kept * (1 - kept**rest) / (beta * (2 - beta))
    return (digamma(np.minimum(warm, steps - 1) + 1) + np.euler_gamma + with_beta) / steps


def _best_beta(
    problem: Constants, alpha: Numbers, lr: Numbers, steps: Numbers, start: _Start
) -> NDArray[np.float64]:
    # Far below 1/T the start is never forgotten, and a smaller β would change nothing.
    least = np.maximum(3 * alpha * problem.hessian_gap * lr, 1e-6 / steps)
    return _minimise(
        lambda beta: start.bound(problem, alpha, beta, lr, steps), np.minimum(least, 1), 1.0
    )


def _minimise(
    cost: Callable[[NDArray[np.float64]], Numbers], low: Numbers, high: Numbers
) -> NDArray[np.float64]:
    """Return where a cost of positive numbers is least, elementwise, by a grid that zooms in."""
    shape = np.shape(cost(np.multiply(high, np.ones_like(low))))
    bottom, top = np.broadcast_to(np.log(low), shape), np.broadcast_to(np.log(high), shape)
    fractions = np.linspace(0, 1, 33).reshape(-1, *(1 for _ in shape))
    for _ in range(10):
        grid = bottom + (top - bottom) * fractions
        best = np.argmin(cost(np.exp(grid)), axis=0)
        middle = np.take_along_axis(grid, best[None], axis=0)[0]
        reach = (top - bottom) / 32
        bottom, top = np.maximum(middle - reach, bottom), np.minimum(middle + reach, top)
    return np.asarray(np.exp(middle))[()]


def _bias_variance(problem: Constants) -> Numbers:
    """Return s = σ_0² + σ_a², the variance of one observed bias."""
    problem.check_bounded_noise("Theorem 3 assumes bounded noise")
    return problem.noise**2 + problem.peer_variance


def _start(problem: Constants, error: Numbers | None, warm_up: bool | None) -> _Start:
    if error is None:
        return _Start(_bias_variance(problem) if warm_up is None else 0.0, warm_up)
    error = as_numbers("initial_error", error)
    check("initial_error", error, np.greater_equal(error, 0), "must not be negative")
    return _Start(error, warm_up)


_SPLITS = np.geomspace(1e-2, 1e2, 17)


def auxiliary_bound(
    problem: Constants,
    rate: Numbers,
    lr: Numbers,
    rounds: Numbers,
    local_steps: Numbers,
    *,
    initial_error: Numbers | None = None,
    noise_gap: Numbers | None = None,
) -> Numbers:
    """Bound the mean squared gradient of AuxMom, over all K·T points of T rounds.

    Of AuxMVR with `noise_gap`.

        mean E‖∇f_0(y)‖² ≤ [ (1 − q)(2F_0/(ηKT) + Lησ_a²) + (1 + θ)(uE_0/(aT) + vas) + qσ_a²/(2K) ]
        / (1 − 2q)

        s = σ_0² + σ_a²,   q = 2(ηK)²[(1 + 1/θ)δ² + 2(1 + θ)w]
        AuxMom   u = v = 1,   w = (1 − a)δ²/a²
        AuxMVR   u = 1/(2 − a),   v = (1 + ω)/(2 − a),   w = (1 + 1/ω)(1 − a)²λ²/(a(2 − a))

    For η ≤ 1/L, 2q < 1 (infinite beyond) and bounded noise. The best θ is taken; ω = 1, or 0 where
    λ = 0. What K peers' steps gain is in F_0/(ηKT): K times fewer own gradients for the same start;
    what they cost is q.

    Args:
        problem: the constants; σ_a² is the variance of the peers' mean, δ the gap of its Hessian.
        rate: a in (0, 1].
        lr: η, at most 1/L.
        rounds: T.
        local_steps: K.
        initial_error: E_0, of the first m about the bias at the start; s, one observed bias, when
            None.
        noise_gap: λ for AuxMVR: the noise of a bias, on one batch, differs between two points by at
            most λ times their distance (in the mean square). None: AuxMom.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=100, hessian_gap=0.01)
        >>> for noise_gap in (None, 0.01):
        ...     bound = auxiliary_bound(problem, 0.02, 0.05, 10_000, 10, noise_gap=noise_gap)
        ...     print(f"{bound:.4f}")
        0.0537
        0.0250

    Reference: Chayti and Karimireddy, arXiv:2206.00395; the proof here is our own, in
    `docs/theory.md`.
    """
    rate, local_steps = as_numbers("rate", rate), as_numbers("local_steps", local_steps)
    rounds = check_steps(rounds)
    check("rate", rate, np.greater(rate, 0) & np.less_equal(rate, 1), "must lie in (0, 1]")
    lr = check_lr(lr, 1 / problem.smoothness, "must not exceed 1/L")
    check("local_steps", local_steps, np.greater_equal(local_steps, 1), "must be at least 1")
    problem.check_bounded_noise()
    peers = problem.peer_variance
    s = problem.noise**2 + peers
    error = s if initial_error is None else as_numbers("initial_error", initial_error)
    forgotten: Numbers = 1.0
    kept: Numbers = 1.0
    if noise_gap is None:
        follows = (1 - rate) * problem.hessian_gap**2 / rate**2
    else:
        gap = as_numbers("noise_gap", noise_gap)
        forgotten, kept = 1 / (2 - rate), np.where(np.equal(gap, 0), 1, 2) / (2 - rate)
        follows = 2 * (1 - rate) ** 2 * gap**2 / (rate * (2 - rate))
    descent = (
        2 * problem.initial_gap / (lr * local_steps * rounds) + problem.smoothness * lr * peers
    )
    bias = forgotten * error / (rate * rounds) + kept * rate * s
    best: Numbers = np.inf
    for theta in _SPLITS:
        q = (
            2
            * (lr * local_steps) ** 2
            * ((1 + 1 / theta) * problem.hessian_gap**2 + 2 * (1 + theta) * follows)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            one = ((1 - q) * descent + (1 + theta) * bias + q * peers / (2 * local_steps)) / (
                1 - 2 * q
            )
        best = np.minimum(best, np.where(2 * q < 1, one, np.inf))
    return np.asarray(best)[()]
