"""Noisy quadratics as an engine, so that the ordinary rules can be run on a problem solved exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie.engines.engine import Capabilities
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients, weighted_sum
from coterie.recording.traffic import Traffic
from coterie.theory.linear_gaussian import FloatArray
from coterie.users.sampling import random_key

if TYPE_CHECKING:
    from coterie.theory.quadratic import NoisyQuadratic, Quadratic


@dataclass(frozen=True, eq=False)
class TrueBias:
    """The oracle of Theorem 2: ∇f_avg(x) − ∇f_0(x) of equally weighted peers, with noise.

    Its noise depends only on (seed, x), so that it keeps no state: another point gets a fresh draw.

    Args:
        problem: the problem whose bias it knows.
        noise: v/√N, the standard deviation of its noise in each coordinate.
        seed: what the noise depends on, beside x.
    """

    problem: NoisyQuadratic
    noise: float = 0.0
    seed: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the bias at x."""
        problem = self.problem
        if problem.vector(problem.drift).any():
            raise KnobError("the oracle sees x, not the step, so it cannot follow a `drift`; use `expected`")
        curvature, pull, _ = problem.average({name: 1 / len(problem.names) for name in problem.names})
        point = x.detach().cpu().double().numpy()
        own = problem.vector(problem.own.curvature)
        bias = (curvature - own) * (point - problem.vector(problem.own.optimum)) - pull
        if self.noise:
            digest = hashlib.blake2b(point.tobytes(), digest_size=8).digest()
            bias = bias + self.noise * _normal(self.seed, "oracle", int.from_bytes(digest, "little"), problem.dim)
        return x.new_tensor(bias)


@dataclass(frozen=True, eq=False)
class QuadraticEngine:
    """A noisy quadratic as an engine: all users' gradients at a point, for the ordinary rules.

    The noise of a gradient depends only on (seed, user, step). Equal coordinates are independent runs: with
    d copies of a problem, one run is d trials.

    Args:
        problem: the problem.
        seed: what the noise, and the drift of the optimum, depend on.

    Example:
        >>> from coterie.theory.quadratic import NoisyQuadratic, Quadratic
        >>> problem = NoisyQuadratic(Quadratic(1, 0, noise=0), [Quadratic(2, 5, noise=0)] * 2)
        >>> engine = problem.engine()
        >>> g = engine.gradients(torch.ones(1), step=0, weights={"1": 0.5, "2": 0.5})
        >>> g.own, g.peers
        (tensor([1.]), tensor([-8.]))
    """

    problem: NoisyQuadratic
    seed: int = 0
    walked: dict[int, FloatArray] = field(default_factory=dict, repr=False)

    capabilities: ClassVar[Capabilities] = Capabilities()

    @property
    def names(self) -> tuple[str, ...]:
        """The peers."""
        return self.problem.names

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return user 0's gradient at x and the weighted sum of the peers', or each peer's in `rows`."""
        own = self._gradient("0", self.problem.own, x, step)
        loss = float(self.problem.loss(x.detach().cpu().double().numpy() - self.optimum(step)))
        if not weights:
            return Gradients(own=own, x=x, own_loss=loss)
        names = tuple(name for name in self.names if name in weights)
        each = torch.stack(
            [self._gradient(name, self.problem.peers[self.names.index(name)], x, step) for name in names]
        )
        if rows:
            return Gradients(own=own, rows=each, names=names, x=x, own_loss=loss)
        peers, answered = weighted_sum(own, each, [weights[name] for name in names])
        return Gradients(own=own, peers=peers, answered=answered, x=x, own_loss=loss)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        return {"engine": "noisy quadratic", "seed": self.seed, "coordinates": self.problem.dim}

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def close(self) -> None:
        """Do nothing: all users are in this process."""

    def optimum(self, step: int) -> FloatArray:
        """Return where user 0's optimum stands at a step."""
        return self.problem.vector(self.problem.own.optimum) + self._walk(step)

    def _gradient(self, name: str, user: Quadratic, x: Tensor, step: int) -> Tensor:
        problem = self.problem
        distance = x.detach().cpu().double().numpy() - problem.vector(user.optimum) - self._walk(step)
        noise = problem.vector(user.noise) * _normal(self.seed, name, step, problem.dim)
        return x.new_tensor(problem.vector(user.curvature) * distance + noise)

    def _walk(self, step: int) -> FloatArray:
        """Return how far the optima have drifted; the last answer is kept, since steps mostly follow."""
        drift = self.problem.vector(self.problem.drift)
        if not drift.any():
            return np.zeros(self.problem.dim)
        start = max((t for t in self.walked if t <= step), default=0)
        walked = self.walked.get(start, np.zeros(self.problem.dim))
        for t in range(start, step):
            walked = walked + drift * _normal(self.seed, "optimum", t, self.problem.dim)
        self.walked.clear()
        self.walked[step] = walked
        return walked


def _normal(seed: int, name: str, key: int, size: int) -> FloatArray:
    """Draw standard normal numbers that depend on (seed, name, key) alone."""
    keys = np.array([random_key(seed, name) % 2**64, key], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=keys)).standard_normal(size)
