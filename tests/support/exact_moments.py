"""Random quadratics and their exact second moments, by a plain recursion that uses nothing of the theory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

    ∇f_0 = a x with noise of variance v_0 + M_0(a x)²; ∇f_avg = b x + k with noise v_1 + M_1(b x +
    k)².
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
        alpha, beta = (
            np.broadcast_to(np.reshape(knob, (-1, 1)), self.a.shape) for knob in (alpha, beta)
        )
        rates = np.broadcast_to(lr, (steps, len(self.a)))[..., None]
        mean, variance = (np.zeros_like(self.a),) * 2 if c is None else c
        moments = np.einsum(
            "...i,...j", state := np.stack([np.ones_like(self.x), self.x, mean], -1), state
        )
        moments[..., 2, 2] += variance
        total = np.zeros(self.a.shape)
        for eta in rates:
            total += self.a**2 * moments[..., 1, 1]
            own, peers = self.noise_of(moments)
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

    def noise_of(self, moments: Array) -> tuple[Array, Array]:
        """Return the variance of both noises."""
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
    return (
        problem,
        constants,
        most * rng.choice([0, 1, 0.3, 0.7], CASES) * rng.uniform(0.8, 1, CASES),
    )


def some(rng: np.random.Generator, limit: Any) -> Any:
    """Return step sizes up to the limit, a third of them at it."""
    return limit * np.where(rng.random(CASES) < 0.3, 1, 10 ** rng.uniform(-2, 0, CASES))


def assert_bounds(exact: Array, bound: Any, *, tight: float) -> None:
    """Assert that the bound holds in every case, and is within a factor of the truth in one."""
    ratio = np.divide(exact, bound, out=np.where(exact > 0, np.inf, 0), where=bound > 0)
    assert (ratio <= 1 + 1e-9).all(), (
        f"the bound fails in {np.sum(ratio > 1)} cases, by up to {ratio.max()}"
    )
    assert ratio.max() >= tight


def starts(rng: np.random.Generator, problem: Quadratics) -> tuple[tuple[Array, Array], Array]:
    """Return (mean, variance) of c_0 and E_0: zero, or the mean of S biases observed beforehand."""
    bias = (problem.b - problem.a) * problem.x + problem.k
    zero = rng.random((CASES, 1)) < 0.4
    variance = np.where(zero, 0, (problem.own + problem.peers) / rng.integers(1, 20, (CASES, 1)))
    mean = np.where(zero, 0, bias)
    return (mean, variance), ((mean - bias) ** 2 + variance).sum(-1)
