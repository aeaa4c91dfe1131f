"""Averaging with fewer exchanges.

Bounds for stale peers and for local work, and how often to exchange.

Between two exchanges lie K steps, in a run of T own gradients. Both proofs look at a stretch of K
as one step; they are in docs/exchanges.md. With κ = ηK times a smoothness, at most 1/2, and any θ >
0 (the best is taken),

    stale peers   p = ½ − (1 + 1/θ)(1 − α)²(8/5)κ²,   κ = ηKL
                  q = (1 + θ)/2 + (1 + 1/θ)(1 − α)²(8/5)κ²
                  bound = [ F_0/(ηT) + qα²ζ² + (κ + (1 + 1/θ)(1 − α)²(6/5)κ²) s_K ] / (p − qα²m)
                  s_K = (1 − α)²σ_0²/K + α²σ_a²

    local work    p = ½ − (1 + 1/θ)(4/5)κ²(1 + α + 2αm),   κ = ηK(L + max_k δ_k)
                  bound = [ F_0/(ηT) + ((1 + θ)/2·α² + (1 + 1/θ)(8/5)κ²α) ζ² + Lησ²(α)
                            + (1 + 1/θ)(6/5)κ²((1 − α)σ_0² + αΣτ_kσ_k²)/K ] / (p − (1 + θ)/2·α²m)

on the mean of E‖∇f_0‖² over the points of exchange. Stale peers have their noise K times in a
stretch; local work does not, but its users drift. For bias correction, and for both at once, no
bound is known; their exact moments on quadratics are (`NoisyQuadratic`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coterie.theory.constants import (
    Constants,
    Numbers,
    as_numbers,
    check,
    check_alpha,
    check_lr,
    check_steps,
)
from coterie.theory.descent import alone

Kind: TypeAlias = Literal["stale", "local"]

_THETAS = np.geomspace(1e-3, 30, 24)
_EVERY = np.unique(np.geomspace(1, 1024, 41).round())
_ALPHAS = np.concatenate([np.linspace(0.03, 0.96, 32), [1.0]])
_RATES = np.geomspace(1e-5, 1, 48)


@dataclass(frozen=True)
class Exchanges:
    """How often to exchange, and what bound on the mean squared gradient that gives in a given time."""

    every: int  # K, steps for each exchange: `exchange_every`, or `local_steps`
    alpha: float
    lr: float
    steps: float  # own gradients that fit into the time
    bound: float


def stale_bound(
    problem: Constants, alpha: Numbers, lr: Numbers, steps: Numbers, every: Numbers
) -> Numbers:
    """Bound the mean squared gradient of averaging with peers that are asked at every K-th step.

    Args:
        problem: the constants; noise must be bounded (no `noise_growth`).
        alpha: α in [0, 1].
        lr: η, at most 1/(2KL).
        steps: T.
        every: K, `exchange_every`.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, bias_floor=0.1)
        >>> for every in (1, 4, 16):
        ...     print(f"{stale_bound(problem, alpha=0.9, lr=0.01, steps=10_000, every=every):.4f}")
        0.0502
        0.0560
        0.0793
    """
    alpha, lr, steps, every = _checked_knobs(problem, alpha, lr, (steps, every), problem.smoothness)
    kappa, growth = lr * every * problem.smoothness, problem.bias_growth
    noise = (1 - alpha) ** 2 * problem.noise**2 / every + alpha**2 * problem.peer_variance

    def bound(theta: float) -> Numbers:
        drift = (1 + 1 / theta) * (1 - alpha) ** 2 * kappa**2
        q = (1 + theta) / 2 + 8 / 5 * drift
        left = 1 / 2 - 8 / 5 * drift - q * alpha**2 * growth
        cost = problem.initial_gap / (lr * steps) + q * alpha**2 * problem.bias_floor**2
        return _quotient(cost + (kappa + 6 / 5 * drift) * noise, left)

    return _least(bound)


def local_bound(
    problem: Constants, alpha: Numbers, lr: Numbers, steps: Numbers, every: Numbers
) -> Numbers:
    """Bound the mean squared gradient of averaging by local work.

    Every peer drifts by its own noise and curvature: the bound takes Σ τ_kσ_k² (`drift_noise`) and
    max_k δ_k (`largest_hessian_gap`), which `Peers.constants` gives for peers that differ.

    Args:
        problem: the constants; noise must be bounded (no `noise_growth`).
        alpha: α in [0, 1].
        lr: η, at most 1/(2K(L + max_k δ_k)); of the local steps, and of plain SGD along their sum.
        steps: T, own gradients: K for each step of the run.
        every: K, `local_steps`.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, bias_floor=0.1)
        >>> for every in (1, 4, 16):
        ...     print(f"{local_bound(problem, alpha=0.9, lr=0.01, steps=10_000, every=every):.4f}")
        0.0533
        0.0579
        0.0797
    """
    smoothness = _local_smoothness(problem)
    alpha, lr, steps, every = _checked_knobs(problem, alpha, lr, (steps, every), smoothness)
    kappa, growth = lr * every * smoothness, problem.bias_growth
    noise = (
        problem.peer_variance * problem.n_peers
        if problem.drift_noise is None
        else problem.drift_noise**2
    )
    drifting = ((1 - alpha) * problem.noise**2 + alpha * noise) / every

    def bound(theta: float) -> Numbers:
        drift, bias = (1 + 1 / theta) * kappa**2, (1 + theta) / 2 * alpha**2
        left = 1 / 2 - 4 / 5 * drift * (1 + alpha + 2 * alpha * growth) - bias * growth
        cost = (
            problem.initial_gap / (lr * steps)
            + (bias + 8 / 5 * drift * alpha) * problem.bias_floor**2
        )
        noise = problem.smoothness * lr * problem.variance(alpha) + 6 / 5 * drift * drifting
        return _quotient(cost + noise, left)

    return _least(bound)


BOUNDS: dict[Kind, Callable[..., Numbers]] = {"stale": stale_bound, "local": local_bound}


def best_exchanges(
    problem: Constants, steps: int, cost: float, kind: Kind, every: int | None = None
) -> Exchanges:
    """Return how often to exchange in the time that `steps` steps with an exchange each would take.

    A gradient takes 1, an exchange `cost`: K steps take K + cost. K, α and η are those of the least
    bound, on a grid; K is that given where it is.

    Args:
        problem: the constants.
        steps: T, how many steps with an exchange each fit into the time.
        cost: R, what an exchange takes where a gradient takes 1.
        kind: "stale" peers, or "local" work.
        every: K; the best when None.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, bias_floor=0.01)
        >>> for cost in (0, 10, 100):
        ...     best = best_exchanges(problem, steps=10_000, cost=cost, kind="local")
        ...     print(f"{best.every} {best.steps:.0f} {best.bound:.4f}")
        1 10000 0.0225
        13 62174 0.0131
        64 394146 0.0068
    """
    steps, cost = _time(steps, cost)
    periods = _EVERY if every is None else np.array([float(every)])
    k = periods[:, None, None]
    fit = steps * (1 + cost) / (1 + cost / k)
    smoothness = _local_smoothness(problem) if kind == "local" else problem.smoothness
    lr = _RATES / (2 * k * smoothness)
    with np.errstate(over="ignore"):
        bounds = np.broadcast_to(
            BOUNDS[kind](problem, _ALPHAS[:, None], lr, fit, k),
            (len(periods), len(_ALPHAS), len(_RATES)),
        )
    i, j, at = np.unravel_index(int(np.argmin(bounds)), bounds.shape)
    return Exchanges(
        int(periods[i]),
        float(_ALPHAS[j]),
        float(lr[i, 0, at]),
        float(fit[i, 0, 0]),
        float(bounds[i, j, at]),
    )


def alone_in_time(problem: Constants, steps: int, cost: float) -> Exchanges:
    """Return training alone in the time of `best_exchanges`, which asks nobody and takes more steps.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1)
        >>> round(alone_in_time(problem, steps=1_000, cost=9.0).steps)
        10000
    """
    steps, cost = _time(steps, cost)
    fit, own = steps * (1 + cost), alone(problem)
    lr = own.best_gradient_lr(fit)
    return Exchanges(0, 0.0, float(lr), fit, float(own.gradient_bound(lr, fit)))


def _local_smoothness(problem: Constants) -> Numbers:
    """Return L + max_k δ_k, the smoothness of every user."""
    gap = (
        problem.hessian_gap if problem.largest_hessian_gap is None else problem.largest_hessian_gap
    )
    return problem.smoothness + gap


def _time(steps: int, cost: float) -> tuple[int, float]:
    """Return the steps and the cost of an exchange that make up the time, checked."""
    steps, cost = int(check_steps(steps)), float(as_numbers("cost", cost))
    check("cost", cost, cost >= 0, "must not be negative")
    check("cost", cost, np.isfinite(steps * (1 + cost)), "must leave the time finite")
    return steps, cost


def _checked_knobs(
    problem: Constants,
    alpha: Numbers,
    lr: Numbers,
    counts: tuple[Numbers, Numbers],
    smoothness: Numbers,
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    problem.check_bounded_noise()
    alpha, steps, every = check_alpha(alpha), check_steps(counts[0]), as_numbers("every", counts[1])
    check("every", every, np.greater_equal(every, 1), "must be at least 1")
    lr = check_lr(lr, 1 / (2 * every * smoothness), "must keep κ at most 1/2")
    return alpha, lr, steps, every


def _quotient(cost: Numbers, left: Numbers) -> Numbers:
    """Return cost/left; infinite where nothing is left."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(np.greater(left, 0), cost / np.maximum(left, 1e-300), np.inf)


def _least(bound: Callable[[float], Numbers]) -> Numbers:
    best: NDArray[np.float64] | Numbers = np.inf
    for theta in _THETAS:
        best = np.minimum(best, bound(float(theta)))
    return np.asarray(best)[()]
