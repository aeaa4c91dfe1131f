"""Other accountants: the exact ε of a Gaussian, Microsoft's `prv_accountant`, and Rényi divergences."""

from __future__ import annotations

import math
from collections.abc import Mapping

import dp_accounting
from dp_accounting import rdp
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.privacy.accountant import Event


def exact_gaussian(noise: float, count: int, delta: float) -> float:
    """Return the ε of Gaussian noise without sampling (Balle and Wang 2018): many are one of less noise."""
    mu = math.sqrt(count) / noise

    def excess(epsilon: float) -> float:
        gained = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        return float(gained) - delta

    return float(brentq(excess, 0, 500))


def by_prv(rate: float, noise: float, count: int, delta: float) -> float:
    """Return the ε of sampled Gaussians by Microsoft's accountant (Gopi, Lee and Wutschitz 2021)."""
    sampled = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
    accountant = PRVAccountant(
        [sampled], max_self_compositions=[count], eps_error=0.005, delta_error=delta / 1000
    )
    _, estimate, _ = accountant.compute_epsilon(delta, [count])
    return float(estimate)


def by_renyi(events: Mapping[Event, int], delta: float) -> float:
    """Return the ε of sampled Gaussians by their Rényi divergences (Mironov, Talwar and Zhang 2019)."""
    accountant = rdp.RdpAccountant()
    for event, count in events.items():
        gaussian = dp_accounting.GaussianDpEvent(event.noise)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(event.rate, gaussian), count)
    return float(accountant.get_epsilon(delta))
