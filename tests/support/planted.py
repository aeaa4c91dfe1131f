"""Noisy quadratics whose constants are known, and their estimates."""

from __future__ import annotations

import numpy as np
import torch

from coterie.choosing.measuring import measure
from coterie.theory.estimates import Estimates, Measured
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

D = 60


def measured(problem: NoisyQuadratic, seed: int = 0) -> Estimates:
    """Return the constants measured at the start."""
    return measure(problem.engine(seed), torch.tensor(problem.vector(problem.x0)))


def within(estimate: Measured, truth: float, errors: float = 4.0) -> bool:
    """Say whether the truth is within some standard errors."""
    return abs(estimate.value - truth) <= errors * estimate.error + 1e-9


def spread(*values: float) -> list[float]:
    """Return the values again and again, one a coordinate."""
    return list(np.resize(values, D))


PLANTED = NoisyQuadratic(
    Quadratic(2.0, spread(0.0), noise=1.0),
    [
        Quadratic(2.0, spread(0.0), noise=0.5),
        Quadratic(2.0, spread(1.0, -1.0), noise=1.0),
        Quadratic(5.0, spread(0.0), noise=2.0),
    ],
    x0=spread(3.0, 3.0),
)
"""A copy, one with a constant bias, one with another curvature. x0 is orthogonal to the shift."""
