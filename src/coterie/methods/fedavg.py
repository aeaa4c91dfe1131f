"""Federated averaging: local steps by everybody from a common point, then their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.methods.federation import Federation
from coterie.methods.local import check_local_steps, local_steps
from coterie.rules import State


@dataclass(frozen=True)
class FedAvg:
    """Average models that everybody has trained for a few steps from the last average.

        x_k ← x, then K times  x_k ← x_k − η g_k(x_k);      x ← Σ p_k x_k

    With one local step it is gradient descent on Σ p_k f_k: the pooled objective where p_k are the shares of the
    examples. With more, users run towards their own optima: on quadratics f_k = ½(x − o_k)ᵀA_k(x − o_k) it ends at
    the point that solves  Σ p_k (1 − (1 − ηA_k)^K)(x − o_k) = 0, not at the minimiser of the average.

    It makes one model for all. Everybody takes part in every round, unlike in the paper, where a sample does.

    Args:
        local_steps: K.
        shares: p_k: by the number of `"examples"`, as in the paper, or `"equal"`.

    Reference:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.

    Example:
        >>> FedAvg(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 1
    shares: Literal["examples", "equal"] = "examples"

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps

    def init(self, users: Federation, x: Tensor) -> State:
        """Return the state before the first round: x."""
        return {"step": 0, "x": x}

    def round(self, users: Federation, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        points = local_steps(users, x.expand(len(users.names), -1), step, self.local_steps, lr=lr)
        users.exchange(down=x.numel(), up=x.numel())
        p = users.shares if self.shares == "examples" else users.shares.new_full((len(points),), 1 / len(points))
        return {"step": step + self.local_steps, "x": p @ points}

    def models(self, state: State) -> Tensor:
        """Return x, one model for all."""
        x: Tensor = state["x"]
        return x.unsqueeze(0)
