"""Bias correction with the true bias, where it is known: the method of Theorem 2."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.rules.formula import combined
from coterie.rules.knobs import Knob, check_knob, check_tau, value_at
from coterie.rules.rule import Rule, State


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
