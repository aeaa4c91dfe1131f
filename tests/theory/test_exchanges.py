"""Bounds for fewer exchanges against exact moments of random quadratics, and how often to exchange."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coterie import WeightedAveraging, theory
from coterie.errors import KnobError
from coterie.theory import Constants
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


def drawn(rng: np.random.Generator) -> tuple[NoisyQuadratic, Constants]:
    """A problem in three coordinates with two peers, and constants that hold for it."""
    a, x0 = rng.uniform(0.2, 2, 3), rng.normal(size=3)
    gaps, pulls = (
        rng.uniform(-0.15, 0.5, (2, 3)) * rng.integers(2) * a,
        rng.normal(size=(2, 3)) * rng.integers(2),
    )
    noise, peer_noise = 10 ** rng.uniform(-1, 1, 2)
    own = Quadratic(a, 0, noise)
    peers = [
        Quadratic(a + gap, pull / (a + gap), peer_noise)
        for gap, pull in zip(gaps, pulls, strict=True)
    ]
    # (gap e − pull)² ≤ 2(gap/a)²(a e)² + 2 pull²
    constants = Constants(
        smoothness=float(a.max()),
        initial_gap=float((a * x0**2).sum() / 2),
        noise=noise * np.sqrt(3),
        n_peers=2,
        peer_noise=peer_noise * np.sqrt(3),
        bias_floor=float(np.sqrt(2 * (pulls**2).sum(1).max())),
        bias_growth=float(2 * ((gaps / a) ** 2).max()),
        hessian_gap=float(np.abs(gaps).max()),
    )
    return NoisyQuadratic(own, peers, x0=x0), constants


@pytest.mark.parametrize("every", [1, 3, 16])
@pytest.mark.parametrize("kind", ["stale", "local"])
def test_bounds_hold(kind: str, every: int) -> None:
    rng, ratios = np.random.default_rng([every, len(kind)]), []
    for _ in range(40):
        problem, constants = drawn(rng)
        alpha, exchanges = rng.random(), int(rng.choice([1, 7, 60]))
        smoothness = constants.smoothness + (constants.hessian_gap if kind == "local" else 0)
        lr = float(rng.choice([1e-2, 0.1, 0.5]) / (every * smoothness))
        if kind == "stale":
            problem, points = replace(problem, exchange_every=every), np.arange(exchanges) * every
            bound = theory.stale_bound(constants, alpha, lr, exchanges * every, every)
        else:
            problem, points = replace(problem, local_steps=every), np.arange(exchanges)
            bound = theory.local_bound(constants, alpha, lr, exchanges * every, every)
        exact = problem.expected(WeightedAveraging(alpha), lr, points).squared_gradient.mean()
        ratios.append(exact / bound)
    assert max(ratios) <= 1
    assert max(ratios) > 0.1  # not by a mile


def test_local_work_is_bounded_by_the_mean_noise_and_the_largest_gap() -> None:
    """Peers that differ: κ from max δ_k, the drift from Σ τ_kσ_k², both told by `Peers.constants`."""
    tau, every, lr, steps, alpha = [0.9, 0.1, 0.0], 4, 0.01, 400, 0.7
    peers = theory.Peers(
        smoothness=1,
        initial_gap=2,
        noise=1,
        peer_noise=[0, 3, 50],
        bias_floor=[0.1, 0, 9],
        hessian_gap=[0, 4, 70],
    )
    problem = peers.constants(tau)
    kappa = lr * every * (1 + 4)
    drifting = ((1 - alpha) + alpha * 0.1 * 9) / every
    least = np.inf
    for theta in np.geomspace(1e-3, 30, 24):
        drift, bias = (1 + 1 / theta) * kappa**2, (1 + theta) / 2 * alpha**2
        zeta = 0.9 * 0.1**2
        noise = lr * ((1 - alpha) ** 2 + alpha**2 * 0.1**2 * 9) + 6 / 5 * drift * drifting
        cost = 2 / (lr * steps) + (bias + 8 / 5 * drift * alpha) * zeta + noise
        if (left := 1 / 2 - 4 / 5 * drift * (1 + alpha)) > 0:
            least = min(least, cost / left)
    assert theory.local_bound(problem, alpha, lr, steps, every) == pytest.approx(least, rel=1e-12)
    with pytest.raises(KnobError, match="`lr` must keep κ at most 1/2"):
        # κ by the mean gap is below 1/2
        theory.local_bound(problem, alpha, lr=0.03, steps=steps, every=every)


def test_local_work_of_unequal_peers_is_bounded() -> None:
    rng, ratios = np.random.default_rng(3), []
    for _ in range(60):
        a, x0, tau = rng.uniform(0.2, 2), rng.normal(), rng.dirichlet([0.3, 0.3])
        gaps, pulls = rng.uniform(-0.1, 3, 2) * a, rng.normal(size=2) * rng.integers(2)
        noise, peer_noise = 10 ** rng.uniform(-1, 0.5), 10 ** rng.uniform(-1, 1, 2)
        users = [
            Quadratic(a + g, p / (a + g), s)
            for g, p, s in zip(gaps, pulls, peer_noise, strict=True)
        ]
        every, alpha, exchanges = (
            int(rng.choice([2, 5, 16])),
            rng.random(),
            int(rng.choice([1, 7, 60])),
        )
        problem = NoisyQuadratic(Quadratic(a, 0, noise), users, x0=x0, local_steps=every)
        constants = theory.Peers(
            smoothness=a,
            initial_gap=a * x0**2 / 2,
            noise=noise,
            peer_noise=peer_noise,
            bias_floor=np.sqrt(2) * np.abs(pulls),
            bias_growth=2 * (gaps / a) ** 2,
            hessian_gap=np.abs(gaps),
        ).constants(tau)
        lr = float(rng.choice([1e-2, 0.1, 0.5]) / (every * (a + np.abs(gaps).max())))
        bound = theory.local_bound(constants, alpha, lr, exchanges * every, every)
        rule = WeightedAveraging(alpha, tau=dict(zip("12", tau / tau.sum(), strict=True)))
        ratios.append(
            problem.expected(rule, lr, np.arange(exchanges)).squared_gradient.mean() / bound
        )
    assert max(ratios) <= 1
    assert max(ratios) > 0.1


def test_an_exchange_that_costs_nothing_is_had_at_every_step() -> None:
    """The dearer, the less often; the best is never worse than at every step."""
    problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, bias_floor=0.01)
    for kind in ("stale", "local"):
        found = [theory.best_exchanges(problem, 10_000, cost, kind) for cost in (0, 10, 100)]
        every = [one.every for one in found]
        assert every[0] == 1
        assert every == sorted(every)
        assert every[-1] > 10
        for one, cost in zip(found, (0, 10, 100), strict=True):
            assert one.bound <= theory.best_exchanges(problem, 10_000, cost, kind, every=1).bound
            assert one.steps == pytest.approx(10_000 * (1 + cost) / (1 + cost / one.every))


def test_what_no_bound_holds_for_is_refused() -> None:
    problem = Constants(smoothness=1, initial_gap=2, noise=1)
    with pytest.raises(KnobError, match="`lr` must keep κ at most 1/2"):
        theory.stale_bound(problem, 0.5, lr=0.2, steps=10, every=4)
    with pytest.raises(KnobError, match="`noise_growth` must be 0 here"):
        theory.local_bound(replace(problem, noise_growth=1.0), 0.5, lr=0.1, steps=10, every=2)
    with pytest.raises(KnobError, match="`cost` must not be negative"):
        theory.best_exchanges(problem, 10, -1.0, "stale")
