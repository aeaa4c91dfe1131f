"""A peer that answers E-steps with a program of its own: it costs user 0 the collaboration, not the model."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from coterie.mixture.answers import EStep
from coterie.mixture.families import SQUARED, Array
from coterie.mixture.fit import fit_here
from coterie.mixture.posterior import Rows

RNG = np.random.default_rng(3)


def _share(value: float) -> Callable[[Array], Array]:
    """Return a lie about the share alone, which all sums are divided by."""
    return lambda honest: np.column_stack([np.full(len(honest), value), honest[:, 1:]])


LIES: dict[str, Callable[[Array], Array]] = {
    "NaN": lambda honest: np.full_like(honest, np.nan),
    "one NaN": lambda honest: np.where(
        np.arange(honest.size).reshape(honest.shape), honest, np.nan
    ),
    "infinite": lambda honest: np.full_like(honest, -np.inf),
    "huge": lambda honest: np.full_like(honest, 1e300),
    "least": lambda honest: np.full_like(honest, -1.0),
    "nothing": np.zeros_like,
    "noise": lambda honest: 2 * RNG.random(size=(*honest.shape,)) - 1,
    "turned round": lambda honest: -honest,
    "share -1": _share(-1.0),
    "share 0": _share(0.0),
    "share 1": _share(1.0),
}


@pytest.mark.parametrize("peers", [1, 2, 6])
@pytest.mark.parametrize("lie", LIES)
def test_a_liar_costs_the_collaboration_at_most(lie: str, peers: int) -> None:
    """Of one liar alone, or beside honest peers: what is served is finite, and hardly worse than Alone."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=4)

    def user(n: int) -> tuple[Array, Array]:
        x = rng.normal(size=(n, 4))
        return x, x @ truth + rng.normal(size=n)

    own, others, (x, y) = user(30), [user(50) for _ in range(peers)], user(2000)
    honest = EStep.answer

    asked: list[int] = []  # whose turn it is, the last first

    def answer(self: EStep, rows: Rows, *args: float | None) -> Array:
        asked.extend(reversed(range(peers)) if not asked else ())
        told = honest(self, rows, *args)
        return LIES[lie](told) if asked.pop() == 0 else told

    with mock.patch.object(EStep, "answer", answer):
        found = fit_here(*own, others, SQUARED)
    alone = fit_here(*own, [], SQUARED)
    inputs = np.column_stack([x, np.ones(len(x))])
    loss, without = (
        float(SQUARED.reported_losses(inputs @ one.served.parameters, y[:, None]).mean())
        for one in (found, alone)
    )
    assert loss < without + 0.1
