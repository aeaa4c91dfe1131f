"""Measure the theory's constants from gradients: a few batches, each at two points.

With one batch at both points its noise cancels in the difference, which shows curvature (L, δ_k). Of two batches
the noises are independent, so that products of their gradients show the bias without the noise (ζ_k).
What such numbers can and cannot tell: docs/estimates.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.choosing.gradient_squares import Seen, look, squares
from coterie.engines.in_process.engine import InProcess
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters
from coterie.theory import Peers

if TYPE_CHECKING:
    from coterie.engines.engine import Engine
    from coterie.learners.spec import Problem

Array = NDArray[np.float64]

BATCHES = 4
"""How many batches are drawn, each of them used at two points: eight passes that give every peer's gradient."""

REACH = 0.25
"""How far the second point is, in steps of the length that would bring a linear loss to zero."""


class Measured(NamedTuple):
    """A number and its standard error over the batches."""

    value: float
    error: float


@dataclass(frozen=True)
class PeerEstimates:
    """What was measured of a peer.

    Args:
        noise: σ_k of one batch, as a sample of all examples there could be.
        bias_floor: ζ_k.
        bias_growth: m_k; 0 where it is not clear of its error.
        hessian_gap: δ_k along the path.
        share: how much of the peer's examples a batch is; 0 for fresh samples.
    """

    noise: Measured
    bias_floor: Measured
    bias_growth: Measured
    hessian_gap: Measured
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The constants of a problem, measured.

    Args:
        loss: of user 0 at the start, which stands for F_0: the least loss is taken to be 0.
        gradient: ‖∇f_0‖ at the start.
        noise: σ_0 of one batch, as a sample of all examples there could be.
        smoothness: L along the path, no more than the true one.
        pl: μ, the least ‖∇f_0‖²/(2f_0) at the two points, no less than the true one if the least loss is 0; L where
            the gradient is not clear of the noise.
        peers: by name.
        left_out: the peers that could not be measured, each with the reason.
        share: how much of user 0's examples a batch is; 0 for fresh samples.
        batches: how many batches were drawn.
    """

    loss: float
    gradient: Measured
    noise: Measured
    smoothness: Measured
    pl: float
    peers: Mapping[str, PeerEstimates]
    left_out: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.0
    batches: int = BATCHES

    def constants(self, steps: int) -> Peers:
        """Return the constants for a run of so many steps.

        Noise averages out over a run only as far as samples are new. Where a user's n examples are gone through
        several times, its noise is counted up to what leaves, after T steps, the noise of n samples:
        σ² max(1, T·share).

        Weights that follow small numbers closely would follow their errors. So ζ_k² of standard error e enters as
        ζ_k²(1 − (2e/ζ_k²)²), as nothing below 2e; and δ_k, a lower estimate, with its error added.
        """

        def noise(one: Measured, share: float) -> float:
            return one.value * math.sqrt(max(1.0, steps * share))

        peers = list(self.peers.values())
        return Peers(
            smoothness=self.smoothness.value,
            pl=self.pl,
            initial_gap=self.loss,
            noise=noise(self.noise, self.share),
            peer_noise=[noise(peer.noise, peer.share) for peer in peers],
            bias_floor=[_clear(peer.bias_floor) for peer in peers],
            bias_growth=[peer.bias_growth.value for peer in peers],
            hessian_gap=[sum(peer.hessian_gap) for peer in peers],
        )

    def sentence(self) -> str:
        """Say what was measured, in one line."""

        def range_of(values: list[float]) -> str:
            low, high = f"{min(values):.2g}", f"{max(values):.2g}"
            return low if low == high else f"{low} to {high}"

        peers = list(self.peers.values())
        bias = [_clear(p.bias_floor) for p in peers]
        return (
            f"measured at the start: noise {self.noise.value:.2g}, "
            f"peers' noise {range_of([p.noise.value for p in peers])}, "
            f"{'bias ' + range_of(bias) if any(bias) else 'no bias clear of the noise'}, "
            f"Hessian gap {range_of([p.hessian_gap.value for p in peers])}, "
            f"smoothness {self.smoothness.value:.2g}, PL {self.pl:.2g}"
        )

    def plain(self) -> dict[str, Any]:
        """Return everything as a record and a checkpoint can hold it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Estimates:
        """Return the estimates that `plain` gave."""

        def measured(values: Mapping[str, Any]) -> dict[str, Any]:
            return {k: Measured(*v) if isinstance(v, list) else v for k, v in values.items()}

        peers = {name: PeerEstimates(**measured(peer)) for name, peer in plain["peers"].items()}
        return cls(**(measured(plain) | {"peers": peers}))


@dataclass(frozen=True)
class Sampling:
    """How a user's batches are drawn.

    Args:
        size: examples in a batch, while measuring.
        of: examples that there are; infinite for fresh samples.
        in_run: examples in a batch of the run; as `size` when None.
    """

    size: float = 1.0
    of: float = math.inf
    in_run: float | None = None


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
        >>> found = measure(problem.engine(), torch.full((50,), 4.0))
        >>> print(f"L = {found.smoothness.value:.2f}, σ = {found.noise.value:.1f}, μ = {found.pl:.2f}")
        L = 2.00, σ = 0.7, μ = 2.00
        >>> [round(peer.hessian_gap.value, 2) for peer in found.peers.values()]
        [0.0, 3.0]
    """
    if batches < 3:
        raise DataError(f"`batches` must be at least 3, got {batches}: with fewer nothing is known of the errors")
    seen = look(engine, x, batches, REACH)
    users = [own or Sampling(), *((peers or {}).get(name, Sampling()) for name in seen.names)]
    size, of, in_run = np.array([[user.size, user.of, user.in_run or user.size] for user in users]).T
    found = squares(seen, size, of)
    parts = [squares(seen.without(batch), size, of) for batch in range(batches)]
    errors = {name: np.sqrt((batches - 1) * np.var([one[name] for one in parts], axis=0)) for name in found}
    for squared in (found, errors):
        squared["noise"] = squared["each"] / in_run
    return _estimates(seen, found, errors, in_run / of)


def before_training(engine: Engine, problem: Problem) -> Estimates:
    """Measure at the point where training starts, and leave model and engine as they were.

    In this process the numbers of examples are known, and batches are at most half of user 0's examples, since all
    of them would show no noise. Another engine is taken to draw fresh samples.
    """
    x = Parameters(problem.model).vector()
    if not isinstance(engine, InProcess):
        with _kept(problem.model):
            return measure(engine, x)
    users, in_run = engine.sampler.users, engine.sampler.batch_size
    size = in_run if engine.allowed.batch_dependent else max(2, min(in_run, len(engine.sampler.me) // 2))

    def sampling(name: str) -> Sampling:
        n = len(users[name])
        return Sampling(min(size, n), math.inf if users[name].is_stream else n, min(in_run, n))

    peers = {name: sampling(name) for name in engine.names}
    with _kept(engine.passes.model):
        return measure(engine.with_batch_size(size), x, own=sampling(engine.me), peers=peers)


def _estimates(seen: Seen, found: Mapping[str, Array], errors: Mapping[str, Array], share: Array) -> Estimates:
    grows = found["growth"] > 2 * errors["growth"]
    growth = np.where(grows, found["growth"], 0.0)
    floor, floor_error = (np.where(grows, one["floor"], one["bias"]) for one in (found, errors))
    smoothness = _root(found["smoothness"], errors["smoothness"])
    if not smoothness.value > 0:
        raise DataError("user 0's gradient is the same at both points: no curvature to measure by")
    noise = [_root(*pair) for pair in zip(found["noise"], errors["noise"], strict=True)]
    pl = float(found["pl"])
    peers = {
        name: PeerEstimates(
            noise=noise[1 + k],
            bias_floor=_root(floor[k], floor_error[k]),
            bias_growth=Measured(float(growth[k]), float(errors["growth"][k])),
            hessian_gap=_root(found["gap"][k], errors["gap"][k]),
            share=float(share[1 + k]),
        )
        for k, name in enumerate(seen.names)
    }
    return Estimates(
        loss=float(found["loss"]),
        gradient=_root(found["gradient"], errors["gradient"]),
        noise=noise[0],
        smoothness=smoothness,
        pl=min(pl, smoothness.value) if pl > 0 else smoothness.value,
        peers=peers,
        left_out=seen.left_out,
        share=float(share[0]),
        batches=seen.batches,
    )


def _clear(root: Measured) -> float:
    """Return what of a root is clear of twice the error of its square."""
    square, error = root.value**2, sum(root) ** 2 - root.value**2
    return root.value * math.sqrt(1 - (2 * error / square) ** 2) if square > 2 * error else 0.0


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
