"""FedFomo: weigh each user's model by how much it lowers user 0's validation loss per unit of distance."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.arguments import checked, one_of
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State
from coterie.rules.similarity import TINY


@dataclass(frozen=True)
@checked(start=one_of("own", "mine"))
class FedFomo(LocalSteps):
    """Move towards the models that are better on user 0's validation examples.

        x_k ← K local steps of user k, from x_k (start "own") or from x (start "mine")
        w_k ∝ max(0, (L_0(x) − L_0(x_k)) / ‖x_k − x‖),  k = 0..N, to sum 1
        x ← x + Σ w_k (x_k − x),      x_0 ← x

    where L_0 is the validation loss of user 0 and x its model before the round. Where no model is
    better, x does not move. The validation examples choose the weights and the best round too: few
    of them are a noisy judge, and their loss is optimistic. In the paper every user weighs a sample
    of the others; here user 0 weighs all peers, and peers, who need no validation examples, train
    alone. `similarity.FirstOrder` is the first-order approximation.

    Args:
        local_steps: K.
        start: the model at which peers begin a round: their `"own"`, as in the paper, or user 0's,
            `"mine"`.

    Reference: Zhang, Sapra, Fidler, Yeung and Alvarez, Personalized federated learning with first
    order model optimization, ICLR 2021, equations 3 and 4.

    Example:
        >>> FedFomo(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    start: Literal["own", "mine"] = "own"

    models_in = "points"

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all users at x."""
        n = len(users.names)
        return {"step": 0, "points": x.repeat(n, 1)} | weighed(x.new_zeros(n))

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, points = state["step"], state["points"]
        x = points[0]
        points = users.local_steps(points, step, self.local_steps, lr=lr)
        users.exchange(down=x.numel() if self.start == "mine" else 0, up=x.numel())
        before, *after = users.held_out_losses(torch.cat([x.unsqueeze(0), points]))
        gains = (before - torch.stack(after)) / (points - x).norm(dim=1).clamp(min=TINY)
        gains = torch.nan_to_num(gains, nan=0.0, posinf=0.0).clamp(min=0)
        gains = users.moved(gains, torch.zeros_like(gains))
        weights = gains / gains.sum().clamp(min=TINY)
        x = x + weights @ (points - x)
        points = (
            x.repeat(len(points), 1)
            if self.start == "mine"
            else torch.cat([x.unsqueeze(0), points[1:]])
        )
        return {"step": step + self.local_steps, "points": points} | weighed(weights)
