"""Bias correction: Algorithm 3, and with the true bias, where it is known (Theorem 2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.arguments import one_of
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.rules.formula import combined, corrected_step
from coterie.rules.rule import (
    Auto,
    FormulaRule,
    Knob,
    Knobs,
    Rule,
    State,
    check_knob,
    check_tau,
    value_at,
)


@dataclass(frozen=True)
class BiasCorrection(FormulaRule):
    """Average, less the running estimate of the peers' bias (Algorithm 3).

        d_t     = (1 − α) g_0 + α (g_avg − w c_t)
        c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

    d_t uses the old c_t: the new one contains this step's noise. In a step where a share a < 1 of
    the peers' weight answers, the rest of g_avg is g_0, and both lines use a·c_t for the bias of
    what answered.

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step; "auto": that of
            least noise, by the noise that `train` measures before the first step (see
            docs/estimates.md).
        beta: β, the rate at which the bias estimate follows, in [0, 1]; a number or a function of
            the step; "auto": that of the least bound by the corrected Theorem 3.
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None, and where a
            knob is "auto", equal weights of the peers whose Hessians differ little enough from user
            0's for the least bound.
        correction: w, how much of the bias is taken away, in [0, 1]: 0 is `WeightedAveraging`, 1
            the paper.
        start: c_0: the `"first"` observed bias, as in the paper, or `"zero"`, as in the authors'
            notebook.
        warm_up: follow with β_t = max(β, 1/(t + 1)), so that c_t is at first the mean of the biases
            seen and a small β need not wait 1/β steps; False gives the paper's recursion exactly.
        aggregator: a robust aggregator of the peers' gradients in the place of g_avg; it takes no
            `tau`.

    Example:
        >>> import torch
        >>> from coterie import Gradients
        >>> rule = BiasCorrection(alpha=0.5, beta=0.1)
        >>> g = Gradients(own=torch.tensor([1.0]), peers=torch.tensor([5.0]))
        >>> direction, state = rule(g, rule.init(torch.zeros(1)))
        >>> direction, state["c"]
        (tensor([1.]), tensor([4.]))
    """

    alpha: Knob | Auto
    beta: Knob | Auto
    tau: Mapping[str, float] | None = None
    correction: float = 1.0
    start: Literal["first", "zero"] = "first"
    warm_up: bool = True
    aggregator: Aggregator | None = None

    memory = ("c",)

    def __post_init__(self) -> None:
        check_knob("alpha", self.alpha, auto=True)
        check_knob("beta", self.beta, auto=True)
        check_knob("correction", self.correction)
        check_tau(self.tau, self.aggregator)
        one_of("first", "zero")("start", self.start)

    def init(self, x: Tensor) -> State:
        """Return the state before the first step.

        `seen` counts the steps in which a bias was observed.
        """
        return {**super().init(x), "seen": 0}

    def direction(
        self, own: Tensor, peers: Tensor, state: State, knobs: Knobs
    ) -> tuple[Tensor, State]:
        """Return the corrected average, and the next c."""
        alpha, beta, a = knobs["alpha"], knobs["beta"], knobs["answered"]
        c = (peers - own) / a if self.start == "first" and not state["seen"] else state["c"]
        direction, c = corrected_step(
            own, peers, c, alpha=alpha, beta=beta, correction=self.correction, answered=a
        )
        return direction, {"c": c}

    def repeats(self, state: State) -> bool:
        """Say whether c has started: the first bias, which it starts from, is a step of its own."""
        return self.start == "zero" or bool(state["seen"])

    def with_knobs(self, knobs: Knobs) -> Self:
        """Return the rule with these α and β; β has been warmed up already."""
        return replace(self, warm_up=False, **knobs)

    def knobs_at(self, state: State) -> dict[str, float]:
        """Return α and β at the state's step."""
        knobs = super().knobs_at(state)
        return (
            knobs | {"beta": max(knobs["beta"], 1 / (state["seen"] + 1))} if self.warm_up else knobs
        )

    def after(self, state: State, knobs: Knobs, answered: float) -> State:
        """Return the plain part of the state after a step."""
        return super().after(state, knobs, answered) | {"seen": state["seen"] + bool(answered)}


@dataclass(frozen=True)
class OracleCorrection(Rule):
    """Bias correction with the true bias, for problems where it is known (Theorem 2).

        d_t = (1 − α) g_0 + α (g_avg − c_t),   c_t = ∇f_avg(x_t) − ∇f_0(x_t)

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step.
        bias: the true bias as a function of x, with the oracle's noise if it has any.
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None.

    Example:
        >>> import torch
        >>> rule = OracleCorrection(alpha=1.0, bias=lambda x: 4 + 0 * x)
        >>> g = Gradients(own=torch.tensor([1.1]), peers=torch.tensor([5.0]), x=torch.zeros(1))
        >>> rule(g, rule.init(torch.zeros(1)))[0]
        tensor([1.])
    """

    alpha: Knob
    bias: Callable[[Tensor], Tensor]
    tau: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_knob("alpha", self.alpha)
        check_tau(self.tau)

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the corrected average and the next state."""
        if g.x is None:
            raise KnobError(
                "`OracleCorrection` needs the point of the gradients: `Gradients(…, x=x)`"
            )
        alpha = value_at("alpha", self.alpha, state["step"])
        peers, answered = g.average(self.tau)
        following = {"step": state["step"] + 1, "weight": alpha * answered}
        if not answered:
            return g.own, following
        return combined(g.own, peers, alpha, self.bias(g.x), answered), following
