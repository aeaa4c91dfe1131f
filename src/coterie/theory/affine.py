"""AffPCL on linear stochastic approximation.

Users with other inputs and other objectives, in exact moments.

A user k sees s with probability p_k(s) and the direction A(s)x − b_k(s); user 0 looks for the x* at
which the mean of its own is zero. z is the centre, which all users move: z ← z − η mean_k(A(s_k)z −
b_k(s_k)). With b̄(s) the mean objective of those who see s, h(s) = A(s)z − b̄(s) and the importance
ratio ρ(s) = p_0(s)/p̄(s), p̄ = mean_k p_k,

    d = A(s_0)x − b_0(s_0) − α [h(s_0) − mean_k ρ(s_k)h(s_k)],   x ← x − η d

E ρ(s_k)h(s_k), over all users, is user 0's E h: d has the mean of user 0's own direction, whatever
z and b̄ are (*bias correction*, and with ρ *importance correction*). What they change is its
variance: own noise that the centre shares is exchanged for the mean of n users'. α = 1 is the
paper's; α = 0 is training alone.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coterie.theory.constants import Numbers, as_numbers, check

Array = NDArray[np.float64]

_SPLITS = np.geomspace(1e-3, 1e3, 13)


@dataclass(frozen=True, eq=False)
class Affine:
    """Users of one linear problem in one coordinate, user 0 first.

    Axes before the last two are separate problems.

    Example:
        >>> alike = Affine(np.full((10, 2), 0.5), np.array([1.0, 2.0]), np.array([[1.0, -1.0]] * 10))
        >>> print(f"{alike.variance(0.0):.3f} {alike.variance(1.0):.3f}")
        1.000 0.100
        >>> strangers = Affine(alike.probabilities, alike.matrix, np.array([[1.0, -1.0]] + [[9.0, -40.0]] * 9))
        >>> print(f"{strangers.variance(1.0):.1f} {strangers.variance(strangers.best_alpha()):.3f}")
        245.1 0.100
    """

    probabilities: Array  # p_k(s), of shape (…, users, samples)
    matrix: Array  # A(s), of shape (…, samples)
    target: Array  # b_k(s), of shape (…, users, samples)

    def __post_init__(self) -> None:
        p = self.probabilities
        check("probabilities", p, p >= 0, "must not be negative")
        check(
            "probabilities", p.sum(-1), np.abs(p.sum(-1) - 1) < 1e-9, "must sum to 1 for each user"
        )
        check(
            "matrix", self.slope, np.greater(self.slope, 0), "must have a positive mean for user 0"
        )
        check(
            "matrix",
            self._slopes.mean(-1),
            self._slopes.mean(-1) > 0,
            "must have a positive mean over all users",
        )
        seen = (p.mean(-2) > 0) | (p[..., 0, :] == 0)
        check("probabilities", p[..., 0, :], seen, "must be seen by somebody")

    @property
    def slope(self) -> Array:
        """The mean of A(s) over user 0's samples."""
        return np.asarray(self._slopes[..., 0])

    @cached_property
    def _slopes(self) -> Array:
        return np.asarray((self.probabilities * self.matrix[..., None, :]).sum(-1))

    @property
    def solution(self) -> Array:
        """x*, where user 0's mean direction is zero."""
        return np.asarray((self.probabilities * self.target).sum(-1)[..., 0] / self.slope)

    @property
    def centre(self) -> Array:
        """z*, where the mean direction of all users is zero."""
        return np.asarray((self.probabilities * self.target).sum((-2, -1)) / self._slopes.sum(-1))

    @cached_property
    def ratio(self) -> Array:
        """ρ(s) = p_0(s)/p̄(s); 0 where nobody sees s."""
        mean = self.probabilities.mean(-2)
        return np.asarray(
            np.divide(self.probabilities[..., 0, :], mean, out=np.zeros_like(mean), where=mean > 0)
        )

    @cached_property
    def common(self) -> Array:
        """b̄(s), the mean objective of those who see s."""
        mean = self.probabilities.mean(-2)
        sums = (self.probabilities * self.target).mean(-2)
        return np.asarray(np.divide(sums, mean, out=np.zeros_like(mean), where=mean > 0))

    def direction(
        self, x: float, z: float, samples: NDArray[np.int64], alpha: float = 1.0
    ) -> tuple[float, float]:
        """Return the directions of x and of z for one sample of each user.

        The rule, of one problem.
        """
        a = self.matrix[samples]
        b = np.take_along_axis(self.target, samples[:, None], 1)[:, 0]
        n = len(samples)
        central = a * z - self.common[samples]
        corrected = central[0] - self.ratio[samples] @ central / n
        return float(a[0] * x - b[0] - alpha * corrected), float((a * z - b).mean())

    def expected(
        self, lr: float, steps: int, x: Numbers, z: Numbers, *, alpha: Numbers = 1.0
    ) -> Array:
        """Return E(x_T − x*)² exactly, by the second moments of (1, x − x*, z − z*)."""
        terms, p = self._terms(alpha), self.probabilities[..., None, None]
        means = (p * terms).sum(-3)
        move = np.eye(3) - lr * means.sum(-3)
        start = np.stack(np.broadcast_arrays(1.0, x - self.solution, z - self.centre), -1)
        moments = start[..., :, None] * start[..., None, :]
        for _ in range(steps):
            spread = np.einsum(
                "...ks,...ksij,...jl,...ksml->...im", self.probabilities, terms, moments, terms
            )
            known = np.einsum("...kij,...jl,...kml->...im", means, moments, means)
            moments = move @ moments @ np.swapaxes(move, -1, -2) + lr**2 * (spread - known)
        return np.asarray(moments[..., 1, 1])

    def variance(self, alpha: Numbers = 1.0) -> Array:
        """Return V, the variance of d at x = x* and z = z*; at α = 0 that of training alone.

        V = Var_0(w − α(1 − ρ/n)h) + α² Σ_{k≥1} Var_k(ρh)/n²,   w(s) = A(s)x* − b_0(s),   h(s) =
        A(s)z* − b̄(s)
        """
        return np.asarray(self._spread(self._terms(alpha))[..., 1, 0, 0])

    def best_alpha(self) -> Array:
        """Return the α of least `variance`: with it, V is at most Alone's."""
        alone, one, minus = self.variance(0.0), self.variance(1.0), self.variance(-1.0)
        square = (one + minus) / 2 - alone
        return np.asarray(
            np.divide((minus - one) / 4, square, out=np.zeros_like(square), where=square > 0)
        )

    def _terms(self, alpha: Numbers) -> Array:
        """Return what each user's sample gives to (0, d, direction of z), as matrices of (1, x − x*, z − z*)."""
        n = self.probabilities.shape[-2]
        alpha = np.asarray(alpha)[..., None]
        a, b = self.matrix, self.target
        own = np.arange(n)[:, None] == 0
        shared = (alpha * self.ratio / n)[..., None, :] - np.where(own, alpha[..., None, :], 0.0)
        terms = np.zeros((*np.broadcast_shapes(shared.shape, b.shape), 3, 3))
        h = (a * self.centre[..., None] - self.common)[..., None, :]
        w = a[..., None, :] * self.solution[..., None, None] - b
        terms[..., 1, 0] = np.where(own, w, 0.0) + shared * h
        terms[..., 1, 1] = np.where(own, a[..., None, :], 0.0)
        terms[..., 1, 2] = shared * a[..., None, :]
        terms[..., 2, 0] = (a[..., None, :] * self.centre[..., None, None] - b) / n
        terms[..., 2, 2] = a[..., None, :] / n
        return terms

    def _spread(self, terms: Array) -> Array:
        """Return the covariances, in each row, of the entries of the summed terms."""
        p = self.probabilities
        square = np.einsum("...ks,...ksri,...ksrj->...rij", p, terms, terms)
        means = np.einsum("...ks,...ksri->...kri", p, terms)
        return np.asarray(square - np.einsum("...kri,...krj->...rij", means, means))


def affine_bound(
    problem: Affine, lr: float, steps: int, x: Numbers, z: Numbers, *, alpha: Numbers = 1.0
) -> Array:
    """Bound E(x_T − x*)² of AffPCL from (x, z) with a constant step size η.

        q_x = (1 − ηA_0)² + (1 + θ)η²S_x,    q_z = (1 − ηĀ)² + (1 + θ)η²S_z,    u = (1 + 1/θ)η²
        E(x_T − x*)² ≤ q_x^T(x − x*)² + u [(1 + φ)V + (1 + 1/φ)G·uV_z/(1 − q_z)]/(1 − q_x)
                        + u(1 + 1/φ)G(z − z*)²(q_x^T − q_z^T)/(q_x − q_z)

    A_0 and Ā are the mean A of user 0 and of all; V is `variance` and V_z that of z's direction at
    z*; S_x, G and S_z are the variances of the factors of x and z in d and of z in its own
    direction. The best θ and φ are taken. It is infinite where η is too large for q_x < 1 and q_z <
    1.

    For small η the level is ηV/(2A_0) and V is of the order max(1/n, δ), δ the share of own noise
    that the centre does not have: n users alike make it n times smaller than Alone's. No V is
    larger than Alone's at `best_alpha`; at α = 1 it may be by any factor, where the centre's noise
    is larger than the own.

    Example:
        >>> alike = Affine(np.full((10, 2), 0.5), np.array([1.0, 2.0]), np.array([[1.0, -1.0]] * 10))
        >>> for alpha in (0.0, 1.0):
        ...     exact = alike.expected(0.01, 2000, 1.0, 1.0, alpha=alpha)
        ...     print(f"{exact:.6f} {affine_bound(alike, 0.01, 2000, 1.0, 1.0, alpha=alpha):.6f}")
        0.003361 0.003566
        0.000336 0.000377
    """
    spread = problem._spread(problem._terms(alpha))
    level, fixed_x, fixed_z = (np.asarray(spread[..., 1, i, i]) for i in range(3))
    noise_z, moving_z = np.asarray(spread[..., 2, 0, 0]), np.asarray(spread[..., 2, 2, 2])
    lr = float(as_numbers("lr", lr))
    away, off = np.square(x - problem.solution), np.square(z - problem.centre)
    best = np.full(np.broadcast_shapes(level.shape, away.shape), np.inf)
    for theta in _SPLITS:
        q_x = (1 - lr * problem.slope) ** 2 + (1 + theta) * lr**2 * fixed_x
        q_z = (1 - lr * problem._slopes.mean(-1)) ** 2 + (1 + theta) * lr**2 * moving_z
        u = (1 + 1 / theta) * lr**2
        fits = (q_x < 1) & (q_z < 1)
        low_x, low_z = np.where(fits, q_x, 0.5), np.where(fits, q_z, 0.25)
        apart = np.where(np.abs(low_x - low_z) > 1e-9, low_x - low_z, np.inf)
        same = steps * np.maximum(low_x, low_z) ** (steps - 1)
        transient = np.where(np.isfinite(apart), (low_x**steps - low_z**steps) / apart, same)
        for phi in _SPLITS:
            drift = (1 + 1 / phi) * fixed_z
            steady = ((1 + phi) * level + drift * u * noise_z / (1 - low_z)) / (1 - low_x)
            bound = low_x**steps * away + u * (steady + drift * off * transient)
            best = np.where(fits, np.minimum(best, bound), best)
    return best
