"""What a user 0 gains that chooses the size of each batch by what it has seen: the best it can do, step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy import signal, stats

from coterie.privacy.accountant import Event, epsilon_of

STEP, REACH = 0.004, 2000
"""Losses are told apart by so much, up to so many times that."""

LOSSES = STEP * np.arange(-REACH, REACH + 1)
Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def delta_reached(epsilon: float, delta: float, kinds: Sequence[Event], most: int) -> float:
    """Return at least the δ that belongs to ε where all but `most` events, and all beyond ε at δ, are refused.

    An event is of any of these kinds, whichever is best at the loss so far. Losses are rounded
    down.
    """
    chances = [_chances(kind) for kind in kinds]

    @functools.cache
    def best(counts: tuple[int, ...]) -> Row:
        found: Row = np.maximum(0, 1 - np.exp(epsilon - LOSSES))
        for k, chance in enumerate(chances):
            more = tuple(count + (k == other) for other, count in enumerate(counts))
            spent = dict(zip(kinds, more, strict=True))
            if sum(more) <= most and epsilon_of(spent, delta) <= epsilon:
                longer = np.concatenate(
                    [np.zeros(REACH), best(more), np.full(REACH, best(more)[-1])]
                )
                found = np.maximum(found, signal.fftconvolve(longer, chance[::-1], mode="valid"))
        return found

    return float(best((0,) * len(kinds))[REACH])


def _chances(kind: Event) -> Row:
    """Return how likely each loss is where an example is there."""
    x = np.linspace(-10 * kind.noise, 1 + 10 * kind.noise, 40_001)
    ratio = 1 - kind.rate + kind.rate * np.exp((2 * x - 1) / (2 * kind.noise**2))
    mass = stats.norm.pdf(x, scale=kind.noise) * ratio * (x[1] - x[0])
    place = np.floor(np.log(ratio) / STEP).astype(int).clip(-REACH, REACH) + REACH
    return np.bincount(place, mass, 2 * REACH + 1).astype(np.float64)
