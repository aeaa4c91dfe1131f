"""The accountant: what ε everything that was given adds up to.

Dp-accounting's privacy loss distributions.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coterie.arguments import check_fields, real
from coterie.errors import CoterieError, not_installed

INTERVAL = 1e-3
"""How finely privacy losses are told apart.

A coarser interval gives a larger ε, never a smaller one.
"""

LEAST_NOISE, MOST_NOISE = 0.1, 1e6
"""Less noise than this protects nobody, and more is never needed."""

NO_PROMISE = 1000.0
"""A mean privacy loss beyond this is taken for infinite.

Its distribution would not fit into memory.
"""

MAX_KINDS = 16
"""How many kinds of events are added up.

Each costs time, and there is one more with each number of examples.
"""

RATE = real("lie in (0, 1]", lambda value: 0 < value <= 1)
NOISE = real(
    f"be a number from {LEAST_NOISE:g} to {MOST_NOISE:g}, in multiples of `clip`",
    lambda value: LEAST_NOISE <= value <= MOST_NOISE,
)


@dataclass(frozen=True, order=True)
class Event:
    """One private gradient.

    A Poisson sample at a rate, clipped to a norm, with noise in multiples of that norm.

    Example:
        >>> Event(rate=0.01, noise=1.0)
        Event(rate=0.01, noise=1.0)
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        check_fields(self, {"rate": RATE, "noise": NOISE})


def epsilon_of(events: Mapping[Event, int], delta: float) -> float:
    """Return the ε that so many of these events amount to, at this δ.

    An example is there or it is not.

    Example:
        >>> round(epsilon_of({Event(rate=0.01, noise=1.0): 1000}, delta=1e-5), 2)
        1.83
    """
    return _epsilon(tuple(sorted((event, n) for event, n in events.items() if n)), delta)


@lru_cache(maxsize=256)
def _epsilon(events: tuple[tuple[Event, int], ...], delta: float) -> float:
    if not events:
        return 0.0
    if sum(n * (event.rate / event.noise) ** 2 / 2 for event, n in events) > NO_PROMISE:
        return math.inf
    accounting, pld = dp_accounting_packages()
    # neighbours differ by one example
    accountant = pld.PLDAccountant(value_discretization_interval=INTERVAL)
    for event, n in events:
        gaussian = accounting.GaussianDpEvent(event.noise)
        sampled = (
            accounting.PoissonSampledDpEvent(event.rate, gaussian) if event.rate < 1 else gaussian
        )
        accountant.compose(sampled, n)
    return float(accountant.get_epsilon(delta))


def merged(events: Mapping[Event, int], most: int = MAX_KINDS) -> Counter[Event]:
    """Return events of at most so many kinds that cost at least as much.

    Those of the nearest rates become alike.

    A larger rate costs more, and so does less noise.

    Example:
        >>> merged({Event(0.1, 1.0): 5, Event(0.11, 2.0): 3, Event(0.5, 1.0): 1}, most=2)
        Counter({Event(rate=0.11, noise=1.0): 8, Event(rate=0.5, noise=1.0): 1})
    """
    kinds = sorted(events.items())
    while len(kinds) > most:
        place = min(range(1, len(kinds)), key=lambda k: kinds[k][0].rate / kinds[k - 1][0].rate)
        (low, n), (high, m) = kinds[place - 1 : place + 1]
        kinds[place - 1 : place + 1] = [(Event(high.rate, min(low.noise, high.noise)), n + m)]
    found = Counter[Event]()
    for event, n in kinds:
        found[event] += n
    return found


@lru_cache(maxsize=64)
def least_noise(rate: float, count: int, epsilon: float, delta: float) -> float:
    """Return the least noise, to a hundredth of it, with which so many events cost at most ε.

    Example:
        >>> noise = least_noise(rate=0.1, count=100, epsilon=2.0, delta=1e-5)
        >>> 1.9 < epsilon_of({Event(0.1, noise): 100}, delta=1e-5) <= 2.0
        True
    """

    def fits(noise: float) -> bool:
        return epsilon_of({Event(rate, noise): count}, delta) <= epsilon

    low, high = LEAST_NOISE, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise CoterieError(
                f"no noise lets `epsilon` = {epsilon:g} last for {count} gradients at the rate"
                f" {rate:g}; give fewer"
            )
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


class Budget:
    """An ε and a δ, and what may still be given of them.

    To ask the accountant at every step would take longer than the step. So it is asked about twice
    as many events, and again when those are spent; near the end about the exact number.

    Example:
        >>> budget, event = Budget(epsilon=1.0, delta=1e-5), Event(rate=0.01, noise=1.0)
        >>> budget.most({}, event, at_least=1), budget.most({}, event, at_least=1000) < 1000
        (2, True)
        >>> budget.most({event: 1000}, Event(rate=0.02, noise=1.0), at_least=1)
        0
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta
        self._known: dict[Any, tuple[int, int | None]] = {}

    def most(self, spent: Mapping[Event, int], event: Event, at_least: int) -> int:
        """Return how many of these events the budget allows beside what else was spent, as far as must be known.

        That is `at_least` or more where so many are allowed, and the exact number where they are
        not.
        """
        others = {other: n for other, n in spent.items() if other != event}
        key = frozenset(others.items()), event
        safe, unsafe = self._known.get(key, (0, None))
        while safe < at_least and (unsafe is None or unsafe > safe + 1):
            tried = 2 * at_least if unsafe is None else (safe + unsafe) // 2
            fits = epsilon_of({**others, event: tried}, self.delta) <= self.epsilon
            safe, unsafe = (tried, unsafe) if fits else (safe, tried)
        self._known[key] = safe, unsafe
        return safe


def dp_accounting_packages() -> tuple[Any, Any]:
    """Return the package and its privacy loss distributions."""
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise CoterieError(not_installed("dp-accounting", "privacy")) from error
    return dp_accounting, pld
