"""Lines of a figure: exact and sampled values over the steps, and each method at its own best knobs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from coterie.errors import KnobError
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging
from coterie.rules.rule import Knob
from coterie.theory import Constants, best_alpha
from coterie.theory.dynamics import FloatArray
from coterie.theory.quadratic import NoisyQuadratic, Quadratic
from coterie.users.sampling import random_key

TRIALS = 100


@dataclass(frozen=True, eq=False)
class Series:
    """One line of a figure."""

    label: str  # its name in `results.json`
    legend: str  # its name in the figure
    x: FloatArray  # where it is recorded, mostly steps
    exact: FloatArray  # the exact values there
    # the level after infinitely many steps; None where that has no meaning
    stationary: float | None = None
    mean: FloatArray | None = None  # of the sampled runs; None where nothing is sampled
    error: FloatArray | None = None  # the standard error of that mean
    knobs: str = ""  # in words

    def results(self) -> dict[str, float | None]:
        """Return what `results.json` says of it."""
        return {
            "exact_final": float(self.exact[-1]),
            "exact_stationary": self.stationary,
            "sampled_final_mean": None if self.mean is None else float(self.mean[-1]),
            "sampled_final_se": None if self.error is None else float(self.error[-1]),
        }


@dataclass(frozen=True, eq=False)
class Line:
    """A rule with its knobs on a problem: what one line of a figure shows."""

    label: str  # its name in `results.json`
    legend: str  # its name in the figure
    problem: NoisyQuadratic
    rule: Rule
    lr: Knob
    average_from: int | None = None  # after this step, the mean of the iterates since then is shown
    knobs: str = ""  # in words

    def final(self, steps: int) -> float:
        """Return the exact expected loss after `steps` steps."""
        return float(
            self.problem.expected(self.rule, self.lr, [steps], average_from=self.average_from).loss[
                -1
            ]
        )

    def series(self, steps: Sequence[int], seed: int) -> Series:
        """Return the exact curve and 100 sampled runs.

        Their noise depends on the seed and the label.
        """
        law = self.problem.law(self.rule, self.lr, steps, average_from=self.average_from)
        exact = law.expected()
        losses = self.problem.loss(law.paths(TRIALS, random_key(seed, self.label) % 2**63))
        settles = self.average_from is None and not callable(self.lr)
        level = self.problem.stationary(self.rule, float(self.lr)) if settles else None  # type: ignore[arg-type]
        x, error = exact.steps.astype(float), losses.std(0, ddof=1) / np.sqrt(TRIALS)
        return Series(
            self.label, self.legend, x, exact.loss, level, losses.mean(0), error, self.knobs
        )


def recorded(steps: int, first: int = 1, points: int = 160) -> list[int]:
    """Return the steps to record: equally spaced on a logarithmic axis."""
    return sorted({round(step) for step in np.geomspace(first, steps, points)})


def best(make: Callable[..., Line], start: Sequence[float], steps: int) -> Line:
    """Return the setting with the least expected loss after `steps` steps (simplex search of Nelder and Mead).

    The knobs of `make`, all positive, are searched on a logarithmic scale; it may refuse some with
    a `KnobError`.
    """

    def log_loss(logs: FloatArray) -> float:
        try:
            with np.errstate(all="ignore"):  # large steps diverge
                loss = make(*np.exp(logs).tolist()).final(steps)
        except KnobError:  # a knob out of its range
            return np.inf
        return float(np.log(loss)) if np.isfinite(loss) else np.inf

    optimum = minimize(
        log_loss, np.log(start), method="Nelder-Mead", options={"xatol": 0.1, "fatol": 1e-4}
    )
    return make(*np.exp(optimum.x).tolist())


def constant_steps(
    problem: NoisyQuadratic, n_peers: int, steps: int, average_from: int | None = None
) -> list[Line]:
    """Return every method at its best constant knobs for the loss after `steps` steps.

    With `average_from`, the mean of the iterates after that step is judged, not the last. BC then
    takes large steps and needs its warm-up; without averaging it is better off here with c_0 = 0,
    whose push towards the peers' optimum happens to be in the direction of user 0's.
    """
    schedule = "constant" if average_from is None else "averaged"
    cold, share = average_from is None, n_peers / (n_peers + 1)

    def line(label: str, legend: str, rule: Rule, lr: float, knobs: str = "") -> Line:
        return Line(
            f"{label}_{schedule}", legend, problem, rule, lr, average_from, f"η = {lr:.2g}{knobs}"
        )

    def alone(lr: float) -> Line:
        return line("alone", "Alone", Alone(), lr)

    def wga(lr: float, alpha: float) -> Line:
        return line("wga", "WGA", WeightedAveraging(alpha), lr, f", α = {alpha:.2g}")

    def bc(lr: float, beta: float, alpha: float) -> Line:
        rule = BiasCorrection(alpha, beta, start="zero" if cold else "first", warm_up=not cold)
        return line("bc", "BC", rule, lr, f", α = {alpha:.2g}, β = {beta:.2g}")

    def oracle(lr: float) -> Line:
        return line("oracle", "BC, oracle", problem.oracle(share), lr, f", α = {share:.2g}")

    return [
        best(alone, [1e-5 if cold else 5e-5], steps),
        best(wga, [1e-5 if cold else 5e-5, 1e-4], steps),
        best(bc, [8e-6, 4e-5, 0.6] if cold else [2e-2, 8e-6, 0.2], steps),
        best(oracle, [1e-5 if cold else 5e-5], steps),
    ]


def decreasing_steps(
    problem: NoisyQuadratic, n_peers: int, steps: int, bias_floor: float
) -> list[Line]:
    """Return every method with steps and, for BC, a β that decrease as 1/t, on a problem with a_0 = 1, σ_0 = 10.

    The best θ and φ of η_t = θ/(t + 1), β_t = φ/(t + 1) do not depend on the horizon; BC's are
    therefore searched at a hundredth of it, at a hundredth of the cost.
    """
    share = n_peers / (n_peers + 1)
    constants = Constants(
        smoothness=1, pl=1, initial_gap=1, noise=10, n_peers=n_peers, bias_floor=bias_floor
    )
    alpha = float(best_alpha(constants, steps))

    def bc(theta: float, phi: float) -> Line:
        knobs = f"η = {theta:g}/(t+1), α = {share:.2g}, β = {phi:g}/(t+1)"
        rule = BiasCorrection(share, _decreasing(phi))
        return Line("bc_decreasing", "BC", problem, rule, _decreasing(theta), knobs=knobs)

    grid = [bc(*knobs) for knobs in itertools.product((0.7, 1, 1.5, 2, 4), (1, 3, 10, 30, 100))]

    def line(label: str, legend: str, rule: Rule, knobs: str = "") -> Line:
        return Line(
            f"{label}_decreasing",
            legend,
            problem,
            rule,
            _decreasing(1),
            knobs=f"η = 1/(t+1){knobs}",
        )

    return [
        line("alone", "Alone", Alone()),
        line("wga", "WGA", WeightedAveraging(alpha), f", α = {alpha:.2g}"),
        min(grid, key=lambda setting: setting.final(steps // 100)),
        line("oracle", "BC, oracle", problem.oracle(share), f", α = {share:.2g}"),
    ]


def drifting_optimum(steps: int) -> list[Line]:
    """Return every method at its best knobs on objectives that drift together, for the loss after `steps` steps.

    All curvatures are 1, σ = 10, the peers' optimum is 4 away from user 0's, and all optima take a
    random step of standard deviation 0.01 after every step. BC's bias estimate forgets nothing
    within the run: β = 1/steps, with α = N/(N + 1).
    """

    def problem(n_peers: int) -> NoisyQuadratic:
        peers = [Quadratic(1, 4, 10 / n_peers**0.5)]
        return NoisyQuadratic(Quadratic(1, 0, 10), peers, x0_spread=1, drift=0.01)

    def alone(lr: float) -> Line:
        return Line("alone", "Alone", problem(1), Alone(), lr, knobs=f"η = {lr:.2g}")

    def wga(lr: float, alpha: float) -> Line:
        rule, knobs = WeightedAveraging(alpha), f"η = {lr:.2g}, α = {alpha:.2g}"
        return Line("wga_100", "WGA, N = 100", problem(100), rule, lr, knobs=knobs)

    def corrected(n_peers: int, *, oracle: bool) -> Callable[[float], Line]:
        label = f"{'oracle' if oracle else 'bc'}_{n_peers}"
        legend = f"BC{', oracle' * oracle}, N = {n_peers}"
        share, one = n_peers / (n_peers + 1), problem(n_peers)
        rule = one.oracle(share) if oracle else BiasCorrection(share, 1 / steps)
        beta = "" if oracle else f", β = {1 / steps:.2g}"
        return lambda lr: Line(
            label, legend, one, rule, lr, knobs=f"η = {lr:.2g}, α = {share:.2g}{beta}"
        )

    lines = [corrected(n_peers, oracle=oracle) for n_peers in (10, 100) for oracle in (False, True)]
    return [
        best(alone, [1e-3], steps),
        best(wga, [1e-3, 1e-3], steps),
        *(best(line, [3e-3], steps) for line in lines),
    ]


def _decreasing(numerator: float) -> Callable[[int], float]:
    return lambda t: min(1.0, numerator / (t + 1))
