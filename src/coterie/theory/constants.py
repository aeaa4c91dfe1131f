"""The constants of a problem, checked."""

from dataclasses import dataclass, fields
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import KnobError

Numbers: TypeAlias = float | NDArray[np.float64]
"""A number, or an array of them: every formula is vectorised and broadcasts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Constants:
    """What the theory knows of a problem: user 0's objective f_0 and N peers of equal standing.

        ‖∇f_k − ∇f_0‖² ≤ m ‖∇f_0‖² + ζ²,   E‖n_k‖² ≤ M_k ‖∇f_k‖² + σ_k²,   ‖∇²f_k − ∇²f_0‖ ≤ δ

    Each may be an array; they broadcast. Peers that differ from one another are brought to this
    form, for given weights, by `Constants.from_peers`.

    Args:
        smoothness: L of f_0.
        pl: μ, the Polyak-Łojasiewicz constant of f_0, ‖∇f_0‖² ≥ 2μ(f_0 − f_0*); 0 where it is not
            assumed.
        initial_gap: F_0 = f_0(x_0) − f_0*.
        noise: σ_0, the standard deviation of user 0's gradient noise (of the whole vector).
        n_peers: N.
        peer_noise: σ_k, that of one peer; as user 0's when None.
        bias_floor: ζ, the peers' bias where f_0 is stationary.
        bias_growth: m, how it grows with ‖∇f_0‖².
        hessian_gap: δ.
        noise_growth: M_0, how user 0's noise grows with ‖∇f_0‖².
        peer_noise_growth: M_k, how a peer's noise grows with ‖∇f_k‖².
        diameter: D, of the region that x stays in. Where it is given, a peer's gradient is user 0's
            plus a constant plus what differs in curvature, and the constant adds no noise: E‖n_k‖²
            ≤ M_k(2‖∇f_0‖² + 2(δD)²) + σ_k², the final form of A5. None: E‖n_k‖² ≤ M_k‖∇f_k‖² +
            σ_k².
        drift_noise: √(Στ_kσ_k²), what a peer's own steps are shaken by; as `peer_noise` when None.
        largest_hessian_gap: max_k δ_k, for peers that take steps of their own; as `hessian_gap`
            when None.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=4)
        >>> float(problem.variance(0.8)), float(problem.peer_variance)
        (20.0, 25.0)

    Reference: assumptions A1–A5, and both relaxed forms of A5 in Appendix B (the final one
    corrected).
    """

    smoothness: Numbers
    initial_gap: Numbers
    noise: Numbers
    pl: Numbers = 0.0
    n_peers: Numbers = 1.0
    peer_noise: Numbers | None = None
    bias_floor: Numbers = 0.0
    bias_growth: Numbers = 0.0
    hessian_gap: Numbers = 0.0
    noise_growth: Numbers = 0.0
    peer_noise_growth: Numbers = 0.0
    diameter: Numbers | None = None
    drift_noise: Numbers | None = None
    largest_hessian_gap: Numbers | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = as_numbers(field.name, value)
                check(field.name, value, np.greater_equal(value, 0), "must not be negative")
                object.__setattr__(self, field.name, value)
        check("smoothness", self.smoothness, np.greater(self.smoothness, 0), "must be positive")
        gap, remedy = self.initial_gap, "at the optimum nothing is left to gain"
        check("initial_gap", gap, np.greater(gap, 0), "must be positive", remedy)
        check("n_peers", self.n_peers, np.greater_equal(self.n_peers, 1), "must be at least 1")
        pl, smoothness = np.broadcast_arrays(self.pl, self.smoothness)
        # a rescaled problem with both equal may differ in the last digit
        wrong = pl > smoothness * (1 + 1e-9)
        if wrong.any():
            raise KnobError(
                f"`pl` must not exceed `smoothness`, got pl = {_first(pl[wrong])} and smoothness = "
                f"{_first(smoothness[wrong])}; no function has a PL constant above its smoothness"
            )

    @classmethod
    def from_peers(
        cls,
        *,
        tau: ArrayLike,
        peer_noise: ArrayLike,
        bias_floor: ArrayLike = 0.0,
        **common: Numbers,
    ) -> Self:
        """Return the constants of equal peers that stand for unequal ones with weights τ.

            σ_a² = Σ τ_k² σ_k²,   ζ² = Σ τ_k ζ_k²

        Args:
            tau: τ_k, the peers' weights, along the last axis.
            peer_noise: σ_k, as `tau`.
            bias_floor: ζ_k, as `tau`.
            common: the other constants; of `bias_growth` and `hessian_gap` the mean by τ, or the
                largest.

        Example:
            >>> problem = Constants.from_peers(
            ...     smoothness=1, initial_gap=1, noise=1, tau=[0.5, 0.5], peer_noise=[1, 3], bias_floor=[0, 2]
            ... )
            >>> print(f"{problem.peer_variance:.4g} {problem.bias_floor**2:.4g}")
            2.5 2
        """
        tau = np.asarray(tau, dtype=np.float64)
        check("tau", tau, tau >= 0, "must not be negative")
        total, remedy = tau.sum(-1), "divide each weight by the sum"
        check("tau", total, abs(total - 1) < 1e-6, "must sum to 1", remedy)
        variance = np.sum(tau**2 * np.square(peer_noise), -1)
        floor = np.sqrt(np.sum(tau * np.square(bias_floor), -1))
        noise, n_peers = np.sqrt(tau.shape[-1] * variance), float(tau.shape[-1])
        drift = np.sqrt(np.sum(tau * np.square(peer_noise), -1))
        return cls(n_peers=n_peers, peer_noise=noise, drift_noise=drift, bias_floor=floor, **common)

    def check_bounded_noise(self, remedy: str = "") -> None:
        """Refuse noise that grows with the gradient."""
        for name in ("noise_growth", "peer_noise_growth"):
            growth = getattr(self, name)
            check(name, growth, np.equal(growth, 0), "must be 0 here", remedy)

    @property
    def peer_variance(self) -> Numbers:
        """σ_a², the variance of the peers' average where f_0 is stationary.

        (σ_k² + 2M_k ζ²)/N: there ‖∇f_k‖² ≤ 2‖∇f_0‖² + 2‖∇f_k − ∇f_0‖² ≤ 2ζ². With a `diameter` D,
        (δD)² for ζ².
        """
        noise = self.noise if self.peer_noise is None else self.peer_noise
        bias = self.bias_floor if self.diameter is None else self.hessian_gap * self.diameter
        return (noise**2 + 2 * self.peer_noise_growth * bias**2) / self.n_peers

    def variance(self, alpha: Numbers) -> Numbers:
        """Return σ²(α) = (1 − α)²σ_0² + α²σ_a², the variance of the averaged direction."""
        return (1 - alpha) ** 2 * self.noise**2 + alpha**2 * self.peer_variance

    def variance_growth(self, alpha: Numbers) -> Numbers:
        """Return M(α) = (1 − α)²M_0 + α²·2(1 + m)M_k/N, how that variance grows with ‖∇f_0‖².

        With a `diameter`, without m.
        """
        growth = self.bias_growth if self.diameter is None else 0.0
        peers = 2 * (1 + growth) * self.peer_noise_growth / self.n_peers
        return (1 - alpha) ** 2 * self.noise_growth + alpha**2 * peers


def as_numbers(name: str, value: ArrayLike) -> Numbers:
    """Return a float or an array of floats, finite."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise KnobError(f"`{name}` must be a number, got {value!r}") from error
    check(name, array, np.isfinite(array), "must be finite")
    return array if array.ndim else float(array)


def check(name: str, value: ArrayLike, holds: ArrayLike, must: str, remedy: str = "") -> None:
    """Raise a `KnobError` that shows the first value for which `holds` is false."""
    if np.all(holds):
        return
    values, fine = np.broadcast_arrays(value, holds)
    end = f"; {remedy}" if remedy else ""
    raise KnobError(f"`{name}` {must}, got {_first(values[~fine])}{end}")


def check_alpha(alpha: ArrayLike) -> Numbers:
    """Return α, checked to lie in [0, 1]."""
    alpha = as_numbers("alpha", alpha)
    fits = np.greater_equal(alpha, 0) & np.less_equal(alpha, 1)
    check("alpha", alpha, fits, "must lie in [0, 1]")
    return alpha


def check_steps(steps: ArrayLike) -> Numbers:
    """Return T, checked to be at least 1."""
    steps = as_numbers("steps", steps)
    check("steps", steps, np.greater_equal(steps, 1), "must be at least 1")
    return steps


def check_lr(lr: ArrayLike, limit: Numbers, must: str) -> Numbers:
    """Return η, checked to be above 0 and at most a limit."""
    lr = as_numbers("lr", lr)
    check("lr", lr, np.greater(lr, 0), "must be positive")
    check("lr", lr, np.less_equal(lr, limit * (1 + 1e-9)), must, f"take {np.min(limit):g}")
    return lr


def check_pl(pl: Numbers) -> Numbers:
    """Return μ, checked to be positive."""
    check("pl", pl, np.greater(pl, 0), "must be positive for a cost in terms of the loss")
    return pl


def _first(value: ArrayLike) -> str:
    return f"{float(np.ravel(value)[0]):g}"
