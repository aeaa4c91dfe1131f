"""Two other accountants: the exact ε of a Gaussian, and losses added up by a Fourier transform."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm


def exact_gaussian(noise: float, count: int, delta: float) -> float:
    """Return the ε of Gaussian noise without sampling (Balle and Wang 2018): many are one of less noise."""
    mu = math.sqrt(count) / noise

    def excess(epsilon: float) -> float:
        gained = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        return float(gained) - delta

    return float(brentq(excess, 0, 500))


def added_up(rate: float, noise: float, count: int, delta: float) -> float:
    """Return the ε of sampled Gaussians: the privacy loss's distribution on a grid, to the power of `count`."""
    width, spacing = 2**17, 4e-4
    grid = (np.arange(width) - width // 2) * spacing
    x = np.linspace(-12 * noise, 12 * noise + 1, 400_001)
    without, with_it = norm.pdf(x, 0, noise), (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)
    largest = 0.0
    for one, other in ((with_it, without), (without, with_it)):
        losses = np.log(one / other)
        places = np.clip(np.rint(losses / spacing) + width // 2, 0, width - 1).astype(int)
        mass = np.bincount(places, weights=one / one.sum(), minlength=width)
        total = np.fft.fftshift(np.fft.irfft(np.fft.rfft(np.fft.ifftshift(mass)) ** count, width)).clip(0)

        def excess(epsilon: float, total: np.ndarray = total) -> float:
            above = grid > epsilon
            return float(total[above] @ -np.expm1(epsilon - grid[above])) - delta

        largest = max(largest, float(brentq(excess, 0, 20)))
    return largest
