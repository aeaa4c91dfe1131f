"""Peers that differ from one another: which to use, and the knobs that follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import KnobError
from coterie.gradients.simplex import water_filling
from coterie.theory.choices import averaging_cost, best_alpha, least_noise_alpha
from coterie.theory.constants import Constants, Numbers, check_pl, check_steps
from coterie.theory.correction import (
    Correction,
    best_beta,
    best_correction,
    correction_bound,
    correction_max_lr,
)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Peers:
    """The constants of user 0's objective, as in `Constants`, and of each peer.

    Example:
        >>> peers = Peers(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=[1, 1], hessian_gap=[0, 4])
        >>> float(peers.constants([0.5, 0.5]).hessian_gap)
        2.0
    """

    smoothness: float
    initial_gap: float
    noise: float
    peer_noise: ArrayLike  # σ_k
    pl: float = 0.0
    bias_floor: ArrayLike = 0.0  # ζ_k
    bias_growth: ArrayLike = 0.0  # m_k
    hessian_gap: ArrayLike = 0.0  # δ_k

    def __post_init__(self) -> None:
        noise = np.atleast_1d(np.asarray(self.peer_noise, dtype=np.float64))
        if noise.ndim != 1 or not noise.size:
            raise KnobError(
                "`peer_noise` must hold one value for each peer; give at least one peer"
            )
        for name in ("peer_noise", "bias_floor", "bias_growth", "hessian_gap"):
            each = np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), noise.shape)
            object.__setattr__(self, name, each)

    def constants(self, tau: ArrayLike) -> Constants:
        """Return the constants of the average with weights τ.

            σ_a² = Σ τ_k²σ_k²,   ζ² = Σ τ_kζ_k²,   m = Σ τ_km_k,   δ = Σ τ_kδ_k

        All follow from the convexity of the norm and its square; max δ_k and Στ_kσ_k², of the peers
        with a weight, are kept for `local_bound`. τ lies along the last axis; axes before it are
        separate averages.
        """
        tau = np.asarray(tau, dtype=np.float64)
        return Constants.from_peers(
            smoothness=self.smoothness,
            pl=self.pl,
            initial_gap=self.initial_gap,
            noise=self.noise,
            tau=tau,
            peer_noise=self.peer_noise,
            bias_floor=self.bias_floor,
            bias_growth=tau @ np.asarray(self.bias_growth),
            hessian_gap=tau @ np.asarray(self.hessian_gap),
            largest_hessian_gap=np.where(tau > 0, self.hessian_gap, 0.0).max(-1),
        )


class Averaging(NamedTuple):
    """The weights of averaging and what they cost by `averaging_cost`."""

    alpha: float
    tau: Array
    cost: float


def best_averaging(peers: Peers, steps: float, tau: ArrayLike | None = None) -> Averaging:
    """Return the α and τ with the least `averaging_cost`.

    For m = 0 they are `best_tau` and then `best_alpha`. A growing bias has a price in τ too: where
    the derivatives of the cost vanish, τ fills water over ζ_k² + m_kW with

        W = 2Lσ²(α)/(μT(1 − α²m)²) + α²ζ²/(1 − α²m),

    which is iterated from α = 0; the best pair of all iterations is returned. With a given τ, only
    α is chosen.

    Example:
        >>> bias = {"bias_floor": [0, 0, 3], "bias_growth": [0, 90, 0]}
        >>> peers = Peers(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=[1, 1, 1], **bias)
        >>> best = best_averaging(peers, steps=1000)
        >>> print(f"{best.alpha:.2f}", best.tau.round(2).tolist())
        0.50 [1.0, 0.0, 0.0]

    Reference: Appendix C.2, “Choice of the weights”, with m_k for each peer.
    """
    steps = float(check_steps(steps))
    price = peers.smoothness / (float(check_pl(peers.pl)) * steps)
    growth, floor = np.asarray(peers.bias_growth), np.asarray(peers.bias_floor)
    tried: list[Averaging] = []
    left, worth = 1.0, 2 * price * peers.noise**2
    for _ in range(50 if tau is None and growth.any() else 1):
        bias = np.sqrt(floor**2 + growth * worth)
        weights = (
            water_filling(peers.peer_noise, bias, price / left)
            if tau is None
            else np.asarray(tau, float)
        )
        problem = peers.constants(weights)
        alpha = float(best_alpha(problem, steps))
        tried.append(Averaging(alpha, weights, float(averaging_cost(problem, alpha, steps))))
        left = max(1 - alpha**2 * float(problem.bias_growth), 1e-9)
        following = (
            2 * price * problem.variance(alpha) / left**2 + alpha**2 * problem.bias_floor**2 / left
        )
        worth = (worth + float(following)) / 2  # halfway, so that the iteration does not oscillate
    return min(tried, key=lambda one: one.cost)


class CorrectedPeers(NamedTuple):
    """The peers whose bias to correct, τ equal among them, and the knobs that go with them."""

    tau: Array
    knobs: Correction


def best_corrected_peers(
    peers: Peers,
    steps: float,
    *,
    alpha: float | None = None,
    lr: float | None = None,
    tau: ArrayLike | None = None,
    initial_error: float | None = None,
    warm_up: bool | None = None,
) -> CorrectedPeers:
    """Return the peers for bias correction: those of smallest δ_k, as many as give the least bound.

    More peers mean less noise, but their bias drifts faster the more their Hessians differ from
    user 0's. So peers are added in the order of δ_k, with equal weights, and the number with the
    least bound is chosen. All numbers are compared at one α, the largest of the least-noise ones;
    otherwise the bound would prefer few peers for the small α they allow.

    Args:
        peers: the constants.
        steps: T.
        alpha: α; the one of least noise when None.
        lr: η; the best when None. One that is too large for the bound is lowered to the largest it
            allows.
        tau: τ; when given, no peers are chosen.
        initial_error: E_0; see `correction_bound`.
        warm_up: how the bias estimate starts in a run; see `correction_bound`.

    Example:
        >>> peers = Peers(
        ...     smoothness=1, initial_gap=1, noise=1, peer_noise=[1, 1, 1], hessian_gap=[0.001, 50, 0.001]
        ... )
        >>> best_corrected_peers(peers, steps=10_000).tau.tolist()
        [0.5, 0.0, 0.5]

    Reference: Theorem 3, corrected; the paper asks for a mechanism that selects peers of small δ
    and gives none.
    """
    n = len(np.asarray(peers.peer_noise))
    ranks = np.argsort(np.argsort(np.asarray(peers.hessian_gap), kind="stable"))
    nested = np.tril(np.ones((n, n)))[:, ranks] / np.arange(1, n + 1)[:, None]
    candidates = nested if tau is None else np.atleast_2d(np.asarray(tau, dtype=np.float64))
    problem = peers.constants(candidates)
    common = float(np.max(least_noise_alpha(problem))) if alpha is None else alpha
    start = {"initial_error": initial_error, "warm_up": warm_up}
    best = int(np.argmin(_knobs(problem, steps, common, lr, start).bound))
    problem = peers.constants(candidates[best])
    knobs = _knobs(
        problem, steps, least_noise_alpha(problem) if alpha is None else alpha, lr, start
    )
    return CorrectedPeers(candidates[best], Correction(*map(float, knobs)))


def _knobs(
    problem: Constants, steps: float, alpha: Numbers, lr: float | None, start: Mapping[str, Any]
) -> Correction:
    """Return the best β, and the best step size where it is not given."""
    if lr is None:
        return best_correction(problem, steps, alpha, **start)
    fitting = np.minimum(lr, correction_max_lr(problem, alpha))
    beta = best_beta(problem, alpha, fitting, steps, **start)
    bound = correction_bound(problem, alpha, beta, fitting, steps, **start)
    return Correction(alpha, beta, fitting, bound)
