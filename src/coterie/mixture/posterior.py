"""The most probable parameters of a linear model under normal priors, many priors at once."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from coterie.mixture.families import Array, Family

ITERATIONS = 100
"""Of L-BFGS, at most."""
MEMORY = 8
"""How many of its last steps L-BFGS knows."""
MOST_COLUMNS = 48
"""With more of them L-BFGS starts from a diagonal."""
TOLERANCE = 1e-4
"""How near the mode is found, in standard deviations of the prior.

In these units the objective is 1-convex.
"""


MANY_ROWS = 10_000
NEAR = 0.01
"""With more than `MANY_ROWS` rows: about how near the mode is found, in standard deviations of the posterior."""
AT_ONCE = 2**20
"""How many outputs of all models are worked at together; of one user's with more, rows are taken in turn."""
MODELS = 2**17
"""How many numbers the models have that are sought together: L-BFGS holds them some thirty times."""


Pair: TypeAlias = tuple[Array, Array, Array]
"""A step, the change of the gradient over it, and one over their product."""


class Rows(NamedTuple):
    """A user's examples: inputs (n, D), with a column of ones where there is an intercept, and targets (n, K).

    Or a stack of S users', (S, n, D) and (S, n, K). Of B models each user then has B/S, one user's
    after the other's.
    """

    inputs: Array
    targets: Array
    weights: Array | None = None  # (n,): what each row counts; 1 when None

    def finite(self) -> "Rows":
        """Return the rows that hold nothing but finite numbers, and count."""
        fine = np.isfinite(self.inputs).all(1) & np.isfinite(self.targets).all(1)
        if self.weights is not None:
            fine &= self.weights > 0
        return self if fine.all() else self.some(np.flatnonzero(fine))

    def some(self, places: Array) -> "Rows":
        """Return some of a user's rows."""
        weights = None if self.weights is None else self.weights[places]
        return Rows(self.inputs[places], self.targets[places], weights)

    @property
    def counts(self) -> Array:
        """What each row counts, (n,)."""
        return np.ones(len(self.targets)) if self.weights is None else self.weights


def believed(weights: Array) -> Array:
    """Return weights of rows as they count: they sum to as many rows as would say as much (Kish).

    What they are all multiplied by does not matter.

    Example:
        >>> believed(np.array([2.0, 2.0])), float(believed(np.array([6.0, 2.0])).sum())
        (array([1., 1.]), 1.6)
    """
    whole: Array = weights * (weights.sum() / max(1e-300, float(np.square(weights).sum())))
    return whole


class Priors(NamedTuple):
    """B normal priors over the parameters of a linear model, each with the variance of its noise.

    The parameters of B models have the shape (D, B, K) throughout: one matrix product gives the
    outputs of all.
    """

    mean: Array  # (D, B, K)
    variance: Array  # (D, B, K)
    noise: Array  # (B,): what the loss is divided by; 1 but for the squared loss


def outputs_of(inputs: Array, parameters: Array) -> Array:
    """Return the outputs of B models, (n, B, K)."""
    d, b, k = parameters.shape
    if inputs.ndim == 2:
        return (inputs @ parameters.reshape(d, b * k)).reshape(-1, b, k)
    s, n, _ = inputs.shape
    outputs = inputs @ parameters.reshape(d, s, -1).swapaxes(0, 1)
    return outputs.swapaxes(0, 1).reshape(n, b, k)


def back_to_parameters(inputs: Array, outputs: Array) -> Array:
    """Return the transposed product, (D, B, K)."""
    n, b, k = outputs.shape
    if inputs.ndim == 2:
        return (inputs.T @ outputs.reshape(n, b * k)).reshape(-1, b, k)
    s, _, d = inputs.shape
    slopes = inputs.swapaxes(1, 2) @ outputs.reshape(n, s, -1).swapaxes(0, 1)
    return slopes.swapaxes(0, 1).reshape(d, b, k)


def targets_of(rows: Rows, models: int) -> Array:
    """Return the targets of B models, (n, B, K), or (n, 1, K) where all have the same."""
    if rows.targets.ndim == 2:
        return rows.targets[:, None]
    return np.repeat(rows.targets.swapaxes(0, 1), models // len(rows.targets), 1)


def _inputs_of(rows: Rows, models: int) -> Array:
    """Return the inputs of B models, (B, 1, n, D), or (1, 1, n, D) where all have the same."""
    if rows.inputs.ndim == 2:
        return rows.inputs[None, None]
    each: Array = np.repeat(rows.inputs, models // len(rows.inputs), 0)
    return each[:, None]


def most_probable(
    rows: Rows,
    family: Family,
    priors: Priors,
    seen: Array | None = None,
    *,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Array:
    """Return argmin of Σ loss/noise + Σ (W − mean)²/(2 variance) under each prior, (D, B, K).

    Args:
        rows: of the user.
        family: of the loss.
        priors: each gives a model.
        seen: the weight of each row under each prior, (n, B); 1 when None.
        tolerance: of the mode, in standard deviations of the prior; the squared loss is solved
            exactly.
        iterations: of L-BFGS at most.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> rows = Rows(np.ones((3, 1)), np.full((3, 1), 4.0))  # three times 4, a prior of N(0, 1)
        >>> most_probable(rows, SQUARED, Priors(np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.ones(1))).item()
        3.0
    """
    n = rows.inputs.shape[-2]
    weights = (np.ones((n, 1)) if seen is None else seen) / priors.noise
    weights = np.broadcast_to(weights, (n, len(priors.noise)))
    if family.is_squared:
        return _solve(rows, priors, weights)[0]
    settings: dict[str, Any] = {"tolerance": tolerance, "iterations": iterations}
    d, b, k = priors.mean.shape
    most = b if rows.inputs.ndim > 2 else max(1, MODELS // (d * k))
    if most >= b:
        return _minimise(rows, family, priors, weights, **settings)
    found = np.empty((d, b, k))
    for begin in range(0, b, most):  # what is found for one model depends on no other
        some = slice(begin, begin + most)
        few = Priors(priors.mean[:, some], priors.variance[:, some], priors.noise[some])
        found[:, some] = _minimise(rows, family, few, weights[:, some], **settings)
    return found


def posterior(
    rows: Rows, family: Family, priors: Priors, seen: Array, *, tolerance: float, iterations: int
) -> tuple[Array, Array]:
    """Return the modes, as `most_probable`, and the variances of the posteriors there.

    For classes Laplace's, each number for itself.
    """
    if family.is_squared:
        return _solve(rows, priors, seen / priors.noise)
    settings: dict[str, Any] = {"tolerance": tolerance, "iterations": iterations}
    at = most_probable(rows, family, priors, seen, **settings)
    curvature = family.curvature(family.predict(outputs_of(rows.inputs, at))) * seen[..., None]
    return at, 1 / (back_to_parameters(np.square(rows.inputs), curvature) + 1 / priors.variance)


def _solve(rows: Rows, priors: Priors, weights: Array) -> tuple[Array, Array]:
    """Return modes and variances for the squared loss, by the smaller of two systems.

    Of D columns or of n rows.
    """
    n, d = rows.inputs.shape[-2:]
    root = np.sqrt(weights.T)[:, None, :, None]  # (B, 1, n, 1)
    scale = np.sqrt(np.moveaxis(priors.variance, 0, 2))[:, :, None, :]  # (B, K, 1, D)
    z = _inputs_of(rows, len(weights.T)) * root * scale  # (B, K, n, D), in units of the prior
    away = targets_of(rows, len(weights.T)) - outputs_of(rows.inputs, priors.mean)
    errors = np.moveaxis(away, 0, 2)[..., None] * root
    zt = z.swapaxes(-1, -2)
    if d <= n:
        inverse = np.linalg.inv(zt @ z + np.eye(d))  # eigenvalues are 1 or more
        step, left = inverse @ (zt @ errors), np.einsum("...ii->...i", inverse)
    else:
        inverse = np.linalg.inv(z @ zt + np.eye(n))
        step, left = zt @ (inverse @ errors), 1 - ((zt @ inverse) * zt).sum(-1)
    moved = np.moveaxis(step[..., 0] * scale[..., 0, :], 2, 0)
    return priors.mean + moved, priors.variance * np.moveaxis(np.clip(left, 1e-12, 1), 2, 0)


def _minimise(
    rows: Rows, family: Family, priors: Priors, weights: Array, *, tolerance: float, iterations: int
) -> Array:
    """Return the minima by L-BFGS in units of the priors, for each prior by steps of its own.

    Problems that have arrived are left out of the products; what is computed for one depends on no
    other.
    """
    result = np.array(priors.mean)
    left = np.arange(result.shape[1])  # the problems that go on
    mean = priors.mean
    root = np.sqrt(priors.variance)
    targets = targets_of(rows, result.shape[1])
    together = rows.inputs.ndim > 2  # then those that are done stand still
    z = np.zeros_like(mean)

    def value(z: Array) -> tuple[Array, Array]:
        at, (_, b, k) = mean + root * z, z.shape
        loss, slope = _dot(z, z) / 2, np.zeros_like(z)
        for some in _in_turn(rows, b * k):
            inputs, aims, weighed = rows.inputs[some], targets[some], weights[some]
            outputs = outputs_of(inputs, at)
            loss = loss + (family.losses(outputs, aims) * weighed).sum(0)
            wrong = (family.predict(outputs) - aims) * weighed[..., None]
            slope = slope + back_to_parameters(inputs, wrong)
        return loss, slope * root + z

    start = _start(rows, family, mean, root, weights)
    f, g = value(z)
    history: list[Pair] = []
    gamma = np.ones(len(left))
    for _ in range(iterations):
        going = _dot(g, g) > tolerance**2
        if len(weights) > MANY_ROWS:  # then they say far more than the prior
            going &= _dot(g, gamma[:, None] * _times(start, g)) > NEAR**2
        if not going.all():
            result[:, left] = mean + root * z
            if not going.any():
                return result
        if not going.all() and not together:
            left, f, gamma, weights = left[going], f[going], gamma[going], weights[:, going]
            mean, root, z, g = (each[:, going] for each in (mean, root, z, g))
            start = start[going]
            history = [(s[:, going], y[:, going], rho[going]) for s, y, rho in history]
        direction = two_loops(g, history, gamma[:, None, None, None] * start)
        downhill = _dot(g, direction)
        length = np.ones(len(left)) if not together else going.astype(np.float64)
        for _ in range(30):
            moved = z - length[:, None] * direction
            f_new, g_new = value(moved)
            fails = ~(f_new <= f - 1e-4 * length * downhill + 1e-12 * np.abs(f))
            if not fails.any():
                break
            length = np.where(fails, length / 4, length)
        s, y = moved - z, g_new - g
        sy = _dot(s, y)
        fine = sy > 0
        rho = np.where(fine, 1 / np.where(fine, sy, 1.0), 0.0)
        gamma = np.where(fine, sy / np.where(fine, _dot(y, _times(start, y)), 1.0), gamma)
        history = [*history[-MEMORY + 1 :], (s, y, rho)]
        z, f, g = moved, f_new, g_new
    result[:, left] = mean + root * z
    return result


def two_loops(g: Array, history: list[Pair], start: Array) -> Array:
    """Return L-BFGS's inverse Hessian, `start` where nothing is known, times the gradient."""
    q, shares = g, []
    for s, y, rho in reversed(history):
        share = rho * _dot(s, q)
        q = q - share[:, None] * y
        shares.append(share)
    q = _times(start, q)
    for (s, y, rho), share in zip(history, reversed(shares), strict=True):
        q = q + (share - rho * _dot(y, q))[:, None] * s
    return q


def _in_turn(rows: Rows, width: int) -> list[slice]:
    """Return the rows that are worked at together: all, but of one user with many so many at a time."""
    n = len(rows.inputs)
    if rows.inputs.ndim > 2 or n * width <= AT_ONCE:
        return [slice(None)]
    size = max(1, AT_ONCE // (4 * width))
    return [slice(begin, begin + size) for begin in range(0, n, size)]


def _start(rows: Rows, family: Family, mean: Array, root: Array, weights: Array) -> Array:
    """Return the inverse Hessian at the start, each output for itself, (B, K, D, D).

    Diagonal where D is large.
    """
    turns, d = _in_turn(rows, mean.shape[1] * mean.shape[2]), rows.inputs.shape[-1]
    if d > MOST_COLUMNS:
        diagonal = np.zeros_like(mean)
        for some in turns:
            inputs = rows.inputs[some]
            curved = family.curvature(family.predict(outputs_of(inputs, mean)))
            diagonal += back_to_parameters(np.square(inputs), curved * weights[some][..., None])
        return np.transpose(1 / (1 + diagonal * np.square(root)), (1, 2, 0))[:, :, None]
    hessian: Array | float = 0.0
    for some in turns:
        part = rows if len(turns) == 1 else rows.some(np.arange(len(weights))[some])
        weighed = _weighed(part, family, mean, root, weights[some])
        hessian = weighed.swapaxes(2, 3) @ weighed + hessian
    size = 1 + 1e-10 * np.einsum("...ii->...", hessian)  # else one that is huge has no inverse
    inverse = np.linalg.inv(hessian + size[..., None, None] * np.eye(d))
    return inverse


def _weighed(rows: Rows, family: Family, mean: Array, root: Array, weights: Array) -> Array:
    """Return the inputs in units of the priors, each by the root of its curvature, (B, K, n, D)."""
    curvature = np.transpose(
        family.curvature(family.predict(outputs_of(rows.inputs, mean))), (1, 2, 0)
    )
    weighed = _inputs_of(rows, len(weights.T)) * np.sqrt(curvature * weights.T[:, None])[..., None]
    weighed *= np.transpose(root, (1, 2, 0))[:, :, None]
    whole: Array = weighed
    return whole


def _times(start: Array, g: Array) -> Array:
    """Return the inverse Hessian at the start times vectors, (D, B, K)."""
    rows = np.transpose(g, (1, 2, 0))[..., None]
    product: Array = start @ rows if start.shape[2] > 1 else start.swapaxes(2, 3) * rows
    return np.transpose(product[..., 0], (2, 0, 1))


def _dot(a: Array, b: Array) -> Array:
    """Return the inner products of B problems."""
    products: Array = np.einsum("dbk,dbk->b", a, b)
    return products
