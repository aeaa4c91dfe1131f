"""Federated averaging: local steps by everybody from a common point, then their mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.errors import KnobError
from coterie.methods.clients import Clients
from coterie.methods.local import check_local_steps, local_steps
from coterie.rules import State


@dataclass(frozen=True)
class FedAvg:
    """Average models that everybody has trained for a few steps from the last average.

        x_k ← x, then K times  x_k ← x_k − η g_k(x_k);      x ← Σ p_k x_k,  or  x ← x + aggregator(x_k − x)

    With one local step it is gradient descent on Σ p_k f_k: the pooled objective where p_k are the shares of the
    examples. With more, users run towards their own optima: on quadratics f_k = ½(x − o_k)ᵀA_k(x − o_k) it ends at
    the point that solves  Σ p_k (1 − (1 − ηA_k)^K)(x − o_k) = 0, not at the minimiser of the average.

    It makes one model for all. Everybody takes part in every round, unlike in the paper, where a sample does.

    Args:
        local_steps: K.
        shares: p_k: by the number of `"examples"`, as in the paper, or `"equal"`; an aggregator knows no shares.
        aggregator: what to take in the place of the mean, from the users' moves, one a row, to one move: a robust
            aggregator, which a few wrong users cannot lead astray.

    Reference:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.

    Example:
        >>> FedAvg(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 1
    shares: Literal["examples", "equal"] = "examples"
    aggregator: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)
        if self.shares not in ("examples", "equal"):
            raise KnobError(f'`shares` must be "examples" or "equal", got {self.shares!r}')

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x."""
        return {"step": 0, "x": x}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        points = local_steps(users, x.expand(len(users.names), -1), step, self.local_steps, lr=lr)
        users.exchange(down=x.numel(), up=x.numel())
        return {"step": step + self.local_steps, "x": self._together(users, x, points)}

    def models(self, state: State) -> Tensor:
        """Return x, one model for all."""
        x: Tensor = state["x"]
        return x.unsqueeze(0)

    def _together(self, users: Clients, x: Tensor, points: Tensor) -> Tensor:
        """Return what becomes of x when the users have moved to these points."""
        if self.aggregator is not None:
            return x + self.aggregator(points - x)
        return users.shares @ points if self.shares == "examples" else points.mean(0)
