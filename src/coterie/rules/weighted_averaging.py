"""Weighted gradient averaging, Algorithm 2, and training alone, where the peers have no weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.gradients.gradients import Gradients
from coterie.rules.formula import combined
from coterie.rules.rule import (
    Auto,
    Capturable,
    FormulaRule,
    Knob,
    Knobs,
    State,
    check_knob,
    check_tau,
)
from coterie.users.user import User


@dataclass(frozen=True)
class Alone(Capturable):
    """Follow the own gradient: d_t = g_0.

    Example:
        >>> import torch
        >>> rule = Alone()
        >>> rule(Gradients(own=torch.tensor([1.0])), rule.init(torch.zeros(1)))[0]
        tensor([1.])
    """

    in_rows = True  # many runs follow it as rows of one matrix

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Ask nobody."""
        return {}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return g_0."""
        return g.own, self.next_knobs(state)[1]

    def next_knobs(self, state: State) -> tuple[dict[str, float], State]:
        """Return no knobs: there are none."""
        return {}, {"step": state["step"] + 1, "weight": 0.0}


@dataclass(frozen=True)
class WeightedAveraging(FormulaRule):
    """Average the own gradient with the peers' (Algorithm 2): d_t = (1 − α) g_0 + α Σ τ_k g_k.

    Args:
        alpha: α, the peers' weight, in [0, 1]; a number or a function of the step; "auto": what
            costs least by Theorem 1 for the constants that `train` measures before the first step,
            and for τ = None the τ of least cost with it, by water-filling (see docs/estimates.md).
        tau: τ, the weight of each peer by name, summing to 1; equal weights when None.
        aggregator: a robust aggregator of the peers' gradients in the place of Σ τ_k g_k; it takes
            no `tau`.

    Example:
        >>> import torch
        >>> from coterie import Gradients
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

    @classmethod
    def pooled(cls, me: User, peers: Sequence[User]) -> Self:
        """Return the averaging that minimises the mean loss over everybody's examples together.

        Example:
            >>> import torch
            >>> small = User("me", torch.zeros(10, 1), torch.arange(10.0))
            >>> large = User("a", torch.zeros(30, 1), torch.arange(30.0))
            >>> WeightedAveraging.pooled(small, [large])
            WeightedAveraging(alpha=0.75, tau={'a': 1.0}, aggregator=None)
        """
        total = sum(len(peer) for peer in peers)
        return cls(
            alpha=total / (total + len(me)), tau={peer.name: len(peer) / total for peer in peers}
        )

    def direction(
        self, own: Tensor, peers: Tensor, state: State, knobs: Knobs
    ) -> tuple[Tensor, State]:
        """Return (1 − α) g_0 + α g_avg."""
        return combined(own, peers, knobs["alpha"]), {}
