"""SGD along a biased, noisy gradient: Theorems 1 and 2 are this with different constants."""

from dataclasses import dataclass

import numpy as np

from coterie.theory.constants import Constants, Numbers, as_numbers, check, check_alpha, check_steps


@dataclass(frozen=True, eq=False, kw_only=True)
class Descent:
    """SGD on f_0 along a biased, noisy gradient, x ← x − η(∇f_0 + bias + noise).

        ‖bias‖² ≤ a ‖∇f_0‖² + B²,   E‖noise‖² ≤ M ‖∇f_0‖² + σ²

    Every bound follows from the descent inequality, for η ≤ `max_lr`,

        F_{t+1} ≤ F_t − ηk E‖∇f_0(x_t)‖² + ηB²/2 + Lη²σ²/2,   k = (1 − a)/2, or (1 − a)/4 where M >
        0.

    In its methods `lr` is η, at most `max_lr`, `steps` is T, and `step` is t, counted from 0.

    Example:
        >>> float(alone(Constants(smoothness=2, initial_gap=1, noise=1)).max_lr)
        0.5

    Reference: Appendix C.1, eq. (eqP), and C.2, eq. (eq1).
    """

    smoothness: Numbers  # L
    pl: Numbers  # μ; 0 where it is not assumed
    initial_gap: Numbers  # F_0
    bias_growth: Numbers  # a
    bias_floor: Numbers  # B
    noise_growth: Numbers  # M
    noise: Numbers  # σ

    @property
    def max_lr(self) -> Numbers:
        """η_max = min(1/L, (1 − a)/(2LM)), the largest step size the bounds allow."""
        left = 1 - self.bias_growth
        return left / np.maximum(left, 2 * self.noise_growth) / self.smoothness

    @property
    def progress(self) -> Numbers:
        """k, the share of η‖∇f_0‖² by which a step lowers f_0."""
        return (1 - self.bias_growth) / np.where(np.equal(self.noise_growth, 0), 2, 4)

    def gradient_bound(self, lr: Numbers, steps: Numbers) -> Numbers:
        """Bound the mean squared gradient of a run with a constant step size.

            (1/T) Σ_t E‖∇f_0(x_t)‖² ≤ (F_0/(ηT) + Lησ²/2 + B²/2) / k

        Example:
            >>> problem = Constants(smoothness=1, initial_gap=2, noise=1, n_peers=9, bias_floor=0.1)
            >>> print(f"{averaging(problem, 0.5).gradient_bound(lr=0.1, steps=1000):.4f}")
            0.0703

        Reference: Theorem 1, non-convex case; Appendix C.2.
        """
        lr, steps = self._check_lr(lr), check_steps(steps)
        check("lr", lr, np.greater(lr, 0), "must be positive")
        noise = self.smoothness * lr * self.noise**2 / 2
        return (self.initial_gap / (lr * steps) + noise + self.bias_floor**2 / 2) / self.progress

    def best_gradient_lr(self, steps: Numbers) -> Numbers:
        """Return the step size with the least `gradient_bound`.

            η = min(η_max, √(2F_0/(Lσ²T)))

        Example:
            >>> float(alone(Constants(smoothness=1, initial_gap=2, noise=1)).best_gradient_lr(400))
            0.1

        Reference: Theorem 1, non-convex case. (Theorem 2 prints it without T.)
        """
        noise = self.smoothness * self.noise**2 * check_steps(steps)
        gap = 2 * self.initial_gap
        return np.sqrt(gap / np.maximum(noise, gap / self.max_lr**2))

    def loss_bound(self, lr: Numbers, steps: Numbers) -> Numbers:
        """Bound the expected excess loss after a run with a constant step size, under the PL condition.

            F_T ≤ (1 − ρη)^T F_0 + (B² + Lησ²) / (2ρ),   ρ = 2μk

        Example:
            >>> problem = Constants(smoothness=1, pl=1, initial_gap=2, noise=1)
            >>> print(f"{alone(problem).loss_bound(lr=0.1, steps=100):.4f}")
            0.0501

        Reference: Theorem 1, μ-PL case; Appendix C.2, after eq. (eq2).
        """
        lr, steps, rho = self._check_lr(lr), check_steps(steps), self._rate()
        floor = (self.bias_floor**2 + self.smoothness * lr * self.noise**2) / (2 * rho)
        return (1 - rho * lr) ** steps * self.initial_gap + floor

    def best_loss_lr(self, steps: Numbers) -> Numbers:
        """Return the step size with the least `loss_bound`.

        0 where the noise forbids any gain in T steps.

            1 − ρη = (Lσ²/(2ρ²TF_0))^{1/(T − 1)},   η ≤ η_max

        Example:
            >>> problem = alone(Constants(smoothness=1, pl=1, initial_gap=2, noise=1))
            >>> lr = problem.best_loss_lr(100)
            >>> print(f"{lr:.4f} {problem.loss_bound(lr, 100):.4f}")
            0.0587 0.0341

        Reference: the minimum of the bound in Appendix C.2, which the paper approximates with a
        logarithm (printed with an argument that is not dimensionless).
        """
        steps, rho = check_steps(steps), self._rate()
        noise = self.smoothness * self.noise**2
        kept = np.minimum(noise / (2 * rho**2 * steps * self.initial_gap), 1)
        with np.errstate(divide="ignore"):  # without noise nothing need be kept: log 0
            decay = np.log(kept) / np.maximum(steps - 1, 1e-300)
        # 0 and not −0 where everything is kept
        return np.minimum((0.0 - np.expm1(decay)) / rho, self.max_lr)

    def decreasing_lr(self, step: Numbers) -> Numbers:
        """Return the step size of each step of a run whose bound has no logarithm.

            η_t = (2s + 1)/(ρ(s + 1)²),   s = t_0 + t,   t_0 the first s whose step is at most η_max

        Example:
            >>> problem = alone(Constants(smoothness=1, pl=1, initial_gap=1, noise=1))
            >>> problem.decreasing_lr(np.arange(3)).round(3).tolist()
            [1.0, 0.75, 0.556]

        Reference: Appendix C.2, “μ-PL with a decreasing step-size”.
        """
        s = self._start() + as_numbers("step", step)
        return (2 * s + 1) / (self._rate() * (s + 1) ** 2)

    def decreasing_bound(self, steps: Numbers) -> Numbers:
        """Bound the expected excess loss after a run with the steps of `decreasing_lr`.

            F_T ≤ (t_0/(t_0 + T))² F_0 + B²/(2ρ) + (2Lσ²/ρ²)·T/(t_0 + T)²

        Example:
            >>> problem = alone(Constants(smoothness=1, pl=1, initial_gap=1, noise=1))
            >>> float(problem.decreasing_bound(100))
            0.02

        Reference: Appendix C.2, “μ-PL with a decreasing step-size”.
        """
        steps, start, rho = check_steps(steps), self._start(), self._rate()
        noise = 2 * self.smoothness * self.noise**2 / rho**2
        end = start + steps
        return (
            (start / end) ** 2 * self.initial_gap
            + self.bias_floor**2 / (2 * rho)
            + noise * steps / end**2
        )

    def _rate(self) -> Numbers:
        """Return ρ = 2μk, the rate at which the PL condition shrinks F."""
        check("pl", self.pl, np.greater(self.pl, 0), "must be positive for a bound on the loss")
        return 2 * self.pl * self.progress

    def _start(self) -> Numbers:
        """Return t_0, the first t with (2t + 1)/(t + 1)² ≤ ρη_max.

        With u = 1/(t + 1) that is 2u − u² ≤ h, or t + 1 ≥ 1/(1 − √(1 − h)).
        """
        h = np.minimum(self._rate() * self.max_lr, 1)
        first = (1 + np.sqrt(1 - h)) / h - 1
        # an exact integer must not be rounded up
        return np.asarray(np.ceil(first - 1e-9 * (1 + first)))[()]

    def _check_lr(self, lr: Numbers) -> Numbers:
        lr = as_numbers("lr", lr)
        limit = self.max_lr
        check("lr", lr, np.greater_equal(lr, 0), "must not be negative")
        fits = np.less_equal(lr, limit * (1 + 1e-9))
        check("lr", lr, fits, "must not exceed `max_lr`", f"take at most {np.min(limit):g}")
        return lr


def alone(problem: Constants) -> Descent:
    """Return the descent of user 0 without peers: no bias, variance σ_0²."""
    return averaging(problem, 0.0)


def steps_alone(problem: Constants, bound: Numbers) -> Numbers:
    """Return how many steps Alone needs, at its best step size, for the same bound on the squared gradient.

        T = 8LF_0σ_0²/bound²,   or 2LF_0/(bound − σ_0²) where the step size is 1/L

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=2, noise=1)
        >>> steps = steps_alone(problem, 0.1)
        >>> step = alone(problem)
        >>> print(f"{steps:.0f} {step.gradient_bound(step.best_gradient_lr(steps), steps):.3f}")
        1600 0.100

    Reference: Theorem 1, non-convex case, at α = 0, solved for T.
    """
    bound, variance = as_numbers("bound", bound), np.square(problem.noise)
    gap = problem.smoothness * problem.initial_gap
    long = 8 * gap * variance / bound**2
    return np.where(bound <= 2 * variance, long, 2 * gap / np.maximum(bound - variance, bound / 2))[
        ()
    ]


def steps_alone_to_loss(problem: Constants, bound: Numbers) -> Numbers:
    """Return how many steps Alone needs, at its best constant step size, for the same bound on the excess loss.

    It has no closed form: T is found by bisection. At least 1, and infinite beyond 10¹⁵.

    Example:
        >>> problem = Constants(smoothness=1, pl=1, initial_gap=2, noise=1)
        >>> print(f"{steps_alone_to_loss(problem, 0.0341):.0f}")  # see `Descent.best_loss_lr`
        100

    Reference: Theorem 1, μ-PL case, at α = 0, solved for T.
    """
    own, bound = alone(problem), as_numbers("bound", bound)

    def least(steps: Numbers) -> Numbers:
        return own.loss_bound(own.best_loss_lr(steps), steps)

    shape = np.broadcast_shapes(np.shape(bound), np.shape(least(1.0)))
    low, high = np.zeros(shape), np.full(shape, np.log(1e15))
    for _ in range(60):
        middle = (low + high) / 2
        enough = least(np.exp(middle)) <= bound * (1 + 1e-12)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(least(1e15) > bound * (1 + 1e-12), np.inf, np.exp(high))[()]


def averaging(problem: Constants, alpha: Numbers) -> Descent:
    """Return the descent of weighted gradient averaging (Theorem 1).

        bias = α(∇f_avg − ∇f_0),   variance σ²(α) = (1 − α)²σ_0² + α²σ_a²,   α < 1/√m

    Example:
        >>> step = averaging(Constants(smoothness=1, initial_gap=1, noise=3, n_peers=2, bias_floor=4), 0.5)
        >>> print(f"{step.bias_floor:.4g} {step.noise**2:.4g}")
        2 3.375

    Reference: Algorithm 2, Theorem 1.
    """
    alpha = check_alpha(alpha)
    growth = alpha**2 * problem.bias_growth
    remedy = (
        f"take less than {1 / np.sqrt(np.max(problem.bias_growth) or 1):g}, or correct the bias"
    )
    check("alpha", alpha, np.less(growth, 1), "must be below 1/√m, m being `bias_growth`", remedy)
    return _descent(problem, alpha, growth, alpha * problem.bias_floor, problem.variance(alpha))


def oracle(problem: Constants, alpha: Numbers, oracle_noise: Numbers = 0.0) -> Descent:
    """Return the descent of bias correction by an oracle of the bias (Theorem 2).

    As averaging, without bias.

        variance σ̃²(α) = (1 − α)²σ_0² + α²(σ_a² + v²/N)

    Example:
        >>> problem = Constants(smoothness=1, initial_gap=1, noise=3, n_peers=8, bias_floor=100)
        >>> step = oracle(problem, 8 / 9)
        >>> print(f"{step.bias_floor:.4g} {step.noise**2:.4g}")
        0 1

    Reference: Theorem 2.
    """
    alpha, v = check_alpha(alpha), as_numbers("oracle_noise", oracle_noise)
    check("oracle_noise", v, np.greater_equal(v, 0), "must not be negative")
    return _descent(
        problem, alpha, 0.0, 0.0, problem.variance(alpha) + alpha**2 * v**2 / problem.n_peers
    )


def _descent(
    problem: Constants, alpha: Numbers, growth: Numbers, floor: Numbers, variance: Numbers
) -> Descent:
    return Descent(
        smoothness=problem.smoothness,
        pl=problem.pl,
        initial_gap=problem.initial_gap,
        bias_growth=growth,
        bias_floor=floor,
        noise_growth=problem.variance_growth(alpha),
        noise=np.sqrt(variance),
    )
