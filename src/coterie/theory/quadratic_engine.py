"""Users with quadratic objectives, and an engine of them.

The ordinary rules on a problem solved exactly.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.engines.engine import Answers, Capabilities, LocalWork, Question
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients, weighted_sum
from coterie.recording.costs import Traffic
from coterie.theory.dynamics import FloatArray
from coterie.users.sampling import random_key

PerCoordinate: TypeAlias = float | Sequence[float] | npt.NDArray[Any]
"""One number for all coordinates, or one for each."""


@dataclass(frozen=True, eq=False)
class Quadratic:
    """One user's objective f(x) = ½ Σ a (x − x*)², and the noise of its gradients."""

    curvature: PerCoordinate = 1.0  # a, at least 0
    optimum: PerCoordinate = 0.0  # x*
    noise: PerCoordinate = 1.0  # σ, the standard deviation of the gradient noise in each coordinate

    def __post_init__(self) -> None:
        for name, lowest in (("curvature", 0.0), ("optimum", -np.inf), ("noise", 0.0)):
            values = np.asarray(getattr(self, name), dtype=float)
            if not (np.isfinite(values) & (values >= lowest)).all():
                at_least = "" if np.isinf(lowest) else " of at least 0"
                raise KnobError(f"`{name}` must be a finite number{at_least}, got {values}")


@dataclass(frozen=True, eq=False)
class QuadraticUsers:
    """User 0 and its peers, called "1", …, "N", each with a quadratic objective.

    See `NoisyQuadratic`.
    """

    own: Quadratic
    peers: Sequence[Quadratic] = ()
    x0: PerCoordinate = 0.0
    x0_spread: PerCoordinate = 0.0
    drift: PerCoordinate = 0.0
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not (np.asarray(self.own.curvature, dtype=float) > 0).all():
            raise KnobError(f"user 0's `curvature` must be positive, got {self.own.curvature}")
        object.__setattr__(self, "names", tuple(str(k) for k in range(1, len(self.peers) + 1)))

    @cached_property
    def dim(self) -> int:
        """d, the number of coordinates."""
        users = [value for user in (self.own, *self.peers) for value in vars(user).values()]
        shapes = [np.shape(value) for value in (*users, self.x0, self.x0_spread, self.drift)]
        return int(np.broadcast_shapes((1,), *shapes)[0])

    def vector(self, values: PerCoordinate) -> FloatArray:
        """Return one number for each coordinate."""
        return np.broadcast_to(np.asarray(values, dtype=float), self.dim)

    def loss(self, distance: FloatArray) -> FloatArray:
        """Return f_0 at x_0* + `distance`, over the last axis."""
        return np.asarray(distance**2 @ self.vector(self.own.curvature) / 2)

    def average(
        self, weights: Mapping[str, float], local_steps: int = 1, lr: float = 0.0
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return Σ τ_k a_k, Σ τ_k a_k (x_k* − x_0*) and Σ τ_k² σ_k² of the peers, in each coordinate.

        With local steps of size η, a_k and σ_k² are those of `worked`.
        """
        curvature, pull, variance = np.zeros((3, self.dim))
        for name, tau in weights.items():
            peer = self.peers[self.names.index(name)]
            a, noise = self.worked(peer, local_steps, lr)
            curvature = curvature + tau * a
            pull = pull + tau * a * (self.vector(peer.optimum) - self.vector(self.own.optimum))
            variance = variance + tau**2 * noise
        return curvature, pull, variance

    def worked(
        self, user: Quadratic, local_steps: int = 1, lr: float = 0.0
    ) -> tuple[FloatArray, FloatArray]:
        """Return curvature and variance of what stands for a user's gradient after K local steps of size η.

        Σ_j g(x_j) = A (x − x*) + noise,   A = (1 − (1 − ηa)^K)/η,   variance σ² Σ_{j<K} (1 −
        ηa)^{2j}
        """
        a, variance = self.vector(user.curvature), self.vector(user.noise) ** 2
        if local_steps == 1:
            return a, variance
        kept = 1 - lr * a
        return (1 - kept**local_steps) / lr, variance * sum(
            kept ** (2 * j) for j in range(local_steps)
        )


@dataclass(frozen=True, eq=False)
class TrueBias:
    """The oracle of Theorem 2: ∇f_avg(x) − ∇f_0(x) of equally weighted peers, with noise.

    Its noise depends only on (seed, x), so that it keeps no state: another point gets a fresh draw.
    """

    problem: QuadraticUsers
    noise: float = 0.0  # v/√N, its standard deviation in each coordinate
    seed: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the bias at x."""
        problem = self.problem
        if problem.vector(problem.drift).any():
            raise KnobError(
                "the oracle sees x, not the step, so it cannot follow a `drift`; use `expected`"
            )
        curvature, pull, _ = problem.average(
            {name: 1 / len(problem.names) for name in problem.names}
        )
        point = x.detach().cpu().double().numpy()
        own = problem.vector(problem.own.curvature)
        bias = (curvature - own) * (point - problem.vector(problem.own.optimum)) - pull
        if self.noise:
            digest = hashlib.blake2b(point.tobytes(), digest_size=8).digest()
            bias = bias + self.noise * _normal(
                self.seed, "oracle", int.from_bytes(digest, "little"), problem.dim
            )
        return x.new_tensor(bias)


@dataclass(frozen=True, eq=False)
class QuadraticEngine:
    """A noisy quadratic as an engine: all users' gradients at a point, for the ordinary rules.

    The noise of a gradient depends only on (seed, user, step). Equal coordinates are independent
    runs: with d copies of a problem, one run is d trials.
    """

    problem: QuadraticUsers
    seed: int = 0  # what the noise, and the drift of the optimum, depend on
    walked: dict[int, FloatArray] = field(default_factory=dict, repr=False)

    capabilities: ClassVar[Capabilities] = Capabilities(local_work=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The peers."""
        return self.problem.names

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return user 0's gradient at x and the weighted sum of the peers', or each peer's in `rows`."""
        own = self._gradient("0", self.problem.own, x, step)
        loss = float(self.problem.loss(x.detach().cpu().double().numpy() - self.optimum(step)))
        if not weights:
            return Gradients(own=own, x=x, own_loss=loss)
        names = tuple(name for name in self.names if name in weights)
        each = torch.stack(
            [
                self._gradient(name, self.problem.peers[self.names.index(name)], x, step)
                for name in names
            ]
        )
        if rows:
            return Gradients(own=own, rows=each, names=names, x=x, own_loss=loss)
        peers, answered = weighted_sum(own, each, [weights[name] for name in names])
        return Gradients(own=own, peers=peers, answered=answered, x=x, own_loss=loss)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Let peers take steps of their own; see `Asks.ask`."""
        work = question.work or LocalWork(1, 1.0)
        followed = {}
        for point, peer in (~question.weights.isnan()).nonzero().tolist():
            name, user = self.names[peer], self.problem.peers[peer]

            def gradient(x: Tensor, k: int, name: str = name, user: Quadratic = user) -> Tensor:
                return self._gradient(name, user, x, question.step + k)

            followed[point, peer] = work.followed(question.points[point], gradient, point)
        return partial(Answers.of, question, followed, self.names)

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
        distance = (
            x.detach().cpu().double().numpy() - problem.vector(user.optimum) - self._walk(step)
        )
        noise = problem.vector(user.noise) * _normal(self.seed, name, step, problem.dim)
        return x.new_tensor(problem.vector(user.curvature) * distance + noise)

    def _walk(self, step: int) -> FloatArray:
        """Return how far the optima have drifted.

        The last answer is kept, since steps mostly follow.
        """
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
