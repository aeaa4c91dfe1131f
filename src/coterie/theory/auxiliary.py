"""AuxMom and AuxMVR: steps by the peers with a bias that is estimated once for K of them."""

import numpy as np

from coterie.theory.constants import Constants, Numbers, as_numbers, check, check_lr, check_steps

_THETAS = np.geomspace(1e-2, 1e2, 17)


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
    for theta in _THETAS:
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
