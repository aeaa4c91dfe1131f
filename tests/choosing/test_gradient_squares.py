"""Squares of means, without what noise would add, and standard errors that cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.planted import D, measured, spread

from coterie.choosing.measuring import Resampled, Spread, Vectors, measure
from coterie.choosing.sampled_gradients import SKETCH
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


def test_squares_are_unbiased() -> None:
    """Also where the noise is far above the bias: over many repetitions the mean of ζ² is the truth."""
    rng, d, squares = np.random.default_rng(0), 60, []
    for _ in range(400):
        mine, theirs = rng.normal(size=(2, 8, d)) * 4
        one, other = (
            Vectors.of(rows, Spread(), rng) for rows in (theirs + np.resize([0.5, -0.5], d), mine)
        )
        squares.append(one.square(other).values[0])
    error = np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - 0.25 * d) < 3.5 * error
    # the noise of the mean difference, which must not be taken for bias
    assert error < 0.05 * 2 * 16 * d / 8


def gradients(rng: np.random.Generator, n: int, d: int, optimum: float, scale: float = 1.0) -> Any:
    """Return each example's gradient of a linear regression at 0; inputs have this scale, noise has variance 1."""
    inputs = scale * rng.normal(size=(n, d))
    targets = inputs.sum(1) * optimum / math.sqrt(d) + rng.normal(size=n)
    return -2 * targets[:, None] * inputs


def root(square: Resampled) -> tuple[float, float]:
    value = math.sqrt(max(square.values[0], 0.0))
    return value, math.sqrt(max(square.values[0], 0.0) + square.error) - value


@pytest.mark.parametrize("d", [10, 40])
def test_two_standard_errors_cover_at_thirty_examples(d: int) -> None:
    """In nine of ten cases at least: of the noise, of user 0's gradient, of no bias and of a bias."""
    rng, repetitions = np.random.default_rng(d), 300
    covered: dict[str, int] = {}
    for _ in range(repetitions):
        me, alike, shifted = (
            Vectors.of(gradients(rng, 30, d, optimum), Spread(), rng) for optimum in (1.0, 1.0, 1.5)
        )
        each = me.each()
        assert each is not None
        # E‖g‖² − ‖E g‖² for targets of variance 2: 4(d·2 + 2·1) − 4
        variance = 4 * (2 * d + 2) - 4
        noise = math.sqrt(each.values[0])
        seen = {
            "noise": (noise, each.error / (2 * noise), math.sqrt(variance)),
            "gradient": (*root(me.square()), 2.0),
            "no bias": (*root(alike.square(me)), 0.0),
            "bias": (*root(shifted.square(me)), 1.0),
        }
        for name, (value, error, truth) in seen.items():
            covered[name] = covered.get(name, 0) + (abs(value - truth) <= 2 * error)
    shares = {name: count / repetitions for name, count in covered.items()}
    assert min(shares.values()) >= 0.9, shares


def test_noise_that_batches_share_is_in_the_errors() -> None:
    """Eight batches of half of the same 30 examples: what they have in common no resample of them shows."""
    rng, covered = np.random.default_rng(3), []
    for _ in range(200):
        rows = [gradients(rng, 30, 20, 1.0) for _ in range(2)]
        drawn = [
            np.stack([each[rng.permutation(30)[:15]].mean(0) for _ in range(8)]) for each in rows
        ]
        me, alike = (Vectors.of(each, Spread((1 - 0.5) / 15, 1 / 30), rng) for each in drawn)
        value, error = root(alike.square(me))
        covered.append(value <= 2 * error)
    assert np.mean(covered) >= 0.9


def test_batches_of_a_run_as_long_as_it_likes_are_put_into_groups() -> None:
    problem = NoisyQuadratic(
        Quadratic(1.0, spread(0.0), noise=1.0), [Quadratic(1.0, spread(0.0), noise=1.0)], x0=3.0
    )
    x = torch.full((D,), 3.0, dtype=torch.float64)
    few, many = (measure(problem.engine(), x, batches=n) for n in (8, 160))
    assert (few.batches, many.batches) == (8, 160)
    for estimates in (few, many):
        assert estimates.noise.value == pytest.approx(math.sqrt(D), rel=0.2)
    errors = [sum(estimates.peers["1"].bias_floor) ** 2 for estimates in (few, many)]
    assert errors[1] < errors[0] / 8


def test_long_gradients_are_sketched_within_their_error() -> None:
    d = 3 * SKETCH
    problem = NoisyQuadratic(
        Quadratic(2.0, np.zeros(d), noise=1.0),
        [Quadratic(3.0, np.resize([1.0, -1.0], d), noise=1.0)],
        x0=3.0,
    )
    estimates = measured(problem)
    length = math.sqrt(d)
    assert estimates.smoothness.value == pytest.approx(2.0, rel=0.02)
    assert estimates.peers["1"].hessian_gap.value == pytest.approx(1.0, rel=0.02)
    assert estimates.noise.value == pytest.approx(length, rel=0.02)
    total = (
        estimates.peers["1"].bias_floor.value ** 2
        + estimates.peers["1"].bias_growth.value * estimates.gradient.value**2
    )
    assert math.sqrt(total) == pytest.approx(length * math.sqrt(3.0**2 + 3.0**2), rel=0.03)
