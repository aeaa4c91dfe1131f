"""Linear-Gaussian systems: powers, chains and square roots."""

from __future__ import annotations

import numpy as np

from coterie.theory.linear_gaussian import Powers, Transition, chain, square_root


def test_powers_and_chains_agree_with_composition() -> None:
    rng = np.random.default_rng(0)
    steps = Transition(rng.normal(size=(7, 2, 2)) / 2, rng.normal(size=(7, 2)), np.eye(2) + np.zeros((7, 2, 2)))
    one_by_one = Transition(np.eye(2), np.zeros(2), np.zeros((2, 2)))
    for i in range(7):
        one_by_one = one_by_one.then(Transition(steps.matrix[i], steps.offset[i], steps.noise[i]))
    for name in ("matrix", "offset", "noise"):
        np.testing.assert_allclose(getattr(chain(steps), name), getattr(one_by_one, name), rtol=1e-12)
    first = Transition(steps.matrix[0], steps.offset[0], steps.noise[0])
    np.testing.assert_allclose(Powers(first)(5).matrix, np.linalg.matrix_power(first.matrix, 5), rtol=1e-12)


def test_square_roots_of_singular_covariances() -> None:
    factor = np.random.default_rng(0).normal(size=(5, 3, 2))
    covariance = factor @ np.swapaxes(factor, 1, 2)
    root = square_root(covariance)
    np.testing.assert_allclose(root @ np.swapaxes(root, 1, 2), covariance, atol=1e-7)
