"""Strategies for constants of the theory, weights and horizons."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from coterie import theory
from coterie.theory import Constants

positive = st.floats(0.1, 10)
weight = st.floats(0.01, 0.99)
horizon = st.integers(2, 10_000)


@st.composite
def problems(draw: st.DrawFn, *, growing: bool = False) -> Constants:
    smoothness = draw(positive)
    return Constants(
        smoothness=smoothness,
        pl=smoothness * draw(st.floats(0.01, 1)),
        initial_gap=draw(positive),
        noise=draw(positive),
        n_peers=float(draw(st.integers(1, 100))),
        peer_noise=draw(positive),
        bias_floor=draw(st.one_of(st.just(0.0), positive)),
        bias_growth=draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        hessian_gap=draw(st.one_of(st.just(0.0), positive)),
        noise_growth=draw(positive) if growing else 0.0,
        peer_noise_growth=draw(positive) if growing else 0.0,
    )


def some_lr(problem: Constants, alpha: float) -> Any:
    return 0.3 * np.minimum(
        theory.averaging(problem, alpha).max_lr, theory.correction_max_lr(problem, alpha, 0.5)
    )


GOOD: dict[str, Any] = {"smoothness": 1, "pl": 0.5, "initial_gap": 1, "noise": 1}
