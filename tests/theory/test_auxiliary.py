"""AuxMom's and AuxMVR's bound against exact moments of random problems, and what it says of K."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.auxiliary import Auxiliary, ratios

from coterie import theory
from coterie.errors import KnobError


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize(("rounds", "steps"), [(1, 1), (1, 8), (40, 1), (40, 3), (15, 10)])
def test_no_bound_is_broken(rounds: int, steps: int, recursive: bool) -> None:
    rng = np.random.default_rng([rounds, steps, recursive])
    found = ratios(rng, 400, rounds, steps, recursive=recursive)
    assert found.max() <= 1 + 1e-9
    assert found.max() > 0.3
    assert (found > 0).mean() > 0.2


def test_the_moments_are_those_of_a_simulation() -> None:
    one = np.array([1.0])
    problem = Auxiliary(1.2 * one, 0.7 * one, 0.5 * one, 2 * one, 0.3 * one, 0.9 * one, 0.4 * one)
    rng, trials = np.random.default_rng(0), 40_000
    for recursive in (False, True):
        y, m, before, total = np.full(trials, 2.0), np.zeros(trials), np.full(trials, 2.0), 0.0
        for t in range(4):
            xi, n = rng.normal(size=(2, trials)) * np.array([[0.4], [np.sqrt(0.9)]])
            seen, last = ((0.5 + xi) * point - 0.5 + n for point in (y, before))
            m = seen if t == 0 else seen + 0.8 * (m - last) if recursive else 0.8 * m + 0.2 * seen
            before = y
            for _ in range(3):
                total += float(np.mean((1.2 * y) ** 2)) / 12
                y = y - 0.2 * (0.7 * y + 0.5 + np.sqrt(0.3) * rng.normal(size=trials) + m)
        exact = problem.run(0.2 * one, 0.2 * one, 4, 3, recursive=recursive)[0][0]
        assert total == pytest.approx(exact, rel=0.02)


def test_more_steps_by_the_peers_help_where_hessians_are_alike() -> None:
    """K times fewer own gradients for the same bound, while ηKδ is small; beyond, none."""
    alike = theory.Constants(smoothness=1, initial_gap=2, noise=0.1, n_peers=100, hessian_gap=1e-4)
    few, many = (theory.auxiliary_bound(alike, 0.1, 0.1, 1000, k) for k in (1, 20))
    assert many < few / 2
    apart = theory.Constants(smoothness=1, initial_gap=2, noise=0.1, n_peers=100, hessian_gap=1.0)
    assert np.isinf(theory.auxiliary_bound(apart, 0.1, 0.1, 1000, 20))


def test_many_steps_with_other_hessians_diverge() -> None:
    """Peers with curvature .1 beside 1: at η = .5, K = 1 stays where it is, K = 20 leaves."""
    one = np.ones(1)
    problem = Auxiliary(one, 0.1 * one, 0 * one, one, 0 * one, 1e-6 * one, 0 * one)
    near, far = (problem.run(one, 0.5 * one, 60, k, recursive=False)[0][0] for k in (1, 20))
    assert near < 0.1
    assert far > 1e10


def test_what_no_bound_holds_for_is_refused() -> None:
    problem = theory.Constants(smoothness=1, initial_gap=2, noise=1)
    with pytest.raises(KnobError, match="`lr` must not exceed 1/L"):
        theory.auxiliary_bound(problem, 0.1, 2.0, 10, 2)
    with pytest.raises(KnobError, match="`rate` must lie in"):
        theory.auxiliary_bound(problem, 0.0, 0.1, 10, 2)
