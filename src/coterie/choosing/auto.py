"""Knobs that are "auto": the theory's choice for the constants measured before the first step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.optim import SGD, Optimizer

from coterie import theory
from coterie.choosing.chooser import Chooser, RuleChoice
from coterie.choosing.measuring import BATCHES, before_training, gradients_elsewhere
from coterie.engines.engine import Engine, require
from coterie.errors import DataError, KnobError
from coterie.learners.spec import RunSpec
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging
from coterie.rules.rule import value_at
from coterie.theory.constants import Constants
from coterie.theory.correction import Correction
from coterie.theory.estimates import Estimates

Array: TypeAlias = NDArray[np.float64]

LEAST_CLAIM = 1.05
"""A gain below this is not told."""


def chooser_for(rule: object) -> Chooser | None:
    """Return what must choose before the first step; None for a rule whose knobs are all set.

    Example:
        >>> chooser_for(WeightedAveraging("auto"))
        AutoAveraging(rule=WeightedAveraging(alpha='auto', tau=None, aggregator=None))
        >>> chooser_for(WeightedAveraging(0.5)) is None
        True
    """
    if isinstance(rule, Chooser):
        return rule
    if isinstance(rule, WeightedAveraging) and rule.alpha == "auto":
        return AutoAveraging(rule)
    if isinstance(rule, BiasCorrection) and "auto" in (rule.alpha, rule.beta):
        return AutoCorrection(rule)
    return None


@dataclass(frozen=True)
class _Auto(ABC):
    """Measure the constants, and choose by them."""

    rule: Any

    def choose(self, spec: RunSpec, engine: Engine, progress: bool | None = None) -> RuleChoice:
        """Measure the constants, and choose by them; see `Chooser`."""
        require(engine, "rows", f"`{type(self.rule).__name__}`", "to choose its knobs")
        try:
            measured = before_training(engine, spec, batches=self.batches(spec.steps))
        except DataError as error:
            why = f"peers weigh nothing: not measured, {error}"
            return RuleChoice(Alone(), {"alpha": 0.0, "beta": 0.0, "tau": {}, "sentence": why})
        account = self.account(spec, measured, _tau_over(list(measured.peers), self.rule.tau))
        return RuleChoice(self.rule_from(account), account, measured)

    def batches(self, steps: int) -> int:
        """Return how many batches to measure by."""
        return BATCHES

    def gradients_before(self, steps: int) -> int:
        """Return how many gradients it asks of each peer elsewhere; see `TellsGradients`."""
        return gradients_elsewhere(self.batches(steps))

    @abstractmethod
    def account(self, spec: RunSpec, measured: Estimates, tau: Array | None) -> dict[str, Any]:
        """Return what is chosen for the constants measured, and why, as plain data."""

    @abstractmethod
    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an account stands for."""


@dataclass(frozen=True)
class AutoAveraging(_Auto):
    """Choose τ of weighted averaging, where it is None, by `theory.best_averaging`, and then α, which is "auto".

    A bias that is not clear of its error may be as large as that error, and a large α would then be
    paid for in every step: α is `theory.best_alpha` with every ζ_k² a standard error larger than
    measured. Then, for m = 0, it costs no more than Alone in the long run as long as no ζ_k² is
    more than twice as large as that. What is claimed is what remains at two errors. α may be the
    larger the better the bias is known: as many batches are measured as a twentieth of the steps
    have.
    """

    rule: WeightedAveraging

    def batches(self, steps: int) -> int:
        """Return how many batches to measure by."""
        return max(BATCHES, steps // 20)

    def account(self, spec: RunSpec, measured: Estimates, tau: Array | None) -> dict[str, Any]:
        """Choose by the constants measured."""
        _, weights, _ = theory.best_averaging(measured.constants(spec.steps), spec.steps, tau)
        one, two = (
            measured.constants(spec.steps, bias_errors=e).constants(weights) for e in (1, 2)
        )
        alpha = float(theory.best_alpha(one, spec.steps))
        gain = float(theory.averaging_speedup(two, spec.steps, alpha))
        claim = (
            f"in the long run at least {gain:.3g} times the speed of training alone, unless a bias"
            " is more than two standard errors above what was measured"
        )
        if gain < LEAST_CLAIM:
            claim = "the bias is not known well enough to claim a gain over training alone"
        return _account(measured, {"alpha": alpha}, weights, claim)

    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an account stands for."""
        tau = None if self.rule.aggregator else account["tau"]
        return replace(self.rule, alpha=account["alpha"], tau=tau) if account["alpha"] else Alone()


@dataclass(frozen=True)
class AutoCorrection(_Auto):
    """Choose the knobs of bias correction that are "auto", and τ where it is None.

    The choice is that of `theory.best_corrected_peers`: for τ = None the peers of small δ_k,
    equally. The step size of SGD is η; any other optimizer's is of another kind. What is claimed is
    the bound on what the rule does in a
    run: its first step is taken alone, and c_t is at first the mean of the biases seen.
    """

    rule: BiasCorrection

    def account(self, spec: RunSpec, measured: Estimates, tau: Array | None) -> dict[str, Any]:
        """Choose by the constants measured."""
        alpha, beta = (
            None if knob == "auto" else value_at(name, knob, 0)
            for name, knob in (("alpha", self.rule.alpha), ("beta", self.rule.beta))
        )
        peers, rate = measured.constants(spec.steps), _rate(spec.made_optimizer)
        start: dict[str, Any] = {"warm_up": self.rule.warm_up}
        if self.rule.start == "zero":  # the first step has all of the bias
            start["initial_error"] = max(measured.bias_at_start(name) for name in measured.peers)
        weights, knobs = theory.best_corrected_peers(
            peers, spec.steps, alpha=alpha, lr=rate, tau=tau, **start
        )
        if beta is not None:
            knobs = knobs._replace(beta=beta)
        chosen = {"alpha": float(knobs.alpha), "beta": float(knobs.beta)}
        of = (
            ""
            if rate is not None and rate <= knobs.lr
            else f" for SGD with a step size of {knobs.lr:.2g}"
        )
        gain = self._gain(peers.constants(weights), knobs, spec.steps, start)
        claim = f"its bound{of} shows no gain over training alone"
        if gain >= LEAST_CLAIM:
            claim = f"its bound{of} gives {gain:.3g} times the speed of training alone"
        return _account(measured, chosen, weights, claim)

    def _gain(
        self, problem: Constants, knobs: Correction, steps: int, start: Mapping[str, Any]
    ) -> float:
        """Return how many times more steps Alone needs for the bound.

        0 where none is known for the knobs.
        """
        if self.rule.correction != 1:
            return 0.0
        try:
            bound = theory.correction_bound(
                problem, knobs.alpha, knobs.beta, knobs.lr, steps, **start
            )
        except KnobError:  # a β that was given does not follow the drift
            return 0.0
        return float(theory.steps_alone(problem, bound)) / steps

    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an account stands for."""
        if not account["tau"]:
            return Alone()
        chosen = {
            name: account[name] for name in ("alpha", "beta") if getattr(self.rule, name) == "auto"
        }
        return replace(self.rule, **chosen, tau=None if self.rule.aggregator else account["tau"])


def _rate(optimizer: Optimizer) -> float | None:
    """Return η where the optimizer is SGD, momentum counted in.

    The theory's best will do for any other.
    """
    rates = [
        group["lr"] / (1 - group["momentum"])
        for group in optimizer.param_groups
        if "momentum" in group
    ]
    return float(max(rates)) if isinstance(optimizer, SGD) and max(rates) > 0 else None


def _tau_over(names: Sequence[str], tau: Mapping[str, float] | None) -> Array | None:
    """Return τ over the peers that could be measured."""
    if tau is None:
        return None
    weights = np.array([tau.get(name, 0.0) for name in names])
    if not weights.any():
        raise DataError("no peer that has weight in `tau` could be measured")
    return np.asarray(weights / weights.sum())


def _account(
    measured: Estimates, knobs: Mapping[str, float], tau: Array, claim: str
) -> dict[str, Any]:
    """Return what was chosen and why, as plain data."""
    kept = {
        name: float(weight) for name, weight in zip(measured.peers, tau, strict=True) if weight > 0
    }
    values = ", ".join(f"{name} {value:.3g}" for name, value in knobs.items())
    return {
        "regime": "the theory's choice for the constants measured at the start",
        **knobs,
        "tau": kept,
        "left_out": dict(measured.left_out),
        "sentence": (
            f"{values} for {len(kept)} peer{'s' * (len(kept) != 1)} by the theory and measured"
            " constants"
        ),
        "claim": claim,  # of the theory; what the run gave is the verdict's to say
    }
