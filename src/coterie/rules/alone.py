"""Training alone: the own gradient and nobody else's."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from coterie.gradients.gradients import Gradients
from coterie.rules.rule import Capturable, State


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
