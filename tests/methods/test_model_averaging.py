"""Averages of means: the best weights, against exact moments and drawn users."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from coterie.gradients.simplex import simplex_minimum
from coterie.methods import averaging_error, averaging_weights

SIZES, NOISE = (5, 3, 12, 40), 2.0


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_fine_weights_are_the_minimum_of_the_exact_moments(spread: float) -> None:
    """θ̂_k − θ_0 have the covariance diag(σ²/n) + s²(1 + 1ᵀ) off user 0: a program on the simplex."""
    gram = np.diag(NOISE**2 / np.array(SIZES))
    gram[1:, 1:] += spread**2 * (1 + np.eye(len(SIZES) - 1))
    weights = averaging_weights(SIZES, NOISE, spread)
    assert weights == pytest.approx(simplex_minimum(gram), abs=1e-9)
    assert averaging_error(weights, SIZES, NOISE, spread) == pytest.approx(weights @ gram @ weights)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_coarse_weights_are_the_best_mixture_of_own_and_pooled(spread: float) -> None:
    own, pooled = np.eye(len(SIZES))[0], np.array(SIZES) / sum(SIZES)

    def error(w: float) -> float:
        return averaging_error(w * own + (1 - w) * pooled, SIZES, NOISE, spread)

    best = minimize_scalar(error, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x
    weights = averaging_weights(SIZES, NOISE, spread, "coarse")
    assert weights == pytest.approx(best * own + (1 - best) * pooled, abs=1e-5)
    fine = averaging_error(averaging_weights(SIZES, NOISE, spread), SIZES, NOISE, spread)
    assert fine <= averaging_error(weights, SIZES, NOISE, spread) + 1e-12


def test_the_error_of_averaging_is_the_one_of_drawn_users() -> None:
    random, draws = np.random.default_rng(0), 200_000
    truths = 7 + 0.8 * random.normal(size=(draws, len(SIZES)))
    means = truths + NOISE / np.sqrt(SIZES) * random.normal(size=truths.shape)
    weights = np.array([0.5, 0.2, 0.2, 0.1])
    errors = (means @ weights - truths[:, 0]) ** 2
    assert averaging_error(weights, SIZES, NOISE, 0.8) == pytest.approx(
        errors.mean(), abs=4 * errors.std() / 447
    )
