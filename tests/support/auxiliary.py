"""Exact second moments of AuxMom and AuxMVR on random quadratics, by a recursion without the theory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tests.support.exact_moments import Array

from coterie.theory import Constants


@dataclass(frozen=True)
class Auxiliary:
    """Problems in one coordinate, arrays of one number each; x is measured from user 0's optimum.

    ∇f_0 = a x. The peers' mean is h(x) = b x + k with noise of variance `peers`. An observed bias
    on a batch is (a − b + τξ)x − k + n, with ξ standard normal and n of variance `bias`.
    """

    a: Array
    b: Array
    k: Array
    x: Array
    peers: Array
    bias: Array
    tau: Array

    def run(
        self, rate: Array, lr: Array, rounds: int, steps: int, *, recursive: bool
    ) -> tuple[Array, Array]:
        """Return the mean of E‖∇f_0(y)‖² over all points, and the largest variance of an observed bias."""
        shape = self.a.shape
        gap, one, none = self.a - self.b, np.ones(shape), np.zeros(shape)
        # 1, y, x where the last round began, m
        state = np.stack([one, self.x, self.x, gap * self.x - self.k], -1)
        z = state[..., :, None] * state[..., None, :]
        first = self.bias + self.tau**2 * self.x**2
        z[..., 3, 3] += first
        total, worst = none.copy(), first.copy()
        for t in range(rounds):
            if t:
                mean, random = np.zeros((*shape, 4, 4)), np.zeros((*shape, 4, 4))
                mean[..., 0, 0] = mean[..., 1, 1] = mean[..., 2, 1] = 1
                mean[..., 3, 3] = 1 - rate
                mean[..., 3, 0] = -rate * self.k
                mean[..., 3, 1] = gap if recursive else rate * gap
                random[..., 3, 1] = self.tau if recursive else rate * self.tau
                if recursive:
                    mean[..., 3, 2] = -(1 - rate) * gap
                    random[..., 3, 2] = -(1 - rate) * self.tau
                z = mean @ z @ np.swapaxes(mean, -1, -2) + random @ z @ np.swapaxes(random, -1, -2)
                z[..., 3, 3] += rate**2 * self.bias
                worst = np.maximum(worst, self.bias + self.tau**2 * z[..., 1, 1])
            for _ in range(steps):
                total += self.a**2 * z[..., 1, 1]
                move = np.broadcast_to(np.eye(4), (*shape, 4, 4)).copy()
                move[..., 1, 0], move[..., 1, 1], move[..., 1, 3] = (
                    -lr * self.k,
                    1 - lr * self.b,
                    -lr,
                )
                z = move @ z @ np.swapaxes(move, -1, -2)
                z[..., 1, 1] += lr**2 * self.peers
        return total / (rounds * steps), worst

    def constants(self, bias: Array) -> Constants:
        """Return the constants, where s is the variance of an observed bias."""
        return Constants(
            smoothness=self.a,
            initial_gap=self.a * self.x**2 / 2,
            noise=np.sqrt(np.maximum(bias - self.peers, 0)),
            peer_noise=np.sqrt(self.peers),
            hessian_gap=np.abs(self.a - self.b),
        )


def draw(rng: np.random.Generator, cases: int) -> Auxiliary:
    """Draw problems over many orders of magnitude."""

    def log_uniform(low: float, high: float) -> Array:
        return 10 ** rng.uniform(low, high, cases)

    a, peers = log_uniform(-1, 1), log_uniform(-4, 2) * (rng.random(cases) < 0.7)
    return Auxiliary(
        a=a,
        b=a * np.where(rng.random(cases) < 0.3, 1, log_uniform(-1, 0.5)),
        k=log_uniform(-2, 2) * rng.choice([-1, 0, 1], cases),
        x=log_uniform(-2, 1) * rng.choice([-1, 1], cases),
        peers=peers,
        bias=peers + log_uniform(-4, 2),
        tau=a * log_uniform(-2, 0) * (rng.random(cases) < 0.5),
    )


def ratios(
    rng: np.random.Generator, cases: int, rounds: int, steps: int, *, recursive: bool
) -> Array:
    """Return the exact error over the bound, 0 where there is none, of random problems and knobs."""
    from coterie.theory import auxiliary_bound

    problem, rate = draw(rng, cases), 10 ** rng.uniform(-2, 0, cases)
    lr = 10 ** rng.uniform(-2, 0, cases) / problem.a / np.where(rng.random(cases) < 0.5, steps, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        exact, worst = problem.run(rate, lr, rounds, steps, recursive=recursive)
    worst = np.where(np.isfinite(worst), worst, 1e300)
    first = problem.bias + problem.tau**2 * problem.x**2
    gap = problem.tau if recursive else None
    bound = auxiliary_bound(
        problem.constants(np.minimum(worst, 1e200)),
        rate,
        lr,
        rounds,
        steps,
        initial_error=first,
        noise_gap=gap,
    )
    return np.where(np.isfinite(bound), exact / bound, 0.0)
