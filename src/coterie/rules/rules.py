"""Rules: from the gradients of one step to the direction user 0 follows.

Alone, weighted gradient averaging (Algorithm 2) and bias correction (Algorithm 3) are one family,

    d_t     = (1 − α) g_0 + α (g_avg − w c_t)
    c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

at α = 0, at w = 0 and at w = 1. `w` is `correction`; λ = α(1 − w) is the weight that the peers' objective
keeps in what is really minimised, (1 − λ) f_0 + λ f_avg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.rules import kernels as fused
from coterie.rules.knobs import Auto, Knob, check_knob, check_tau, value_at, weights_over
from coterie.users.user import User

State: TypeAlias = dict[str, Any]
"""A rule's memory: tensors and numbers by name, so that a checkpoint can hold it. `step` counts the steps
taken; `weight` is the weight that the peers had in the last one."""


def weights_in(state: State) -> dict[str, float]:
    """Return the weights in a rule's state by name; none where it has none.

    A rule that finds its weights as it goes keeps them in `tau`, by name or as a tensor with `names` beside it.

    Example:
        >>> weights_in({"step": 1, "tau": torch.tensor([0.25, 0.75]), "names": ["a", "b"]})
        {'a': 0.25, 'b': 0.75}
    """
    tau = state.get("tau", {})
    return dict(zip(state["names"], tau.tolist(), strict=True)) if isinstance(tau, Tensor) else dict(tau)


@runtime_checkable
class Rule(Protocol):
    """How user 0 turns gradients into a direction. The knobs are fields; the state is passed and returned."""

    @property
    def needs_rows(self) -> bool:
        """Whether every peer's gradient is needed, not only their weighted sum."""

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weight of each peer to ask; an empty mapping asks nobody."""

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the direction and the next state."""


@runtime_checkable
class Capturable(Rule, Protocol):
    """A rule whose step is the same work on tensors every time, but for knobs that are known beforehand.

    Such steps can be captured as a CUDA graph; see `coterie.training.captured`.
    A gradient that is not finite must make the direction not finite.
    """

    def ahead(self, state: State) -> tuple[dict[str, float], State] | None:
        """Return the next step's knobs and the plain part of the state after it, if all peers answer.

        None where that step is not like the others, as the first may be.
        """

    def at(self, knobs: Mapping[str, Tensor]) -> Rule:
        """Return the rule with these knobs, which the device reads when it takes the step."""


@dataclass(frozen=True)
class Alone:
    """Follow the own gradient: d_t = g_0.

    Example:
        >>> rule = Alone()
        >>> rule(Gradients(own=torch.tensor([1.0])), rule.init(torch.zeros(1)))[0]
        tensor([1.])
    """

    needs_rows: ClassVar[bool] = False

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Ask nobody."""
        return {}

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""
        return {"step": 0, "weight": 0.0}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return g_0."""
        return g.own, {"step": state["step"] + 1, "weight": 0.0}

    def ahead(self, state: State) -> tuple[dict[str, float], State]:
        """Return no knobs: there are none."""
        return {}, {"step": state["step"] + 1, "weight": 0.0}

    def at(self, knobs: Mapping[str, Tensor]) -> Alone:
        """Return this rule."""
        return self


@dataclass(frozen=True)
class WeightedAveraging:
    """Average the own gradient with the peers' (Algorithm 2): d_t = (1 − α) g_0 + α Σ τ_k g_k.

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step; "auto": what costs least by
            Theorem 1 for the constants that `train` measures before the first step, and for τ = None the τ of
            least cost with it, by water-filling (see docs/estimates.md).
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None.
        aggregator: a robust aggregator of the peers' gradients in the place of Σ τ_k g_k; it takes no `tau`.

    Example:
        >>> rule = WeightedAveraging(alpha=0.25)
        >>> g = Gradients(own=torch.tensor([4.0]), peers=torch.tensor([0.0]))
        >>> rule(g, rule.init(torch.zeros(1)))[0]
        tensor([3.])
    """

    alpha: Knob | Auto
    tau: Mapping[str, float] | None = None
    aggregator: Aggregator | None = None

    def __post_init__(self) -> None:
        check_knob("alpha", self.alpha, auto=True)
        check_tau(self.tau, self.aggregator)

    @property
    def needs_rows(self) -> bool:
        """Whether there is an aggregator, which needs every peer's gradient."""
        return self.aggregator is not None

    @classmethod
    def pooled(cls, me: User, peers: Sequence[User]) -> WeightedAveraging:
        """Return the averaging that minimises the mean loss over everybody's examples together.

        Example:
            >>> small = User("me", torch.zeros(10, 1), torch.arange(10.0))
            >>> large = User("a", torch.zeros(30, 1), torch.arange(30.0))
            >>> WeightedAveraging.pooled(small, [large])
            WeightedAveraging(alpha=0.75, tau={'a': 1.0}, aggregator=None)
        """
        total = sum(len(peer) for peer in peers)
        return cls(alpha=total / (total + len(me)), tau={peer.name: len(peer) / total for peer in peers})

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Return τ over the given peers."""
        return weights_over(self.tau, names, self.aggregator)

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""
        return {"step": 0, "weight": 0.0}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return (1 − α) g_0 + α g_avg and the next state."""
        alpha = value_at("alpha", self.alpha, state["step"])
        average = g.average(self.tau, self.aggregator)
        return (
            _direction(g, average, alpha),
            {"step": state["step"] + 1, "weight": alpha * average[1]},
        )

    def ahead(self, state: State) -> tuple[dict[str, float], State]:
        """Return the next α; see `Capturable`."""
        alpha = value_at("alpha", self.alpha, state["step"])
        return {"alpha": alpha}, {"step": state["step"] + 1, "weight": alpha}

    def at(self, knobs: Mapping[str, Tensor]) -> WeightedAveraging:
        """Return the rule with this α."""
        return replace(self, alpha=knobs["alpha"])


@dataclass(frozen=True)
class BiasCorrection:
    """Average, less the running estimate of the peers' bias (Algorithm 3).

        d_t     = (1 − α) g_0 + α (g_avg − w c_t)
        c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

    d_t uses the old c_t: the new one contains this step's noise. In a step where a share a < 1 of the peers'
    weight answers, the rest of g_avg is g_0, and both lines use a·c_t for the bias of what answered.

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step; "auto": that of least noise, by
            the noise that `train` measures before the first step (see docs/estimates.md).
        beta: β, the rate at which the bias estimate follows, in [0, 1]; a number or a function of the step; "auto":
            that of the least bound by the corrected Theorem 3.
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None, and where a knob is "auto",
            equal weights of the peers whose Hessians differ little enough from user 0's for the least bound.
        correction: w, how much of the bias is taken away, in [0, 1]: 0 is `WeightedAveraging`, 1 the paper.
        start: c_0: the `"first"` observed bias, as in the paper, or `"zero"`, as in the authors' notebook.
        warm_up: follow with β_t = max(β, 1/(t + 1)), so that c_t is at first the mean of the biases seen
            and a small β need not wait 1/β steps; False gives the paper's recursion exactly.
        aggregator: a robust aggregator of the peers' gradients in the place of g_avg; it takes no `tau`.

    Example:
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

    def __post_init__(self) -> None:
        check_knob("alpha", self.alpha, auto=True)
        check_knob("beta", self.beta, auto=True)
        check_knob("correction", self.correction)
        check_tau(self.tau, self.aggregator)
        if self.start not in ("first", "zero"):
            raise KnobError(f'`start` must be "first" or "zero", got {self.start!r}')

    @property
    def needs_rows(self) -> bool:
        """Whether there is an aggregator, which needs every peer's gradient."""
        return self.aggregator is not None

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Return τ over the given peers."""
        return weights_over(self.tau, names, self.aggregator)

    def init(self, x: Tensor) -> State:
        """Return the state before the first step; `seen` counts the steps in which a bias was observed."""
        return {"step": 0, "weight": 0.0, "seen": 0, "c": torch.zeros_like(x, requires_grad=False)}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the corrected average and the next state."""
        step, seen, c = state["step"], state["seen"], state["c"]
        alpha, beta = value_at("alpha", self.alpha, step), value_at("beta", self.beta, step)
        peers, answered = g.average(self.tau, self.aggregator)
        if isinstance(self.alpha, Tensor) and isinstance(self.beta, Tensor) and peers.is_cuda:  # captured
            direction, following = fused.corrected(g.own, peers, c, (self.alpha, self.beta), self.correction)
            return direction, {**state, "c": following}
        if answered:
            bias = peers - g.own
            if self.start == "first" and not seen:
                c = bias / answered
            if self.warm_up:
                beta = max(beta, 1 / (seen + 1))
            if answered < 1:
                bias.add_(c, alpha=1 - answered)
            following = torch.lerp(c, bias, beta, out=bias)
        else:
            following = c
        return (
            _direction(g, (peers, answered), alpha, self.correction, c),
            {"step": step + 1, "weight": alpha * answered, "seen": seen + bool(answered), "c": following},
        )

    def ahead(self, state: State) -> tuple[dict[str, float], State] | None:
        """Return the next α and β; see `Capturable`. The first bias, which c starts from, is a step of its own."""
        step, seen = state["step"], state["seen"]
        if not seen and self.start == "first":
            return None
        alpha, beta = value_at("alpha", self.alpha, step), value_at("beta", self.beta, step)
        beta = max(beta, 1 / (seen + 1)) if self.warm_up else beta
        return {"alpha": alpha, "beta": beta}, {"step": step + 1, "weight": alpha, "seen": seen + 1}

    def at(self, knobs: Mapping[str, Tensor]) -> BiasCorrection:
        """Return the rule with these α and β."""
        return replace(self, alpha=knobs["alpha"], beta=knobs["beta"], warm_up=False)


@dataclass(frozen=True)
class OracleCorrection:
    """Bias correction with the true bias, for problems where it is known (Theorem 2).

        d_t = (1 − α) g_0 + α (g_avg − c_t),   c_t = ∇f_avg(x_t) − ∇f_0(x_t)

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step.
        bias: the true bias as a function of x, with the oracle's noise if it has any.
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None.

    Example:
        >>> rule = OracleCorrection(alpha=1.0, bias=lambda x: 4 + 0 * x)
        >>> g = Gradients(own=torch.tensor([1.1]), peers=torch.tensor([5.0]), x=torch.zeros(1))
        >>> rule(g, rule.init(torch.zeros(1)))[0]
        tensor([1.])
    """

    alpha: Knob
    bias: Callable[[Tensor], Tensor]
    tau: Mapping[str, float] | None = None

    needs_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_knob("alpha", self.alpha)
        check_tau(self.tau)

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Return τ over the given peers."""
        return weights_over(self.tau, names)

    def init(self, x: Tensor) -> State:
        """Return the state before the first step."""
        return {"step": 0, "weight": 0.0}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the corrected average and the next state."""
        if g.x is None:
            raise KnobError("`OracleCorrection` needs the point of the gradients: `Gradients(…, x=x)`")
        alpha = value_at("alpha", self.alpha, state["step"])
        average = g.average(self.tau)
        return (
            _direction(g, average, alpha, 1.0, self.bias(g.x)),
            {"step": state["step"] + 1, "weight": alpha * average[1]},
        )


def _direction(
    g: Gradients, average: tuple[Tensor, float], alpha: float, correction: float = 0.0, c: Tensor | None = None
) -> Tensor:
    """Return (1 − α) g_0 + α (g_avg − w a c), a the share that answered; g_0 to the bit where nobody did."""
    peers, answered = average
    if not answered:
        return g.own
    if c is None or not correction:
        return torch.lerp(g.own, peers, alpha)
    corrected = torch.sub(peers, c, alpha=correction * answered)
    return torch.lerp(g.own, corrected, alpha, out=corrected)
