"""Everything the theory returns answers as it should to other units of f and x, and broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.support.constants import horizon, problems, some_lr, weight

from coterie import theory
from coterie.theory import Constants

# How each constant answers to f → s·f and x → r·x, as powers of (s, r).
UNITS = {
    "smoothness": (1, -2),
    "pl": (1, -2),
    "hessian_gap": (1, -2),
    "initial_gap": (1, 0),
    "noise": (1, -1),
    "peer_noise": (1, -1),
    "bias_floor": (1, -1),
    "n_peers": (0, 0),
    "bias_growth": (0, 0),
    "noise_growth": (0, 0),
    "peer_noise_growth": (0, 0),
    "diameter": (0, 1),
    "drift_noise": (1, -1),
    "largest_hessian_gap": (1, -2),
}
NUMBER, LOSS, SQUARED_GRADIENT, STEP, CURVATURE = (0, 0), (1, 0), (2, -2), (-1, 2), (1, -2)


def rescaled(problem: Constants, s: float, r: float) -> Constants:
    given = {name: units for name, units in UNITS.items() if getattr(problem, name) is not None}
    return replace(
        problem, **{name: getattr(problem, name) * s**f * r**x for name, (f, x) in given.items()}
    )


Quantity = Callable[[Constants, float, int], Any]
QUANTITIES: dict[str, tuple[Quantity, tuple[int, int]]] = {
    "averaging, gradient": (
        lambda p, a, t: theory.averaging(p, a).gradient_bound(some_lr(p, a), t),
        SQUARED_GRADIENT,
    ),
    "averaging, loss": (lambda p, a, t: theory.averaging(p, a).loss_bound(some_lr(p, a), t), LOSS),
    "averaging, decreasing": (lambda p, a, t: theory.averaging(p, a).decreasing_bound(t), LOSS),
    "oracle, gradient": (
        lambda p, a, t: theory.oracle(p, a, p.noise).gradient_bound(some_lr(p, a), t),
        SQUARED_GRADIENT,
    ),
    "oracle, loss": (
        lambda p, a, t: theory.oracle(p, a, p.noise).loss_bound(some_lr(p, a), t),
        LOSS,
    ),
    "oracle, decreasing": (lambda p, a, t: theory.oracle(p, a, p.noise).decreasing_bound(t), LOSS),
    "largest step": (lambda p, a, t: theory.averaging(p, a).max_lr, STEP),
    "best step, gradient": (lambda p, a, t: theory.averaging(p, a).best_gradient_lr(t), STEP),
    "best step, loss": (lambda p, a, t: theory.averaging(p, a).best_loss_lr(t), STEP),
    "decreasing steps": (lambda p, a, t: theory.averaging(p, a).decreasing_lr(t), STEP),
    "final A5": (
        lambda p, a, t: replace(p, diameter=p.initial_gap / p.noise).variance(a),
        SQUARED_GRADIENT,
    ),
    "averaging cost": (theory.averaging_cost, LOSS),
    "best alpha": (lambda p, a, t: theory.best_alpha(p, t), NUMBER),
    "least noise alpha": (lambda p, a, t: theory.least_noise_alpha(p, p.noise), NUMBER),
    "averaging speedup": (lambda p, a, t: theory.averaging_speedup(p, t), NUMBER),
    "oracle speedup": (lambda p, a, t: theory.oracle_speedup(p, p.noise), NUMBER),
    "best tau": (
        lambda p, a, t: theory.best_tau(
            p,
            a,
            t,
            peer_noise=p.noise * np.array([1, 2, 3]),
            bias_floor=p.bias_floor * np.array([0.3, 0.2, 0.1]),
        ),
        NUMBER,
    ),
}
BOUNDED_NOISE: dict[str, tuple[Quantity, tuple[int, int]]] = {
    "correction": (
        lambda p, a, t: theory.correction_bound(p, a, 0.5, some_lr(p, a), t),
        SQUARED_GRADIENT,
    ),
    "correction, largest step": (lambda p, a, t: theory.correction_max_lr(p, a, 0.1), STEP),
    "correction, best bound": (
        lambda p, a, t: theory.best_correction(p, t).bound,
        SQUARED_GRADIENT,
    ),
    "Hessian gap": (lambda p, a, t: theory.hessian_gap_limit(p, a, some_lr(p, a)), CURVATURE),
    "local work": (
        lambda p, a, t: theory.local_bound(
            replace(p, drift_noise=p.noise, largest_hessian_gap=2 * p.hessian_gap),
            a,
            some_lr(p, a) / 40,
            t,
            3,
        ),
        SQUARED_GRADIENT,
    ),
    "steps alone": (lambda p, a, t: theory.steps_alone(p, p.noise**2 / 7), NUMBER),
}


def assert_invariant(
    quantity: Quantity, units: tuple[int, int], problem: Constants, alpha: float, steps: int
) -> None:
    before = np.asarray(quantity(problem, alpha, steps))
    for s, r in ((1e3, 1.0), (1.0, 1e3), (0.07, 13.0)):
        after = np.asarray(quantity(rescaled(problem, s, r), alpha, steps))
        np.testing.assert_allclose(after, before * s ** units[0] * r ** units[1], rtol=1e-7)


@pytest.mark.parametrize("name", QUANTITIES)
@given(problem=problems(growing=True), alpha=weight, steps=horizon)
def test_everything_is_invariant_to_units(
    name: str, problem: Constants, alpha: float, steps: int
) -> None:
    assert_invariant(*QUANTITIES[name], problem, alpha, steps)


@pytest.mark.parametrize("name", BOUNDED_NOISE)
@given(problem=problems(), alpha=weight, steps=horizon)
def test_everything_about_correction_is_invariant_to_units(
    name: str, problem: Constants, alpha: float, steps: int
) -> None:
    assert_invariant(*BOUNDED_NOISE[name], problem, alpha, steps)


def test_the_printed_condition_on_delta_is_not_invariant() -> None:
    """δ² ≪ L³σ⁶(α)η/(σ_0² + σ_a²)² has the units of δ² times a squared gradient."""
    problem, alpha = Constants(smoothness=1, initial_gap=1, noise=1, peer_noise=1, n_peers=9), 0.9

    def printed(p: Constants) -> Any:
        spread = p.noise**2 + p.peer_variance
        return np.sqrt(p.smoothness**3 * p.variance(alpha) ** 3 * some_lr(p, alpha)) / spread

    with pytest.raises(AssertionError, match="Not equal"):
        assert_invariant(lambda p, a, t: printed(p), CURVATURE, problem, alpha, 10)


def test_everything_broadcasts() -> None:
    problem = Constants(
        smoothness=1,
        pl=np.array([0.1, 0.5])[:, None],
        initial_gap=1,
        noise=np.array([0.5, 1, 2]),
        n_peers=4,
        bias_floor=0.1,
        hessian_gap=0.2,
    )
    together = theory.plan(problem, 1000)
    for i, j in np.ndindex(2, 3):
        alone = replace(problem, pl=problem.pl[i, 0], noise=problem.noise[j])  # type: ignore[index]
        for name, choice in theory.plan(alone, 1000).items():
            for field in fields(choice):
                value = getattr(together[name], field.name)
                expected = getattr(choice, field.name)
                if expected is not None:
                    assert np.broadcast_to(value, (2, 3))[i, j] == pytest.approx(expected), (
                        name,
                        field.name,
                    )
