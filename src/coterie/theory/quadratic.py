"""Noisy quadratics, where everything about the paper's rules is known exactly.

f_k(x) = ½ a_k (x − x_k*)² in every coordinate, seen through gradients with Gaussian noise. Expected
losses and stationary levels need no simulation, and sample paths are drawn at the recorded steps
only.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_discrete_lyapunov

from coterie.errors import KnobError
from coterie.rules import Alone, BiasCorrection, OracleCorrection, Rule, WeightedAveraging
from coterie.rules.rule import Knob, decided
from coterie.theory.dynamics import Dynamics, FloatArray, Transition
from coterie.theory.quadratic_engine import Quadratic, QuadraticEngine, QuadraticUsers, TrueBias

__all__ = ["NoisyQuadratic", "Quadratic"]

Steps: TypeAlias = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Curve:
    """What is expected at the recorded steps."""

    steps: npt.NDArray[np.int64]  # how many had been taken
    loss: FloatArray  # E f_0(x) − f_0*
    squared_gradient: FloatArray  # E‖∇f_0(x)‖²


@dataclass(frozen=True, eq=False)
class Law:
    """The joint law of x at the recorded steps, from which expectations and sample paths follow."""

    steps: npt.NDArray[np.int64]  # the recorded ones
    curvature: FloatArray  # a_0, of shape (d,)
    start: Transition  # the law of the state before the first step, as a transition from anywhere
    transitions: Sequence[Transition]  # from each recorded step (at first the start) to the next
    # for each recorded step, the weights that read x − x_0* from the state
    readings: Sequence[FloatArray]

    def expected(self) -> Curve:
        """Return the exact expected loss and squared gradient at the recorded steps."""
        mean, covariance = self.start.offset, self.start.noise
        squares = np.empty((len(self.steps), len(self.curvature)))
        for i, (transition, reading) in enumerate(
            zip(self.transitions, self.readings, strict=True)
        ):
            mean, covariance = transition.moments(mean, covariance)
            squares[i] = (mean @ reading) ** 2 + np.einsum(
                "i,dij,j->d", reading, covariance, reading
            )
        return Curve(self.steps, squares @ self.curvature / 2, squares @ self.curvature**2)

    def paths(self, trials: int = 100, seed: int = 0) -> FloatArray:
        """Draw independent runs: x − x_0* at the recorded steps, of shape (trials, steps, d)."""
        rng = np.random.default_rng(seed)
        z = self.start.sample(np.zeros((trials, *self.start.offset.shape)), rng)
        drawn = np.empty((trials, len(self.steps), len(self.curvature)))
        for i, (transition, reading) in enumerate(
            zip(self.transitions, self.readings, strict=True)
        ):
            z = transition.sample(z, rng)
            drawn[:, i] = z @ reading
        return drawn


@dataclass(frozen=True, eq=False)
class NoisyQuadratic(QuadraticUsers):
    """User 0 and its peers, each with a quadratic objective.

    Diagonal in d coordinates, which add up.

    The peers are called "1", …, "N". Where only their average matters, give it as one peer, with
    noise σ/√N.

    Args:
        own: user 0's objective; its curvature must be positive.
        peers: the peers' objectives.
        x0: where training starts.
        x0_spread: the standard deviation of the start in each coordinate.
        drift: the standard deviation of the step that all users' optima take together after every
            step, in each coordinate (a random walk); losses are then those against the optimum of
            the moment.
        exchange_every: K, how many steps user 0 takes for each exchange with its peers, as in
            `train`.
        local_steps: how many plain steps of size η every user takes for each, as in `train`.

    Example:
        The paper's quadratic, with the step sizes of its first figure:

        >>> problem = NoisyQuadratic(Quadratic(1, 1, 10), [Quadratic(2, 5, 10)] * 10, x0_spread=1)
        >>> alone, bc = Alone(), BiasCorrection(alpha=10 / 11, beta=1e-4)
        >>> print(f"{problem.stationary(alone, lr=1e-4):.2e} {problem.stationary(bc, lr=1e-4):.2e}")
        2.50e-03 9.38e-04
        >>> problem.expected(alone, lr=1e-4, steps=[0, 700_000]).loss.round(4)
        array([1.    , 0.0025])
    """

    exchange_every: int = 1
    local_steps: int = 1

    def law(self, rule: Rule, lr: Knob, steps: Steps, *, average_from: int | None = None) -> Law:
        """Return the law of a run at the recorded steps.

        What `expected` and `paths` both come from.

        Args:
            rule: `Alone`, `WeightedAveraging`, `BiasCorrection`, or what `oracle` returns.
            lr: η, a number or a function of the step. With constant knobs the cost is O(log t),
                with scheduled ones O(t).
            steps: the numbers of steps taken, in increasing order; 0 is the start.
            average_from: after this step, judge the mean of the iterates since then instead of the
                last.
        """
        recorded = np.asarray(steps, dtype=np.int64)
        if recorded.ndim != 1 or (np.diff(recorded, prepend=0) < 0).any():
            raise KnobError(f"`steps` must be numbers of steps in increasing order, got {steps!r}")
        dynamics = self._dynamics(rule, lr, average_from)
        return Law(
            recorded,
            self.vector(self.own.curvature),
            self._start(dynamics),
            [dynamics.between(*stretch) for stretch in itertools.pairwise([0, *recorded.tolist()])],
            [dynamics.reading(step) for step in recorded.tolist()],
        )

    def expected(
        self, rule: Rule, lr: Knob, steps: Steps, *, average_from: int | None = None
    ) -> Curve:
        """Return the exact expected loss and squared gradient after each number of steps.

        See `law`.
        """
        return self.law(rule, lr, steps, average_from=average_from).expected()

    def stationary(self, rule: Rule, lr: float) -> float:
        """Return the expected loss after infinitely many steps, at an exchange.

        Infinite where none is reached.
        """
        if self.spectral_radius(rule, lr) >= 1:
            return float("inf")
        step, curvature = self._dynamics(rule, lr).settled_step, self.vector(self.own.curvature)
        total = 0.0
        for a, matrix, offset, noise in zip(
            curvature, step.matrix, step.offset, step.noise, strict=True
        ):
            mean = np.linalg.solve(np.eye(len(matrix)) - matrix, offset)
            total += a / 2 * float(mean[0] ** 2 + solve_discrete_lyapunov(matrix, noise)[0, 0])
        return total

    def spectral_radius(self, rule: Rule, lr: float) -> float:
        """Return the spectral radius of the iteration in (x, c), per exchange.

        It converges to a level below 1.
        """
        return float(np.abs(np.linalg.eigvals(self._dynamics(rule, lr).settled_step.matrix)).max())

    def max_lr(self, rule: Rule) -> float:
        """Return the step size from which on the iteration no longer converges, to a relative 10⁻⁹.

        Example:
            >>> problem = NoisyQuadratic(Quadratic(1, 0, 1), [Quadratic(3, 1, 1)])
            >>> held = replace(problem, exchange_every=4)
            >>> [round(each.max_lr(WeightedAveraging(0.5)), 4) for each in (problem, held)]
            [1.0, 0.3182]
        """
        largest = max(float(self.vector(user.curvature).max()) for user in (self.own, *self.peers))
        rates = np.geomspace(1e-6, 8, 400) / largest
        unstable = [self.spectral_radius(rule, float(rate)) >= 1 for rate in rates]
        if not any(unstable):
            return float("inf")
        first = unstable.index(True)
        low, high = (float(rates[first - 1]), float(rates[first])) if first else (0.0, 0.0)
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.spectral_radius(rule, middle) >= 1 else (middle, high)
        return low

    def paths(
        self,
        rule: Rule,
        lr: Knob,
        steps: Steps,
        *,
        trials: int = 100,
        seed: int = 0,
        average_from: int | None = None,
    ) -> FloatArray:
        """Draw independent runs, exact in law, at the recorded steps only; see `law`.

        They are x − x_0*, where x_0* may drift, of shape (trials, steps, d); `loss` turns them into
        losses.
        """
        return self.law(rule, lr, steps, average_from=average_from).paths(trials, seed)

    def oracle(self, alpha: Knob, *, noise: float = 0.0, seed: int = 0) -> OracleCorrection:
        """Return bias correction with the true bias of the equally weighted peers (Theorem 2).

        Args:
            alpha: α.
            noise: v/√N, the standard deviation of the oracle's noise in each coordinate.
            seed: what that noise depends on, beside the point asked about.

        Example:
            >>> problem = NoisyQuadratic(Quadratic(1, 0, 10), [Quadratic(2, 5, 10)] * 10)
            >>> print(f"{problem.stationary(problem.oracle(alpha=10 / 11), lr=1e-4):.2e}")
            2.27e-04
        """
        return OracleCorrection(alpha, TrueBias(self, noise, seed))

    def engine(self, seed: int = 0) -> QuadraticEngine:
        """Return this problem as an engine, for the ordinary rules and the ordinary training loop."""
        return QuadraticEngine(self, seed)

    def _dynamics(self, rule: Rule, lr: Knob, average_from: int | None = None) -> Dynamics:
        """Return the rule as one point of the family (α, β, w)."""
        if not isinstance(rule, Alone | WeightedAveraging | BiasCorrection | OracleCorrection):
            raise _not_exact(rule)
        work = self._local(rule, lr)
        own, own_variance = self.worked(self.own, *work)
        curvature, pull, variance = self.average(
            {} if isinstance(rule, Alone) else rule.weights(self.names), *work
        )
        alone = Dynamics(
            curvature=own,
            gap=curvature - own,
            pull=pull,
            own_variance=own_variance,
            peer_variance=variance,
            drift_variance=self.vector(self.drift) ** 2,
            lr=lr,
            average_from=average_from,
            every=self.exchange_every,
        )
        match rule:
            case Alone():
                return alone
            case WeightedAveraging():
                return replace(alone, alpha=decided("alpha", rule.alpha))
            case BiasCorrection():
                alpha, beta = decided("alpha", rule.alpha), decided("beta", rule.beta)
                corrected = replace(alone, alpha=alpha, beta=beta, correction=rule.correction)
                return replace(corrected, first=rule.start == "first", warm_up=rule.warm_up)
            # g_avg − c is an unbiased copy of g_0
            case OracleCorrection(bias=TrueBias() as oracle, tau=None):
                zeros = np.zeros(self.dim)
                variance = variance + oracle.noise**2
                return replace(
                    alone, alpha=rule.alpha, gap=zeros, pull=zeros, peer_variance=variance
                )
        raise _not_exact(rule)

    def _local(self, rule: Rule, lr: Knob) -> tuple[int, float]:
        """Return how many local steps there are, and their size.

        A `KnobError` where nothing exact is known.
        """
        if self.local_steps == 1:
            return 1, 0.0
        if callable(lr) or self.vector(self.drift).any() or isinstance(rule, OracleCorrection):
            raise KnobError(
                "nothing exact is known of `local_steps` with a scheduled `lr`, a `drift` or an"
                " oracle; simulate with `problem.engine()`"
            )
        return self.local_steps, float(lr)

    def _start(self, dynamics: Dynamics) -> Transition:
        """Return the law of the state before the first step, where c is 0."""
        mean = np.zeros((self.dim, dynamics.size))
        mean[:, 0] = self.vector(self.x0) - self.vector(self.own.optimum)
        mean[:, 1] = dynamics.pull
        covariance = np.zeros((*mean.shape, dynamics.size))
        covariance[:, 0, 0] = self.vector(self.x0_spread) ** 2
        return Transition(np.zeros_like(covariance), mean, covariance)


def _not_exact(rule: object) -> KnobError:
    return KnobError(
        f"nothing exact is known of {rule!r}; use Alone, WeightedAveraging, BiasCorrection or "
        "`problem.oracle(…)`, or simulate with `problem.engine()`"
    )
