"""Peers that differ: their best weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.support.constants import horizon, problems, weight

from coterie import theory
from coterie.errors import KnobError
from coterie.theory import Constants


@given(problem=problems(), alpha=weight, steps=st.integers(10, 1000))
def test_best_tau_minimises_the_cost(problem: Constants, alpha: float, steps: int) -> None:
    noise, bias = np.array([1.0, 2.0, 0.5]), np.array([0.3, 0.0, 0.6])

    def cost(tau: Any) -> float:
        peers = Constants.from_peers(
            smoothness=problem.smoothness,
            pl=problem.pl,
            initial_gap=1,
            noise=problem.noise,
            bias_growth=problem.bias_growth,
            tau=tau,
            peer_noise=noise,
            bias_floor=bias,
        )
        return float(theory.averaging_cost(peers, alpha, steps))

    best = theory.best_tau(problem, alpha, steps, peer_noise=noise, bias_floor=bias)
    for other in np.vstack([np.eye(3), np.random.default_rng(0).dirichlet(np.ones(3), 8)]):
        assert cost(best) <= cost(0.5 * best + 0.5 * other) * (1 + 1e-12)
        assert cost(best) <= cost(0.99 * best + 0.01 * other) * (1 + 1e-12)


@given(seed=st.integers(0, 2**32 - 1), steps=horizon)
@settings(max_examples=15)
def test_best_averaging_is_the_joint_minimum_over_alpha_and_tau(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    peers = theory.Peers(
        smoothness=2.0,
        pl=rng.uniform(0.1, 2),
        initial_gap=1.0,
        noise=rng.uniform(0.5, 2),
        peer_noise=rng.uniform(0.5, 2, 3),
        bias_floor=rng.uniform(0, 0.2, 3),
        bias_growth=rng.uniform(0, 3, 3) ** 3,
    )
    best = theory.best_averaging(peers, steps)
    assert best.tau.sum() == pytest.approx(1.0)
    assert best.cost == pytest.approx(
        float(theory.averaging_cost(peers.constants(best.tau), best.alpha, steps))
    )

    def cost(v: Any) -> float:
        tau = np.exp(v[1:] - v[1:].max())
        alpha = 1 / (1 + np.exp(-v[0]))
        return min(
            float(theory.averaging_cost(peers.constants(tau / tau.sum()), alpha, steps)), 1e6
        )

    starts = [np.append(-1.0, 3 * np.eye(3)[k]) for k in range(3)]
    tried = [
        minimize(cost, start, method="Nelder-Mead", options={"maxiter": 4000}).fun
        for start in starts
    ]
    assert best.cost <= min(tried) * (1 + 1e-6)


def test_best_averaging_without_growth_is_water_filling() -> None:
    floors, noises = np.array([0.0, 0.05, 0.4]), np.array([1.0, 2.0, 0.5])
    peers = theory.Peers(
        smoothness=2, pl=0.5, initial_gap=1, noise=1, peer_noise=noises, bias_floor=floors
    )
    best = theory.best_averaging(peers, 300)
    problem = peers.constants(best.tau)
    wanted = theory.best_tau(problem, best.alpha, 300, peer_noise=noises, bias_floor=floors)
    assert best.tau == pytest.approx(wanted)
    assert best.alpha == pytest.approx(float(theory.best_alpha(problem, 300)))
    given_tau = theory.best_averaging(peers, 300, [0, 0, 1])
    assert given_tau.tau.tolist() == [0, 0, 1]
    assert given_tau.cost > best.cost


def test_corrected_peers_are_those_of_smallest_gap_and_knobs_the_bounds_own() -> None:
    peers = theory.Peers(
        smoothness=1,
        initial_gap=1,
        noise=5,
        peer_noise=[5, 4, 6, 5],
        hessian_gap=[3e-4, 20.0, 1e-4, 90.0],
    )
    tau, knobs = theory.best_corrected_peers(peers, 5000)
    assert tau.tolist() == [0.5, 0.0, 0.5, 0.0]
    alone = theory.best_correction(peers.constants(tau), 5000)
    assert knobs == pytest.approx(alone)
    fixed = theory.best_corrected_peers(peers, 5000, alpha=0.3, lr=0.01, tau=[0, 1, 0, 0]).knobs
    assert (fixed.alpha, fixed.lr) == (0.3, 0.01)
    assert fixed.beta == pytest.approx(
        float(theory.best_beta(peers.constants([0, 1, 0, 0]), 0.3, 0.01, 5000))
    )
    with pytest.raises(KnobError, match="at least one peer"):
        theory.Peers(smoothness=1, initial_gap=1, noise=1, peer_noise=[])


def test_the_best_average_needs_a_pl_constant() -> None:
    peers = theory.Peers(smoothness=1, initial_gap=1, noise=1, peer_noise=[1, 1])
    with pytest.raises(
        KnobError, match="`pl` must be positive for a cost in terms of the loss, got 0"
    ):
        theory.best_averaging(peers, 100)
