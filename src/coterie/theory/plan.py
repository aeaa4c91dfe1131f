"""What the theory advises for a problem: each method at its best, by its bound."""

from dataclasses import dataclass, replace

from coterie.theory.choices import best_alpha
from coterie.theory.constants import Constants, Numbers, check_steps
from coterie.theory.correction import best_correction
from coterie.theory.descent import Descent, alone, averaging, oracle, steps_alone, steps_alone_to_loss
from coterie.theory.peers import Peers, best_averaging, best_corrected_peers


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """A method at its best knobs.

    `bound` is on the expected excess loss f_0 − f_0* after the last step; for bias correction, whose theorem has no
    such form, on its mean over the steps.
    """

    alpha: Numbers
    beta: Numbers | None = None  # for bias correction
    lr: Numbers  # constant
    bound: Numbers
    speedup: Numbers  # how many times more steps Alone needs, at its best, for a bound as low
    alone_bound: Numbers | None = None  # for bias correction, Alone's bound on the mean over the steps


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
    weight = best_alpha(problem, steps) if alpha is None else alpha
    corrected = best_correction(problem, steps)
    own = alone(problem)
    return {
        "alone": replace(_choice(problem, own, 0.0, steps), speedup=1.0),
        "wga": _choice(problem, averaging(problem, weight), weight, steps),
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

    Averaging takes the weights of `best_averaging`, bias correction the peers of `best_corrected_peers`.

    Example:
        >>> peers = Peers(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=[1, 1], bias_floor=[0, 9])
        >>> print(f"{plan_for_peers(peers, steps=1000)['wga'].speedup:.3f}")
        2.004
    """
    alpha, tau, _ = best_averaging(peers, steps)
    averaged = plan(peers.constants(tau), steps, alpha)
    corrected = plan(peers.constants(best_corrected_peers(peers, steps).tau), steps)
    return averaged | {name: corrected[name] for name in ("bc_oracle", "bc")}


def _choice(problem: Constants, descent: Descent, alpha: Numbers, steps: Numbers) -> Choice:
    lr = descent.best_loss_lr(steps)
    bound = descent.loss_bound(lr, steps)
    return Choice(alpha=alpha, lr=lr, bound=bound, speedup=steps_alone_to_loss(problem, bound) / steps)
