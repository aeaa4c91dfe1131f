"""Weights on the simplex: how much each peer counts."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from coterie.errors import KnobError


def water_filling(
    noise: ArrayLike, bias: ArrayLike = 0.0, kappa: ArrayLike = 1.0
) -> NDArray[np.float64]:
    """Return the weights that trade the peers' noise against their bias best, in O(N log N).

        min over the simplex of  Σ κ τ_k² σ_k² + τ_k ζ_k²
        τ_k = max(0, (λ − ζ_k²) / (2κσ_k²)),  with the water level λ set by Σ τ_k = 1

    Without bias τ_k ∝ 1/σ_k². A peer without noise takes all that the others, filled up to its
    ζ_k², leave; several such peers share it equally.

    Args:
        noise: σ_k, each peer's noise, along the last axis; axes before it are separate problems.
        bias: ζ_k, each peer's bias, as `noise`.
        kappa: κ, the price of noise, one for each problem; for averaging, L/(μT(1 − α²m)).

    Example:
        >>> water_filling([1.0, 1.0, 2.0]).round(3).tolist()
        [0.444, 0.444, 0.111]
        >>> water_filling([1.0, 1.0, 1.0], bias=[0.0, 1.0, 3.0]).tolist()
        [0.75, 0.25, 0.0]

    Reference: Chayti et al., *Linear Speedup in Personalized Collaborative Learning*, Appendix C.2,
    “Choice of the weights”.
    """
    sigma, zeta, price = np.broadcast_arrays(
        _checked_sizes("noise", noise),
        _checked_sizes("bias", bias),
        _checked_sizes("kappa", kappa)[..., None],
    )
    if not sigma.size:
        raise KnobError("`noise` must hold one value for each peer; give at least one peer")
    # The program only sees differences of ζ², and subtracting the least keeps their digits.
    depth = zeta**2 - (zeta**2).min(-1, keepdims=True)
    slope = 2 * price * sigma**2
    noisy = slope > 1e-300
    width = np.divide(1.0, slope, out=np.zeros_like(slope), where=noisy)
    level = np.minimum(_level(depth, width), np.where(noisy, np.inf, depth).min(-1, keepdims=True))
    tau = np.maximum(level - depth, 0.0) * width
    noiseless = ~noisy & (depth <= level)
    # What is missing to 1 belongs to the noiseless; without any it is rounding, magnified by the
    # wide.
    shares = np.where(
        noiseless.any(-1, keepdims=True), noiseless, np.where(depth <= level, width, 0.0)
    )
    return np.asarray(
        tau + (1 - tau.sum(-1, keepdims=True)) * shares / shares.sum(-1, keepdims=True)
    )


def simplex_minimum(matrix: ArrayLike) -> NDArray[np.float64]:
    """Return the weights κ on the simplex that minimise κᵀHκ, for H symmetric and positive semidefinite.

        z = argmin over z ≥ 0 of  zᵀHz + (1ᵀz − 1)²,  κ = z / 1ᵀz

    which is one non-negative least squares problem: the minimum over scaled copies of the simplex
    is on the same ray. H is scaled to unit trace first; its negative eigenvalues, which noise
    leaves, count as zero. Where several weights do equally well, which of them is returned is not
    specified; H = 0 gives equal weights.

    Args:
        matrix: H, of shape (n, n); of what row i lacks of a target, ⟨g_i − h, g_j − h⟩.

    Example:
        >>> simplex_minimum([[1.0, 0.0], [0.0, 3.0]]).round(6).tolist()
        [0.75, 0.25]
        >>> simplex_minimum([[1.0, 2.0], [2.0, 5.0]]).tolist()
        [1.0, 0.0]
    """
    h = np.asarray(matrix, dtype=np.float64)
    if h.ndim != 2 or h.shape[0] != h.shape[1] or not h.size:
        raise KnobError(f"`matrix` must be square and not empty, got the shape {h.shape}")
    if not np.isfinite(h).all():
        raise KnobError("`matrix` must be finite; leave out the rows that are not")
    scale = np.trace(h)
    if scale <= 0:
        return np.full(len(h), 1 / len(h))
    values, vectors = np.linalg.eigh((h + h.T) / (2 * scale))
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    z, _ = nnls(np.vstack([root, np.ones(len(h))]), np.append(np.zeros(len(h)), 1.0))
    return np.asarray(z / z.sum())


def simplex_minimum_low_rank(
    factor: ArrayLike, diagonal: ArrayLike, near: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the weights κ on the simplex that minimise κᵀ(FFᵀ + diag D)κ, in O(n r²) for r columns.

    As `simplex_minimum`, by the dual of its problem, which has r + 1 unknowns however many weights
    there are:

        z = max(0, F̃v)/D,  v + F̃ᵀz = (0, …, 0, 1),  F̃ = (F, 1)

    by Newton's method, whose steps are exact once it is known which weights are positive. Its
    systems have as many unknowns as there are columns or positive weights, whichever are fewer.

    Args:
        factor: F, of shape (n, r).
        diagonal: D, positive.
        near: weights to begin from, of a problem that is much like this one.

    Example:
        >>> factor, diagonal = np.array([[1.0, 0.0], [0.5, 0.5], [-0.2, 0.9]]), np.full(3, 0.1)
        >>> apart = simplex_minimum_low_rank(factor, diagonal) - simplex_minimum(factor @ factor.T + np.diag(diagonal))
        >>> bool(np.abs(apart).max() < 1e-12)
        True
    """
    rows, d = np.asarray(factor, dtype=np.float64), np.asarray(diagonal, dtype=np.float64)
    scale = float(np.mean(np.square(rows).sum(1) + d))
    if not scale > 0:
        return np.full(len(d), 1 / len(d))
    rows = np.column_stack([rows / math.sqrt(scale), np.ones(len(d))])
    d = np.maximum(d / scale, 1e-12)
    target = np.eye(rows.shape[1])[-1]

    def value(v: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        positive = np.maximum(rows @ v, 0.0)
        return float(v @ v + positive @ (positive / d)) / 2 - v[-1], positive

    if near is None:
        v = target / (1 + (1 / d).sum())  # as if only the last column counted
    else:  # the z on the ray of these weights that is best, and its v
        along = rows[:, :-1].T @ near
        v = target - rows.T @ (near / (1 + along @ along + near @ (d * near)))
    lowest, positive = value(v)
    for _ in range(200):
        gradient = v + rows.T @ (positive / d) - target
        if np.abs(gradient).max() <= 1e-13:
            break
        on = positive > 0
        some, length = rows[on], 1.0
        if len(some) < len(v):  # (I + FᵀF/D)⁻¹ = I − Fᵀ(D + FFᵀ)⁻¹F
            inner = np.linalg.solve(some @ some.T + np.diag(d[on]), some @ gradient)
            step = gradient - some.T @ inner
        else:
            step = np.linalg.solve(np.eye(len(v)) + (some.T / d[on]) @ some, gradient)
        falls = float(gradient @ step)
        while True:
            found, there = value(v - length * step)
            if found <= lowest - 1e-4 * length * falls or length < 1e-6:
                break
            length /= 2
        if length < 1e-6:  # rounding is all that is left
            break
        v, lowest, positive = v - length * step, found, there
    z = positive / d
    return np.asarray(z / z.sum())


def _level(depth: NDArray[np.float64], width: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the λ at which Σ max(0, λ − depth)·width = 1; infinite where nothing has a width.

    Filling the i shallowest gives λ_i. It falls as long as the next is shallower than λ_i and rises
    from there on, so that the least of them is the level.
    """
    order = np.argsort(depth, axis=-1)
    depth, width = (np.take_along_axis(array, order, axis=-1) for array in (depth, width))
    area = np.cumsum(width, axis=-1)
    with np.errstate(over="ignore"):
        volume = 1.0 + np.cumsum(width * depth, axis=-1)
    levels = np.divide(volume, area, out=np.full_like(area, np.inf), where=area > 0)
    return np.asarray(levels.min(-1, keepdims=True))


def _checked_sizes(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise KnobError(f"`{name}` must be finite and not negative, got {array[wrong].flat[0]:g}")
    return array
