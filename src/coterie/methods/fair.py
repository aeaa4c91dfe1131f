"""Fair objectives: one model for all that is good for those users too whom it fits worst."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import NOT_NEGATIVE, POSITIVE, checked
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State

LEAST_LOSS = 1e-10
"""What q-FFL takes a loss for that is lower, as its authors' code does.

It divides by powers of losses.
"""


@dataclass(frozen=True)
@checked(weight_lr=POSITIVE)
class AFL(LocalSteps):
    """Minimise the loss of the worst mixture of all users: those who fare worst count most.

        x_k ← x, then K times  x_k ← x_k − η g_k(x_k);      x ← Σ λ_k x_k
        λ ← the nearest point of the simplex to  λ + γ (ℓ_k(x))_k,  ℓ_k the loss on the round's
        first batch

    Descent in x and ascent in λ on  min_x max_λ Σ λ_k f_k(x), from λ = p, the shares of the
    examples. The paper takes one local step; with K > 1 users drift as in FedAvg. With γ → 0 it is
    FedAvg. Where γ is large, the last iterate circles around the solution; the mean of the
    iterates, which the paper returns, does not. Users whose noise no model fits keep a large loss,
    and take all the weight.

    Args:
        local_steps: K.
        weight_lr: γ, the step size of λ.
        averaged: whether the model is the mean of x after all rounds, as in the paper, or x after
            the last.

    Reference: Mohri, Sivek, Suresh, Agnostic federated learning, ICML 2019, Algorithm 1.

    Example:
        >>> AFL(weight_lr=0.05).gradients_a_round
        1
    """

    local_steps: int = 1
    weight_lr: float = 0.01
    averaged: bool = False

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and users weighted by their examples."""
        return {"step": 0, "x": x, "mean": x} | weighed(users.shares)

    def models(self, state: State) -> Tensor:
        """Return the model for all as a row."""
        x: Tensor = state["mean" if self.averaged else "x"]
        return x.unsqueeze(0)

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, weights = state["x"], state["step"], state["weights"]
        start = x.expand(len(users.names), -1)
        losses = users.losses(start, step)
        points = users.local_steps(start, step, self.local_steps, lr=lr)
        users.exchange(down=x.numel(), up=x.numel() + 1)
        here = users.moved(weights, torch.zeros_like(weights))
        x = (here / here.sum()) @ points if here.sum() > 0 else users.mean(points)
        losses = losses.nan_to_num(0.0, posinf=0.0)  # of a peer that is left out
        weights = _on_simplex(users.moved(weights + self.weight_lr * losses, weights))
        step += self.local_steps
        mean = torch.lerp(state["mean"], x, self.local_steps / step)
        return {"step": step, "x": x, "mean": mean} | weighed(weights)


@dataclass(frozen=True)
@checked(q=NOT_NEGATIVE)
class QFFL(LocalSteps):
    """Minimise a power of the losses, so that a user counts the more the larger its loss is.

        F_k = the mean loss at x over all examples of user k;      x_k ← x, then K times  x_k ← x_k
        − η g_k(x_k) Δ_k = F_k^q (x − x_k) / η,      h_k = q F_k^(q−1) ‖x − x_k‖² / η² + F_k^q / η x
        ← x − Σ p_k Δ_k / Σ p_k h_k,   p_k the shares of the examples

    The paper's q-FedAvg. With K = 1 it converges to the minimiser of  Σ p_k F_k^(q+1) / (q + 1). q
    = 0 is FedAvg; q → ∞ leads to the objective of `AFL`. h_k bounds the objective's curvature where
    1/η bounds that of f_k, so one η suits all q. Losses must not be negative. In a round a user
    also computes the loss of all its examples.

    Args:
        local_steps: K.
        q: how much the worst users count.

    Reference: Li, Sanjabi, Beirami, Smith, Fair resource allocation in federated learning, ICLR
    2020, Algorithm 2.

    Example:
        >>> QFFL(local_steps=5, q=2.0).gradients_a_round
        5
    """

    local_steps: int = 1
    q: float = 1.0

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, q = state["x"], state["step"], self.q
        losses = (
            users.losses_over_all(x.unsqueeze(0), step)[0]
            .nan_to_num(0.0, posinf=0.0)
            .clamp(min=LEAST_LOSS)
        )
        points = users.local_steps(x.expand(len(users.names), -1), step, self.local_steps, lr=lr)
        users.exchange(down=x.numel(), up=x.numel() + 1)
        moves = (x - points) / lr
        powers = losses**q
        curvatures = q * losses ** (q - 1) * moves.square().sum(1) + powers / lr
        x = x - (users.shares * powers) @ moves / (users.shares @ curvatures)
        return {"step": step + self.local_steps, "x": x}


def _on_simplex(values: Tensor) -> Tensor:
    """Return the nearest point whose entries are not negative and sum to 1.

    Max(0, v_k − t), t set by the sum.
    """
    values = values - values.max()  # the same point; 1 is lost beside huge numbers
    falling = values.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(values) + 1, device=values.device)
    return (values - excess[falling > excess][-1]).clamp(min=0)
