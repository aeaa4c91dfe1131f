"""What the theory advises for a problem.

Each method at its best, by its bound; what a promise costs.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from coterie.privacy.privacy import Privacy
from coterie.theory.choices import best_alpha
from coterie.theory.constants import Constants, Numbers, check_steps
from coterie.theory.correction import best_correction
from coterie.theory.descent import (
    Descent,
    alone,
    averaging,
    oracle,
    steps_alone,
    steps_alone_to_loss,
)
from coterie.theory.peers import Peers, best_averaging, best_corrected_peers


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """A method at its best knobs.

    `bound` is on the expected excess loss f_0 − f_0* after the last step; for bias correction,
    whose theorem has no such form, on its mean over the steps.
    """

    alpha: Numbers
    beta: Numbers | None = None  # for bias correction
    lr: Numbers  # constant
    bound: Numbers
    speedup: Numbers  # how many times more steps Alone needs, at its best, for a bound as low
    # for bias correction, Alone's bound on the mean over the steps
    alone_bound: Numbers | None = None


def plan(problem: Constants, steps: Numbers, alpha: Numbers | None = None) -> dict[str, Choice]:
    """Return the best knobs, the bound and the speedup of `alone`, `wga`, `bc_oracle` and `bc`.

    A bound on the squared gradient becomes one on the loss by the PL condition, F ≤ ‖∇f_0‖²/(2μ).
    `alpha` is for weighted averaging; the best when None.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=9, hessian_gap=0.001)
        >>> for name, choice in plan(problem, steps=100_000).items():
        ...     print(f"{name} {choice.alpha:.2f} {choice.speedup:.2f}")
        alone 0.00 1.00
        wga 0.90 10.00
        bc_oracle 0.90 10.00
        bc 0.90 1.10

    Reference: Theorems 1, 2 and 3.
    """
    steps = check_steps(steps)
    corrected = best_correction(problem, steps)
    own = alone(problem)
    return {
        "alone": replace(_choice(problem, own, 0.0, steps), speedup=1.0),
        "wga": _averaged(problem, steps, alpha),
        "bc_oracle": _choice(problem, oracle(problem, corrected.alpha), corrected.alpha, steps),
        "bc": Choice(
            alpha=corrected.alpha,
            beta=corrected.beta,
            lr=corrected.lr,
            bound=corrected.bound / (2 * problem.pl),
            speedup=steps_alone(problem, corrected.bound) / steps,
            alone_bound=own.gradient_bound(own.best_gradient_lr(steps), steps) / (2 * problem.pl),
        ),
    }


def plan_for_peers(peers: Peers, steps: int) -> dict[str, Choice]:
    """Return the plan for peers that differ, each method with the peers that suit it.

    Averaging takes the weights of `best_averaging`, bias correction the peers of
    `best_corrected_peers`.

    Example:
        >>> peers = Peers(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=[1, 1], bias_floor=[0, 9])
        >>> print(f"{plan_for_peers(peers, steps=1000)['wga'].speedup:.3f}")
        2.004
    """
    alpha, tau, _ = best_averaging(peers, steps)
    averaged = plan(peers.constants(tau), steps, alpha)
    corrected = plan(peers.constants(best_corrected_peers(peers, steps).tau), steps)
    return averaged | {name: corrected[name] for name in ("bc_oracle", "bc")}


PAYS = 1.05
"""A speedup below this is not told as one."""


@dataclass(frozen=True)
class Promise:
    """What peers promise about their examples, and what gradients they give."""

    privacy: Privacy
    examples: int  # n of a peer
    parameters: int  # d
    gradients: int  # how many each peer gives in all
    batch_size: int | None = None  # all examples when None

    def noise(self) -> float:
        """Return s, the standard deviation of what a peer adds to a gradient (of the whole vector).

            s = z · clip · √d / B

        B is the batch size and z the least noise, in multiples of `clip`, with which (ε, δ) last
        for all gradients.

        Example:
            >>> privacy = Privacy(4.0, 1e-5, clip=1.0, noise=2.0)
            >>> Promise(privacy, examples=100, parameters=400, gradients=9).noise()
            0.4
        """
        self.privacy.check(self.examples, self.gradients)
        rate = min(1.0, (self.batch_size or self.examples) / self.examples)
        noise = self.privacy.noise_at(rate, self.gradients)
        return noise * self.privacy.clip * math.sqrt(self.parameters) / (rate * self.examples)


@dataclass(frozen=True)
class PromiseCost:
    """What a promise costs user 0, by the bounds of averaging."""

    noise: float  # s, what a peer adds to a gradient
    worth: float  # how many plain peers one such peer is worth
    plain: Choice  # averaging with the same peers without a promise
    private: Choice
    # with so many such peers averaging is ahead of Alone; None where no number is enough
    pays_from: int | None


def with_added_noise(problem: Constants, noise: float) -> Constants:
    """Return the problem whose peers add unbiased noise of a standard deviation s.

    Σ_k² + s² for σ_k².

    Nothing else changes as long as little is clipped.

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=1, noise=3.0)
        >>> float(with_added_noise(problem, 4.0).peer_noise)
        5.0
    """
    own = problem.noise if problem.peer_noise is None else problem.peer_noise
    return replace(problem, peer_noise=np.hypot(own, noise))


def promise_cost(
    problem: Constants, steps: int, promise: Promise, alpha: Numbers | None = None
) -> PromiseCost:
    """Return what the peers' promise costs, and from how many peers on it pays all the same.

    A private peer is worth σ_k²/(σ_k² + s²) of a plain one: N of them have the variance of so many
    times N.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=9)
        >>> privacy = Privacy(4.0, 1e-5, clip=1.0, noise=2.0)
        >>> cost = promise_cost(problem, 1000, Promise(privacy, examples=100, parameters=7500, gradients=1000))
        >>> print(f"{cost.noise:.3f} {cost.worth:.2f} {cost.plain.speedup:.1f} {cost.private.speedup:.1f}")
        1.732 0.25 10.0 3.3
        >>> cost.pays_from
        1
    """
    noise = promise.noise()
    private = with_added_noise(problem, noise)
    own = float(problem.noise if problem.peer_noise is None else problem.peer_noise)
    worth = own**2 / (own**2 + noise**2) if own or noise else 1.0
    plain, noisy = _averaged(problem, steps, alpha), _averaged(private, steps, alpha)
    return PromiseCost(noise, worth, plain, noisy, peers_needed(private, steps))


def peers_needed(
    problem: Constants, steps: Numbers, speedup: float = PAYS, most: int = 10**9
) -> int | None:
    """Return the least number of peers with which averaging, at its best, is so much faster than Alone.

    None where `most` are not enough, because of their bias.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=10)
        >>> peers_needed(problem, 1000), peers_needed(replace(problem, bias_floor=1.0), 1000)
        (5, None)
    """

    def enough(n: int) -> bool:
        return float(_averaged(replace(problem, n_peers=float(n)), steps).speedup) >= speedup

    if not enough(most):
        return None
    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
    while high > low + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _averaged(problem: Constants, steps: Numbers, alpha: Numbers | None = None) -> Choice:
    weight = best_alpha(problem, steps) if alpha is None else alpha
    return _choice(problem, averaging(problem, weight), weight, steps)


def _choice(problem: Constants, descent: Descent, alpha: Numbers, steps: Numbers) -> Choice:
    lr = descent.best_loss_lr(steps)
    bound = descent.loss_bound(lr, steps)
    return Choice(
        alpha=alpha, lr=lr, bound=bound, speedup=steps_alone_to_loss(problem, bound) / steps
    )
