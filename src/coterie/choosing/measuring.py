"""Measure the theory's constants from gradients: a few batches, each at two points.

With one batch at both points its noise cancels in the difference, which shows curvature (L, δ_k). Of two batches
the noises are independent, so that products of their gradients show the bias without the noise (ζ_k).
What such numbers can and cannot tell: docs/estimates.md.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.choosing.gradient_squares import SampledGradients, sample_gradients, squares
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.theory.estimates import Estimates, Measured, PeerEstimates

Array = NDArray[np.float64]

BATCHES = 4
"""How many batches are drawn, each of them used at two points: eight passes that give every peer's gradient."""

REACH = 0.25
"""How far the second point is, in steps of the length that would bring a linear loss to zero."""


@dataclass(frozen=True)
class Sampling:
    """How a user's batches are drawn."""

    size: float = 1.0  # examples in a batch, while measuring
    of: float = math.inf  # examples that there are; infinite for fresh samples
    in_run: float | None = None  # examples in a batch of the run; as `size` when None


def measure(
    engine: Engine,
    x: Tensor,
    *,
    own: Sampling | None = None,
    peers: Mapping[str, Sampling] | None = None,
    batches: int = BATCHES,
) -> Estimates:
    """Measure the constants from gradients at x and at a point a little downhill.

        σ_k² = variance of g_k(x) over batches
        ζ_k² = mean over pairs of batches t ≠ s of ⟨y_t, y_s⟩,   y = g_k(x) − g_0(x)
        δ_k² = the same of [g_k(x + u) − g_k(x)] − [g_0(x + u) − g_0(x)],  over ‖u‖²;   L² of g_0(x + u) − g_0(x)
        m_k  = the fall of ζ_k² over that of ‖∇f_0‖² from x to x + u, which then is taken off ζ_k²

    Negative squares count as 0. Two batches of the same n examples are not independent as samples of all there
    could be; what the examples' own noise adds to a square, their variance over n, is taken off. Errors are
    jackknife estimates over the batches.

    Args:
        engine: where the gradients come from; every peer's is asked for.
        x: the point.
        own: how user 0's batches are drawn; fresh when None.
        peers: how each peer's are, by name; fresh where it is not in it.
        batches: how many, at least 3; steps 0, 1, … of the run.

    Example:
        >>> import torch
        >>> from coterie.theory.quadratic import NoisyQuadratic, Quadratic
        >>> alike, stranger = Quadratic(2, 1, noise=0.1), Quadratic(5, 1, noise=0.2)
        >>> problem = NoisyQuadratic(Quadratic(2, [1] * 50, noise=0.1), [alike, stranger], x0=4)
        >>> measured = measure(problem.engine(), torch.full((50,), 4.0))
        >>> print(f"L = {measured.smoothness.value:.2f}, σ = {measured.noise.value:.1f}, μ = {measured.pl:.2f}")
        L = 2.00, σ = 0.7, μ = 2.00
        >>> [round(peer.hessian_gap.value, 2) for peer in measured.peers.values()]
        [0.0, 3.0]
    """
    if batches < 3:
        raise DataError(f"`batches` must be at least 3, got {batches}: with fewer nothing is known of the errors")
    sampled = sample_gradients(engine, x, batches, REACH)
    users = [own or Sampling(), *((peers or {}).get(name, Sampling()) for name in sampled.names)]
    size, of, in_run = np.array([[user.size, user.of, user.in_run or user.size] for user in users]).T
    measured = squares(sampled, size, of)
    parts = [squares(sampled.without(batch), size, of) for batch in range(batches)]
    errors = {name: np.sqrt((batches - 1) * np.var([one[name] for one in parts], axis=0)) for name in measured}
    for squared in (measured, errors):
        squared["noise"] = squared["each"] / in_run
    return _estimates(sampled, measured, errors, in_run / of)


def before_training(engine: Engine, problem: RunSpec) -> Estimates:
    """Measure at the point where training starts, and leave model and engine as they were.

    In this process the numbers of examples are known, and batches are at most half of user 0's examples, since all
    of them would show no noise. Another engine is taken to draw fresh samples.
    """
    x = Parameters(problem.model).vector()
    can = engine.capabilities
    if not can.local:
        with _kept(problem.model):
            return measure(engine, x)
    here, in_run = require(engine, "local", "measuring"), can.batch_size or problem.batch_size
    size = in_run if can.batch_dependent else max(2, min(in_run, len(here.users[problem.me.name]) // 2))

    def sampling(name: str) -> Sampling:
        n = len(here.users[name])
        return Sampling(min(size, n), math.inf if can.examples[name] is None else n, min(in_run, n))

    peers = {name: sampling(name) for name in engine.names}
    with _kept(problem.model):
        return measure(here.with_batch_size(size), x, own=sampling(problem.me.name), peers=peers)


def _estimates(
    sampled: SampledGradients, measured: Mapping[str, Array], errors: Mapping[str, Array], share: Array
) -> Estimates:
    grows = measured["growth"] > 2 * errors["growth"]
    growth = np.where(grows, measured["growth"], 0.0)
    floor, floor_error = (np.where(grows, one["floor"], one["bias"]) for one in (measured, errors))
    smoothness = _root(measured["smoothness"], errors["smoothness"])
    if not smoothness.value > 0:
        raise DataError("user 0's gradient is the same at both points: no curvature to measure by")
    noise = [_root(*pair) for pair in zip(measured["noise"], errors["noise"], strict=True)]
    pl = float(measured["pl"])
    peers = {
        name: PeerEstimates(
            noise=noise[1 + k],
            bias_floor=_root(floor[k], floor_error[k]),
            bias_growth=Measured(float(growth[k]), float(errors["growth"][k])),
            hessian_gap=_root(measured["gap"][k], errors["gap"][k]),
            share=float(share[1 + k]),
        )
        for k, name in enumerate(sampled.names)
    }
    return Estimates(
        loss=float(measured["loss"]),
        gradient=_root(measured["gradient"], errors["gradient"]),
        noise=noise[0],
        smoothness=smoothness,
        pl=min(pl, smoothness.value) if pl > 0 else smoothness.value,
        peers=peers,
        left_out=sampled.left_out,
        share=float(share[0]),
        batches=sampled.losses.shape[1],
    )


def _root(square: Any, error: Any) -> Measured:
    """Return the root of a square that noise may have made negative, and its error."""
    kept = max(float(square), 0.0)
    return Measured(math.sqrt(kept), math.sqrt(kept + float(error)) - math.sqrt(kept))


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Leave the model's buffers as they were."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
