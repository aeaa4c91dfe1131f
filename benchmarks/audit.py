"""A statistical audit of a private peer: how well one who sees its gradients tells whether a canary is in it.

    python benchmarks/audit.py [--runs 1000]        # a minute

A canary's gradient is as large as the clip allows, and in a direction that no other example has:
none is easier to find. A peer holds 96 canaries, each in a direction of its own; in 96 more there
is none. Examples are sampled and noise is added to numbers one by one, so that each direction is a
run that knows nothing of the others: with its canary, or without. Sampling, clipping and noise are
those of a private peer (`PrivateGradients`).

Of each run, of one step or of 50, the attacker takes the likelihood ratio, which nothing beats.
Half of the runs choose a threshold; of the other half, the shares of runs with and without a canary
that are beyond it give ε ≥ log((with − δ) / without), both shares bounded at 95 % together (Clopper
and Pearson 1934). The bound must be below the ε that is stated, and is to be above a tenth of it:
else the audit could not fail. That it can is seen in the last cases: half of the noise, half of the
clipping, a sample that is no sample.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.stats import beta
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event, epsilon_of

Ratios: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
N, DELTA, CLIP = 96, 1e-2, 1.0


@dataclass(frozen=True)
class Case:
    """What is stated: so many gradients of this kind. And what is done, where that is something else."""

    event: Event
    steps: int
    done: Event | None = None
    clip: float = CLIP

    @property
    def stated(self) -> float:
        """The ε that is stated."""
        return epsilon_of({self.event: self.steps}, DELTA)


ONE, FIFTY = Case(Event(1.0, 1.0), 1), Case(Event(0.25, 2.0), 50)
HONEST = {
    "1 step, all examples": ONE,
    "1 step, half of them": Case(Event(0.5, 0.8), 1),
    "50 steps, a quarter": FIFTY,
}
CHEATS = {
    "1 step, half of the noise": replace(ONE, done=Event(1.0, 0.5)),
    "1 step, clipped to twice the norm": replace(ONE, clip=2 * CLIP, done=Event(1.0, 0.5)),
    "50 steps, half of the noise": replace(FIFTY, done=Event(0.25, 1.0)),
    "50 steps, no sample": replace(FIFTY, done=Event(1.0, 2.0)),
}


def ratios(case: Case, runs: int) -> tuple[Ratios, Ratios]:
    """Return the logarithms of the likelihood ratios of so many runs with a canary, and of as many without."""
    passes = Passes(nn.Linear(2 * N, 1, bias=False), nn.functional.mse_loss)
    held = coterie.User("a", 5 * torch.eye(N, 2 * N), torch.ones(N, 1))
    private = PrivateGradients(held, passes, Privacy(1.0, DELTA, case.clip, case.event.noise), None)
    x, event = torch.zeros(2 * N), case.done or case.event
    rate, noise, by_event = case.event.rate, case.event.noise, []
    for _ in range(-(-runs // N)):
        given = torch.stack([private.gradient(x, event=event) for _ in range(case.steps)])
        # 1 and noise where a canary was sampled
        sums = given.double().numpy() * -event.rate * N / CLIP
        by_event.append(np.log1p(rate * np.expm1((sums - 0.5) / noise**2)).sum(0))
    with_it, without = np.split(np.array(by_event), 2, axis=1)
    return with_it.ravel(), without.ravel()


def lower_bound(with_it: Ratios, without: Ratios, confidence: float = 0.95) -> float:
    """Return the ε that is exceeded at this confidence, by ratios of runs with the canary and of as many without.

    Example:
        >>> ones = np.ones(1000)
        >>> lower_bound(ones, 0 * ones) > 4, lower_bound(ones, ones)
        (True, 0.0)
    """
    (first_in, last_in), (first_out, last_out) = (
        each.reshape(2, -1) for each in (with_it, without)
    )
    thresholds = np.quantile(np.concatenate([first_in, first_out]), np.linspace(0.01, 0.99, 99))
    tests = [(threshold, sign) for threshold in thresholds for sign in (1, -1)]
    bounds = [_bound(first_in, first_out, *test, confidence) for test in tests]
    return max(0.0, _bound(last_in, last_out, *tests[int(np.argmax(bounds))], confidence))


def _bound(
    with_it: Ratios, without: Ratios, threshold: float, sign: int, confidence: float
) -> float:
    """Return the bound by one threshold; the sign −1 is that of a test for who is not there."""
    if sign < 0:
        with_it, without = -without, -with_it
    hits, mistakes, runs = (
        int((with_it > sign * threshold).sum()),
        int((without > sign * threshold).sum()),
        len(with_it),
    )
    each = (1 - confidence) / 2
    least = beta.ppf(each, hits, runs - hits + 1) if hits else 0.0
    most = beta.ppf(1 - each, mistakes + 1, runs - mistakes) if mistakes < runs else 1.0
    return math.log((least - DELTA) / most) if least > DELTA else -math.inf


def audited(case: Case, runs: int, confidence: float = 0.95) -> float:
    """Return the lower bound on ε of so many runs with the canary and as many without."""
    return lower_bound(*ratios(case, runs), confidence)


def main() -> None:
    """Print the bound of every case beside what is stated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| case | ε stated | ε at least, by the audit | |\n|---|---|---|---|")
    for name, case in (HONEST | CHEATS).items():
        bound = audited(case, options.runs)
        verdict = (
            "exceeded"
            if bound > case.stated
            else "within"
            if bound > case.stated / 10
            else "not found"
        )
        print(f"| {name} | {case.stated:.2f} | {bound:.2f} | {verdict} |")


if __name__ == "__main__":
    main()
