"""Linear-Gaussian systems: powers, chains and square roots."""

from __future__ import annotations

import numpy as np

from coterie.theory.dynamics import Powers, Transition, chain, square_root


def test_powers_and_chains_agree_with_composition() -> None:
    rng = np.random.default_rng(0)
    steps = Transition(
        rng.normal(size=(7, 2, 2)) / 2, rng.normal(size=(7, 2)), np.eye(2) + np.zeros((7, 2, 2))
    )
    one_by_one = Transition(np.eye(2), np.zeros(2), np.zeros((2, 2)))
    for i in range(7):
        one_by_one = one_by_one.then(Transition(steps.matrix[i], steps.offset[i], steps.noise[i]))
    for name in ("matrix", "offset", "noise"):
        np.testing.assert_allclose(
            getattr(chain(steps), name), getattr(one_by_one, name), rtol=1e-12
        )
    first = Transition(steps.matrix[0], steps.offset[0], steps.noise[0])
    np.testing.assert_allclose(
        Powers(first)(5).matrix, np.linalg.matrix_power(first.matrix, 5), rtol=1e-12
    )


def test_two_steps_and_a_million_as_one() -> None:
    halve = Transition(np.array([[0.5]]), np.array([1.0]), np.array([[3.0]]))
    twice = halve.then(halve)
    assert (twice.matrix[0, 0], twice.offset[0], twice.noise[0, 0]) == (0.25, 1.5, 3.75)
    millionth = Powers(Transition(np.eye(1), np.ones(1), np.ones((1, 1))))(1_000_000)
    assert (millionth.offset[0], millionth.noise[0, 0]) == (1e6, 1e6)
    rates = Transition(np.array([[[0.5]], [[0.1]], [[2.0]]]), np.zeros((3, 1)), np.zeros((3, 1, 1)))
    assert chain(rates).matrix[0, 0] == 0.1


def test_square_roots_of_singular_covariances() -> None:
    factor = np.random.default_rng(0).normal(size=(5, 3, 2))
    covariance = factor @ np.swapaxes(factor, 1, 2)
    root = square_root(covariance)
    np.testing.assert_allclose(root @ np.swapaxes(root, 1, 2), covariance, atol=1e-7)
    np.testing.assert_allclose(
        square_root(np.array([[4.0, 2.0], [2.0, 1.0]])), [[2, 0], [1, 0]], rtol=1e-15
    )
