"""Inconsistent constants and knobs are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.constants import GOOD

from coterie import theory
from coterie.errors import KnobError
from coterie.theory import Constants


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pl": 2}, "`pl` must not exceed `smoothness`, got pl = 2 and smoothness = 1"),
        ({"pl": [0.5, 3], "smoothness": [1, 2]}, "got pl = 3 and smoothness = 2"),
        ({"noise": -1}, "`noise` must not be negative, got -1"),
        ({"peer_noise": -0.5}, "`peer_noise` must not be negative, got -0.5"),
        ({"bias_floor": -2}, "`bias_floor` must not be negative, got -2"),
        ({"smoothness": 0, "pl": 0}, "`smoothness` must be positive, got 0"),
        ({"initial_gap": 0}, "`initial_gap` must be positive, got 0"),
        ({"n_peers": 0}, "`n_peers` must be at least 1, got 0"),
        ({"hessian_gap": np.inf}, "`hessian_gap` must be finite, got inf"),
        ({"noise": "loud"}, "`noise` must be a number, got 'loud'"),
    ],
)
def test_inconsistent_constants_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        Constants(**(GOOD | wrong))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda p: theory.averaging(p, 0.6),
            "`alpha` must be below 1/√m.* got 0.6; take less than 0.5",
        ),
        (lambda p: theory.averaging(p, 1.2), r"`alpha` must lie in \[0, 1\], got 1.2"),
        (
            lambda p: theory.best_tau(p, 0.6, 9, peer_noise=[1], bias_floor=[1]),
            "`alpha` must be below 1/√m",
        ),
        (
            lambda p: theory.alone(p).loss_bound(1.5, 10),
            "`lr` must not exceed `max_lr`, got 1.5; take at most 1",
        ),
        (lambda p: theory.alone(p).loss_bound(-1, 10), "`lr` must not be negative, got -1"),
        (lambda p: theory.alone(p).gradient_bound(0, 10), "`lr` must be positive, got 0"),
        (lambda p: theory.alone(p).loss_bound(1, 0), "`steps` must be at least 1, got 0"),
        (lambda p: theory.alone(replace(p, pl=0)).loss_bound(1, 9), "`pl` must be positive"),
        (lambda p: theory.best_alpha(replace(p, pl=0), 9), "`pl` must be positive"),
        (lambda p: theory.oracle(p, 0.5, -1), "`oracle_noise` must not be negative, got -1"),
        (
            lambda p: theory.correction_bound(p, 0.5, 0.0, 0.1, 9),
            r"`beta` must lie in \(0, 1\], got 0",
        ),
        (
            lambda p: theory.correction_bound(p, 0.5, 0.01, 0.1, 9),
            "`beta` must exceed √8·αδη, got 0.01",
        ),
        (
            lambda p: theory.correction_bound(p, 0.5, 0.5, 2, 9),
            "`lr` must not exceed 1/L, got 2; take 1",
        ),
        (lambda p: theory.best_beta(p, 1, 0.9, 9), r"`lr` must lie in \(0, .* got 0.9; take 0.333"),
        (
            lambda p: theory.best_correction(replace(p, noise_growth=1), 9),
            "`noise_growth` must be 0 here, got 1",
        ),
        (
            lambda p: theory.best_correction(p, 9, initial_error=-1),
            "`initial_error` must not be negative, got -1",
        ),
        (lambda p: theory.hessian_gap_limit(p, 0, 0.1), "`alpha` must be positive here, got 0"),
        (
            lambda p: Constants.from_peers(
                smoothness=1, initial_gap=1, noise=1, tau=[1, 1], peer_noise=[1, 1]
            ),
            "`tau` must sum to 1, got 2; divide",
        ),
    ],
)
def test_wrong_knobs_are_named(act: Callable[[Constants], Any], message: str) -> None:
    problem = Constants(**GOOD, bias_growth=4, hessian_gap=1)
    with pytest.raises(KnobError, match=message):
        act(problem)
