"""SCAFFOLD: control variates correct local steps, so that users do not drift towards their own optima."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.arguments import POSITIVE, checked, whole
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(option=whole(1, 2), server_lr=POSITIVE)
class Scaffold(LocalSteps):
    """Correct every local step by an estimate of how the user's gradient differs from the mean.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c)
        c_k⁺ = g_k(x), over all examples of user k                         (option I)
        c_k⁺ = c_k − c + (x − x_k) / (Kη)                                  (option II)
        x ← x + η_g mean_k (x_k − x),      c ← mean_k c_k⁺

    Its fixed point is the minimiser of the mean of the f_k for every K; that of FedAvg is not. All
    users get one model. All take part in every round, or a sample (`Sampled`): c then moves by the
    sample's share of the users.

    Args:
        local_steps: K.
        option: how c_k is updated: 1 costs a pass over all examples, 2 costs nothing.
        server_lr: η_g.

    Reference: Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning,
    ICML 2020, Algorithm 1, equations 3–5.

    Example:
        >>> Scaffold(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    option: Literal[1, 2] = 2
    server_lr: float = 1.0

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round; option I adds a pass over all examples."""
        return self.local_steps + (self.option == 1)

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and no correction yet."""
        return {"step": 0, "x": x, "c": x.new_zeros(len(users.names), x.numel())}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, step = state["x"], state["c"], state["step"]
        points, following = self.corrected_steps(users, x, c, c.mean(0), step=step, lr=lr)
        if self.option == 1:
            following = users.full_gradients(x.expand_as(c))
        moved = torch.lerp(x, users.mean(points), self.server_lr)
        return {"step": step + self.local_steps, "x": moved, "c": users.moved(following, c)}
