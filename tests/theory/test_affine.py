"""AffPCL's bound and moments: simulation of the rule, random problems, and what “never worse” means."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import KnobError
from coterie.theory import Affine, affine_bound


def draw(rng: np.random.Generator, cases: int, users: int = 4, samples: int = 3) -> Affine:
    """Draw problems of which some users see the same inputs, some have the same objective, some neither."""
    p = rng.dirichlet(np.ones(samples), (cases, users))
    p = np.where(rng.random((cases, 1, 1)) < 0.5, p[:, :1], p)
    a = rng.uniform(-0.3, 2, (cases, samples))
    a = a - np.minimum((p * a[:, None]).sum(-1).min(-1), 0.1)[:, None] + 0.1
    b = 10 ** rng.uniform(-1, 1, (cases, 1, 1)) * rng.normal(size=(cases, users, samples))
    return Affine(p, a, np.where(rng.random((cases, 1, 1)) < 0.4, b[:, :1], b))


def one_of(problems: Affine, case: int) -> Affine:
    return Affine(problems.probabilities[case], problems.matrix[case], problems.target[case])


@pytest.mark.parametrize("steps", [1, 10, 100])
@pytest.mark.parametrize("lr", [0.003, 0.03, 0.2])
def test_no_bound_is_broken(lr: float, steps: int) -> None:
    rng, cases = np.random.default_rng([steps, round(1000 * lr)]), 300
    problems, (x, z) = draw(rng, cases), rng.normal(size=(2, cases)) * 3
    alpha = rng.choice([0.0, 0.5, 1.0], cases)
    ratio = problems.expected(lr, steps, x, z, alpha=alpha) / affine_bound(
        problems, lr, steps, x, z, alpha=alpha
    )
    assert ratio.max() <= 1 + 1e-9
    assert ratio.max() > 0.9


def test_the_moments_are_those_of_the_rule() -> None:
    """Every sample of two steps, in a plain loop over all 3⁸ draws."""
    problem, alpha, lr = one_of(draw(np.random.default_rng(1), 1), 0), 0.7, 0.15
    law: dict[tuple[float, float], float] = {(2.0, -1.0): 1.0}
    for _ in range(2):
        following: dict[tuple[float, float], float] = {}
        for (x, z), chance in law.items():
            for drawn in np.ndindex(3, 3, 3, 3):
                samples = np.array(drawn)
                d, dz = problem.direction(x, z, samples, alpha)
                key = x - lr * d, z - lr * dz
                weight = chance * np.prod(problem.probabilities[range(4), samples])
                following[key] = following.get(key, 0.0) + float(weight)
        law = following
    exact = sum(chance * (x - float(problem.solution)) ** 2 for (x, _), chance in law.items())
    assert float(problem.expected(lr, 2, 2.0, -1.0, alpha=alpha)) == pytest.approx(exact, rel=1e-12)


def test_it_is_unbiased_whatever_the_centre_and_without_ratios_it_is_not() -> None:
    rng = np.random.default_rng(8)
    problem = Affine(rng.dirichlet(np.ones(3), 4), rng.uniform(0.5, 2, 3), rng.normal(size=(4, 3)))
    p = problem.probabilities

    def mean() -> float:
        total = 0.0
        for drawn in np.ndindex(3, 3, 3, 3):
            samples = np.array(drawn)
            total += float(np.prod(p[range(4), samples])) * problem.direction(1.5, 40.0, samples)[0]
        return total

    own = float(p[0] @ (problem.matrix * 1.5 - problem.target[0]))
    assert mean() == pytest.approx(own, rel=1e-10)
    problem.__dict__["ratio"] = np.ones(3)
    assert abs(mean() - own) > 0.1


def test_users_alike_are_n_times_less_noisy() -> None:
    rng = np.random.default_rng(2)
    for n in (2, 10, 100):
        alike = Affine(
            np.tile(rng.dirichlet(np.ones(4)), (n, 1)),
            rng.uniform(0.5, 2, 4),
            np.tile(rng.normal(size=4), (n, 1)),
        )
        assert float(alike.variance()) == pytest.approx(float(alike.variance(0.0)) / n)


def test_never_worse_than_alone_holds_for_the_rate_and_not_for_the_constant() -> None:
    """Peers with a louder objective: at α = 1 the level is 50 times Alone's, at the best α it is below."""
    p = np.full((10, 3), 1 / 3)
    b = np.vstack([[1.0, 0.0, -1.0], np.tile([10.0, -20.0, 10.0], (9, 1))])
    problem = Affine(p, np.ones(3), b)
    assert problem.variance(1.0) > 50 * problem.variance(0.0)
    exact = [float(problem.expected(0.01, 3000, 0.0, 0.0, alpha=alpha)) for alpha in (0.0, 1.0)]
    assert exact[1] > 50 * exact[0]
    problems = draw(np.random.default_rng(3), 500)
    assert (problems.variance(problems.best_alpha()) <= problems.variance(0.0) * (1 + 1e-9)).all()
    assert (problems.variance(1.0) > problems.variance(0.0)).any()


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(KnobError, match="must sum to 1"):
        Affine(np.array([[0.5, 0.6]]), np.ones(2), np.zeros((1, 2)))
    with pytest.raises(KnobError, match="positive mean for user 0"):
        Affine(np.array([[0.5, 0.5]]), -np.ones(2), np.zeros((1, 2)))
