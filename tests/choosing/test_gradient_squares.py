"""Squares of means, without what noise would add."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.support.planted import D, measured, spread

from coterie.choosing.gradient_squares import SKETCH, sample_gradients, squares
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


def test_squares_are_unbiased() -> None:
    """Also where the noise is far above the bias: over many repetitions the mean of ζ² is the truth."""
    problem = NoisyQuadratic(
        Quadratic(1.0, spread(0.0), noise=4.0), [Quadratic(1.0, spread(0.5, -0.5), noise=4.0)], x0=spread(3.0, 3.0)
    )
    found = []
    for seed in range(300):
        seen = sample_gradients(problem.engine(seed), torch.full((D,), 3.0, dtype=torch.float64), 4, 0.25)
        found.append(float(squares(seen, np.ones(2), np.full(2, np.inf))["bias"][0]))
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - 0.25 * D) < 3.5 * error
    assert error < 0.05 * 2 * 16 * D / 4  # the noise of the mean difference, which must not be taken for bias


def test_long_gradients_are_sketched_within_their_error() -> None:
    d = 3 * SKETCH
    problem = NoisyQuadratic(
        Quadratic(2.0, np.zeros(d), noise=1.0), [Quadratic(3.0, np.resize([1.0, -1.0], d), noise=1.0)], x0=3.0
    )
    found = measured(problem)
    root = math.sqrt(d)
    assert found.smoothness.value == pytest.approx(2.0, rel=0.02)
    assert found.peers["1"].hessian_gap.value == pytest.approx(1.0, rel=0.02)
    assert found.noise.value == pytest.approx(root, rel=0.02)
    total = found.peers["1"].bias_floor.value ** 2 + found.peers["1"].bias_growth.value * found.gradient.value**2
    assert math.sqrt(total) == pytest.approx(root * math.sqrt(3.0**2 + 3.0**2), rel=0.03)
