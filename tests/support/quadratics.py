"""Quadratics with one group of peers, rules to run on them, and their moments in a plain scalar loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie import Alone, BiasCorrection, OracleCorrection, Rule, WeightedAveraging
from coterie.theory.dynamics import FloatArray
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

Lr = float | Callable[[int], float]


def paper(n_peers: int = 10, shift: float = 4.0) -> NoisyQuadratic:
    """The authors' problem, with the peers given by their average."""
    average = Quadratic(2, 1 + shift, 10 / math.sqrt(n_peers))
    return NoisyQuadratic(Quadratic(1, 1, 10), [average], x0_spread=1)


def notebook(alpha: float, beta: float = 1e-4) -> BiasCorrection:
    return BiasCorrection(alpha, beta, start="zero", warm_up=False)


PAIR = NoisyQuadratic(Quadratic(1.5, 0.3, 2.0), [Quadratic(0.7, 2.0, 0.8)], x0=-1.0, x0_spread=0.5)
DRIFTING = NoisyQuadratic(
    Quadratic(1.5, 0.3, 2.0), [Quadratic(0.7, 2.0, 0.8)], x0=-1.0, x0_spread=0.5, drift=0.2
)
CASES: list[tuple[str, Rule, Lr]] = [
    ("alone", Alone(), 0.05),
    ("alone, decreasing", Alone(), lambda t: 1 / (1.5 * (t + 1))),
    ("wga", WeightedAveraging(0.4), 0.05),
    ("wga, scheduled", WeightedAveraging(lambda t: 0.5 / (t + 1)), lambda t: 0.3 / (1 + t / 20)),
    ("bc, notebook", BiasCorrection(0.7, 0.05, start="zero", warm_up=False), 0.05),
    ("bc, paper", BiasCorrection(0.7, 0.05, start="first", warm_up=False), 0.05),
    ("bc, warm-up", BiasCorrection(0.7, 0.05), 0.05),
    ("bc, warm-up from zero", BiasCorrection(0.7, 0.05, start="zero"), 0.05),
    ("bc, mean of all biases", BiasCorrection(0.7, 0.0), 0.05),
    ("bc, half corrected", BiasCorrection(0.7, 0.05, correction=0.5), 0.05),
    (
        "bc, scheduled beta",
        BiasCorrection(0.7, lambda t: 1 / math.sqrt(t + 4), warm_up=False),
        0.05,
    ),
    (
        "bc, all scheduled",
        BiasCorrection(lambda t: 0.9 - 0.5 / (t + 1), lambda t: 0.3, correction=0.9),
        lambda t: 0.1,
    ),
    ("oracle", PAIR.oracle(0.6), 0.05),
    ("noisy oracle", PAIR.oracle(0.6, noise=1.5), lambda t: 0.2 / (1 + t / 10)),
]
IDS = [name for name, _, _ in CASES]


def moment_loop(
    problem: NoisyQuadratic, rule: Any, lr: Lr, steps: int, average_from: int | None = None
) -> FloatArray:
    """E e² at every step, from scalars: means and covariances of (x, c, sum), with the paper's c."""

    def at(knob: Any, t: int) -> float:
        return float(knob(t)) if callable(knob) else float(knob)

    own, peer = problem.own, problem.peers[0]
    a0, s0, x_own = float(own.curvature), float(own.noise) ** 2, float(own.optimum)  # type: ignore[arg-type]
    a1, s1, x_peer = float(peer.curvature), float(peer.noise) ** 2, float(peer.optimum)  # type: ignore[arg-type]
    drift = float(problem.drift) ** 2  # type: ignore[arg-type]
    w = getattr(rule, "correction", 0.0)
    if isinstance(rule, OracleCorrection):
        a1, x_peer, s1 = a0, x_own, s1 + rule.bias.noise**2  # type: ignore[attr-defined]
    # x = x_own + e: g_0 = a0 e + n0, g_avg = a1 e − pull + n1.
    pull = a1 * (x_peer - x_own)
    mean = [float(problem.x0) - x_own, 0.0, 0.0]  # type: ignore[arg-type]
    cov = [[0.0] * 3 for _ in range(3)]
    cov[0][0] = float(problem.x0_spread) ** 2  # type: ignore[arg-type]
    out = []
    for t in range(steps + 1):
        count = 0 if average_from is None else t - average_from
        i, scale = (2, 1 / count) if count > 0 else (0, 1.0)
        out.append((scale * mean[i]) ** 2 + scale**2 * cov[i][i])
        alpha, eta = at(getattr(rule, "alpha", 0.0), t), at(lr, t)
        beta = at(getattr(rule, "beta", 1.0), t)
        if getattr(rule, "warm_up", False):
            beta = max(beta, 1 / (t + 1))
        # the next (e, c) as coefficients of (e, c, 1, n0, n1); c_0 is b_0 with start="first"
        b = [a1 - a0, 0.0, -pull, -1.0, 1.0]
        c = b if t == 0 and getattr(rule, "start", "") == "first" else [0.0, 1.0, 0.0, 0.0, 0.0]
        g0, g1 = [a0, 0.0, 0.0, 1.0, 0.0], [a1, 0.0, -pull, 0.0, 1.0]
        d = [(1 - alpha) * p + alpha * (q - w * r) for p, q, r in zip(g0, g1, c, strict=True)]
        e_next = [(1.0 if j == 0 else 0.0) - eta * d[j] for j in range(5)]
        c_next = [(1 - beta) * r + beta * q for r, q in zip(c, b, strict=True)]
        summed = 1.0 if count > 0 else 0.0
        rows = [[*e_next[:2], 0.0], [*c_next[:2], 0.0], [*e_next[:2], summed]]
        constants, noises = [e_next[2], c_next[2], e_next[2]], [e_next[3:], c_next[3:], e_next[3:]]
        mean = [
            sum(r[j] * mean[j] for j in range(3)) + v for r, v in zip(rows, constants, strict=True)
        ]
        cov = [
            [
                sum(rows[p][j] * cov[j][k] * rows[q][k] for j in range(3) for k in range(3))
                + noises[p][0] * noises[q][0] * s0
                + noises[p][1] * noises[q][1] * s1
                + (drift if p in (0, 2) and q in (0, 2) else 0.0)
                for q in range(3)
            ]
            for p in range(3)
        ]
    return np.array(out)


def within(samples: FloatArray, exact: FloatArray | float, sigmas: float = 4.0) -> bool:
    """Whether the mean over trials lies within `sigmas` standard errors of the exact value, everywhere."""
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    return bool((np.abs(samples.mean(0) - exact) < sigmas * error).all())
