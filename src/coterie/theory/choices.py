"""The best weights for averaging and for an oracle, and the speedup they bring over training alone."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.gradients.simplex import water_filling
from coterie.theory.constants import (
    Constants,
    Numbers,
    as_numbers,
    check,
    check_alpha,
    check_pl,
    check_steps,
)


def averaging_cost(problem: Constants, alpha: Numbers, steps: Numbers) -> Numbers:
    """Return what averaging costs in the long run, the part of its loss bound that α decides.

        Q(α) = Lσ²(α)/(μ²T(1 − α²m)²) + α²ζ²/(μ(1 − α²m))

    Infinite at and beyond α = 1/√m.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=10, bias_floor=1)
        >>> [float(averaging_cost(problem, alpha, steps=100)) for alpha in (0, 0.5, 1)]
        [1.0, 0.525, 1.1]

    Reference: Theorem 1, μ-PL case; Section 4, “Speedup over training alone”.
    """
    alpha, steps, mu = check_alpha(alpha), check_steps(steps), check_pl(problem.pl)
    left = np.maximum(1 - alpha**2 * problem.bias_growth, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = problem.smoothness * problem.variance(alpha) / (mu**2 * steps * left**2)
        bias = alpha**2 * problem.bias_floor**2 / (mu * left)
    return np.where(left > 0, noise + bias, np.inf)[()]


def best_alpha(problem: Constants, steps: Numbers) -> Numbers:
    """Return the α in [0, min(1, 1/√m)) that minimises `averaging_cost`.

    For m = 0 it is σ_0²/(σ_0² + σ_a² + μζ²T/L), with equal noises 1/(1 + 1/N + μζ²T/(Lσ_0²));
    otherwise the root of a cubic, Q′ = 0 cleared of its denominators: with S = σ_0² + σ_a² and z =
    μζ²T/L,

        m(S − z)α³ − 3mσ_0²α² + (S + 2mσ_0² + z)α − σ_0² = 0.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=10, bias_floor=1)
        >>> float(best_alpha(problem, steps=90))
        0.5

    Reference: Appendix C.2, “Choice of the collaboration weight α”.
    """
    m, own = problem.bias_growth, np.square(problem.noise)
    z = check_pl(problem.pl) * problem.bias_floor**2 * check_steps(steps) / problem.smoothness
    total = own + problem.peer_variance
    if np.all(np.equal(m, 0)):
        return _share(own, problem.peer_variance + z)
    # The cubic is −σ_0² at 0 and not negative at the end of the range; in between it changes sign
    # once.
    low = np.zeros(np.broadcast_shapes(*(np.shape(part) for part in (m, own, z, total))))
    high = low + np.minimum(1, 1 / np.sqrt(np.maximum(m, 1)))
    for _ in range(60):
        alpha = (low + high) / 2
        slope = (
            m * (total - z) * alpha**3
            - 3 * m * own * alpha**2
            + (total + 2 * m * own + z) * alpha
            - own
        )
        low, high = np.where(slope < 0, alpha, low), np.where(slope < 0, high, alpha)
    return ((low + high) / 2)[()]


def least_noise_alpha(problem: Constants, oracle_noise: Numbers = 0.0) -> Numbers:
    """Return the α that minimises the variance of the direction, the best where the bias is corrected.

        α = σ_0²/(σ_0² + σ_a² + v²/N),   with equal noises N/(N + 1 + v²/σ_0²)

    For `BiasCorrection` over a long run, v is 0.

    Example:
        >>> float(least_noise_alpha(Constants(smoothness=1, initial_gap=1, noise=2, n_peers=3)))
        0.75

    Reference: Theorem 2, “Speedup over training alone”; Appendix C.4, “Choices of the weights”.
    """
    v = as_numbers("oracle_noise", oracle_noise)
    return _share(np.square(problem.noise), problem.peer_variance + v**2 / problem.n_peers)


def averaging_speedup(problem: Constants, steps: Numbers, alpha: Numbers | None = None) -> Numbers:
    """Return how many times more steps Alone needs for the same cost: Q(0)/Q(α).

    α is the best unless it is given. At the best α and m = 0 it is 1/(1 − α); for ζ = 0 too, N + 1.
    For m > 0 it is sub-linear even if ζ = 0.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=np.array([1.0, 10.0]))
        >>> averaging_speedup(problem, steps=100).round(12).tolist()
        [2.0, 11.0]

    Reference: Section 4, “Speedup over training alone”, and the figures of Appendix C.2.
    """
    alpha = best_alpha(problem, steps) if alpha is None else alpha
    return _ratio(averaging_cost(problem, 0.0, steps), averaging_cost(problem, alpha, steps))


def oracle_speedup(problem: Constants, oracle_noise: Numbers = 0.0) -> Numbers:
    """Return how many times more steps Alone needs than correction by an oracle at its best α.

        σ_0²/σ̃²(α) = 1/(1 − α),   with equal noises and v = 0 the linear speedup N + 1

    Example:
        >>> print(f"{oracle_speedup(Constants(smoothness=1, initial_gap=1, noise=2, n_peers=9)):.6g}")
        10

    Reference: Theorem 2, “Speedup over training alone”.
    """
    peers = problem.peer_variance + as_numbers("oracle_noise", oracle_noise) ** 2 / problem.n_peers
    return _ratio(np.square(problem.noise) + peers, peers)


def best_tau(
    problem: Constants,
    alpha: Numbers,
    steps: Numbers,
    *,
    peer_noise: ArrayLike,
    bias_floor: ArrayLike,
) -> NDArray[np.float64]:
    """Return the peers' weights that minimise the averaging cost at a given α.

        min over the simplex of  Σ κτ_k²σ_k² + τ_kζ_k²,   κ = L/(μT(1 − α²m))

    Args:
        problem: L, μ and m; its peers are not used.
        alpha: α in [0, 1], below 1/√m.
        steps: T.
        peer_noise: σ_k of each peer.
        bias_floor: ζ_k of each peer. Where the bias is corrected, 0: then τ_k ∝ 1/σ_k².

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=1)
        >>> best_tau(problem, 0.5, 100, peer_noise=[1, 1, 1], bias_floor=[0, 0.1, 2]).round(12).tolist()
        [0.75, 0.25, 0.0]

    Reference: Appendix C.2, “Choice of the weights”.
    """
    alpha = check_alpha(alpha)
    left = 1 - alpha**2 * problem.bias_growth
    check("alpha", alpha, np.greater(left, 0), "must be below 1/√m, m being `bias_growth`")
    return water_filling(
        peer_noise,
        bias_floor,
        problem.smoothness / (check_pl(problem.pl) * check_steps(steps) * left),
    )


def mean_estimation(
    noise: Numbers, gap: Numbers, n_peers: Numbers = 1.0, peer_noise: Numbers | None = None
) -> Constants:
    """Return the constants of estimating user 0's mean with the samples of peers whose mean is off by `gap`.

    f_k = ½(x − mean_k)², sampled by g_k = x − z_k: L = μ = 1, m = δ = 0, ζ = gap, and x_0, user 0's
    first sample, is off by F_0 = σ_0²/2. With η_t = 1/(t + 1), averaging *is* the weighted mean of
    all samples, and its squared error is `averaging_cost` exactly: α²ζ² + σ²(α)/T.

    Args:
        noise: σ_0, the spread of user 0's samples.
        gap: how far the peers' mean is from user 0's.
        n_peers: N.
        peer_noise: σ_k, the spread of a peer's samples; as user 0's when None.

    Example:
        >>> problem = mean_estimation(noise=2.0, gap=0.1, n_peers=3)
        >>> print(f"{best_alpha(problem, steps=100):.4f} {averaging_speedup(problem, steps=100):.4f}")
        0.6316 2.7143

    Reference: Section 4, “Application of WGA to collaborative mean estimation”.
    """
    return Constants(
        smoothness=1.0,
        pl=1.0,
        initial_gap=np.square(noise) / 2,
        noise=noise,
        n_peers=n_peers,
        peer_noise=peer_noise,
        bias_floor=np.abs(gap),
    )


def _share(part: Numbers, rest: Numbers) -> Numbers:
    """Return part/(part + rest); 0 where both vanish, since without noise peers cannot help."""
    whole = np.asarray(part + rest)
    return np.asarray(np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0))[()]


def _ratio(alone: Numbers, together: Numbers) -> Numbers:
    """Return alone/together; infinite where only the latter vanishes, 1 where both do."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(alone, together)
    return np.where(np.equal(alone, 0) & np.equal(together, 0), 1.0, ratio)[()]
