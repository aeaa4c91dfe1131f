"""Knobs that are "auto": the theory's choice for the constants measured before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.optim import SGD, Optimizer

from coterie import theory
from coterie.choosing.estimates import Estimates, before_training
from coterie.errors import DataError

if TYPE_CHECKING:
    from coterie.engines.engine import Engine
    from coterie.learners.spec import Problem


def averaging(problem: Problem, engine: Engine, tau: Mapping[str, float] | None) -> dict[str, Any]:
    """Choose α of weighted averaging, and τ where it is None, by `theory.best_averaging`."""
    try:
        found = before_training(engine, problem)
    except DataError as error:
        return _nothing(error)
    names, peers = list(found.peers), found.constants(problem.steps)
    alpha, weights, _ = theory.best_averaging(peers, problem.steps, _over(names, tau))
    gain = float(theory.averaging_speedup(peers.constants(weights), problem.steps, alpha))
    return _choice(found, {"alpha": alpha}, weights, gain)


def correction(
    problem: Problem,
    engine: Engine,
    tau: Mapping[str, float] | None,
    *,
    alpha: float | None,
    beta: float | None,
    warm_up: bool,
) -> dict[str, Any]:
    """Choose the knobs of bias correction that are None by `theory.best_corrected_peers`.

    Args:
        problem: what is to be trained; the step size of SGD is η, any other optimizer's is of another kind.
        engine: where the gradients come from.
        tau: τ; the peers of small δ_k, equally, when None.
        alpha: α.
        beta: β.
        warm_up: whether c_t is at first the mean of the biases seen, and its start costs nothing that β could save.
    """
    try:
        found = before_training(engine, problem)
    except DataError as error:
        return _nothing(error)
    names, peers = list(found.peers), found.constants(problem.steps)
    weights, knobs = theory.best_corrected_peers(
        peers,
        problem.steps,
        alpha=alpha,
        lr=_rate(problem.optimizer),
        tau=_over(names, tau),
        initial_error=0.0 if warm_up else None,
    )
    gain = float(theory.steps_alone(peers.constants(weights), knobs.bound)) / problem.steps
    chosen = {"alpha": float(knobs.alpha), "beta": float(knobs.beta) if beta is None else beta}
    return _choice(found, chosen, weights, gain)


def _rate(optimizer: Optimizer) -> float | None:
    """Return η where the optimizer is SGD, momentum counted in; the theory's best will do for any other."""
    rates = [group["lr"] / (1 - group["momentum"]) for group in optimizer.param_groups if "momentum" in group]
    return float(max(rates)) if isinstance(optimizer, SGD) and max(rates) > 0 else None


def _over(names: Sequence[str], tau: Mapping[str, float] | None) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return τ over the peers that could be measured."""
    if tau is None:
        return None
    weights = np.array([tau.get(name, 0.0) for name in names])
    if not weights.any():
        raise DataError("no peer that has weight in `tau` could be measured")
    return np.asarray(weights / weights.sum())


def _choice(
    found: Estimates, knobs: dict[str, float], tau: np.ndarray[Any, np.dtype[np.float64]], gain: float
) -> dict[str, Any]:
    kept = {name: float(weight) for name, weight in zip(found.peers, tau, strict=True) if weight > 0}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in knobs.items())
    return {
        "regime": "the theory's choice for the constants measured at the start",
        **knobs,
        "tau": kept,
        "estimates": found.plain(),
        "left_out": dict(found.left_out),
        "sentence": f"{shown} for {len(kept)} peers by the theory and measured constants: its bound gives "
        f"{gain:.3g} times the speed of training alone",
    }


def _nothing(error: DataError) -> dict[str, Any]:
    return {"alpha": 0.0, "beta": 0.0, "tau": {}, "sentence": f"peers weigh nothing: not measured, {error}"}
