"""FedAMP: every user's model is drawn to a mean of the models near it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import POSITIVE, checked
from coterie.methods.clients import Clients, LocalSteps, Pull, weighed
from coterie.rules import State


@dataclass(frozen=True)
@checked(penalty=POSITIVE, scale=POSITIVE, step=POSITIVE)
class FedAMP(LocalSteps):
    """Send every user a mean of all models, the nearer ones with more weight, and pull its own steps to it.

        ξ_kj = (α/s) exp(−‖x_k − x_j‖²/s) for j ≠ k,   ξ_kk = 1 − Σ_j ξ_kj,   u_k = Σ_j ξ_kj x_j
        then K times  x_k ← x_k − η (g_k(x_k) + (λ/α) (x_k − u_k))

    Attentive message passing: a step of size α on λ Σ A(‖x_k − x_j‖²), A(z) = 1 − exp(−z/s), and
    then own steps with a penalty. Where Σ_j ξ_kj would exceed 1, all ξ_kj are divided by it, so
    that u_k stays a mean. Users far apart in parameters are strangers to each other: with s small
    it is training alone, with s large and α/s = 1/n it is pulled to the plain mean. In a large
    model all distances are large: s must be of their order.

    Args:
        local_steps: K.
        penalty: λ.
        scale: s, the squared distance over which users count as near.
        step: α.

    Reference: Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021,
    Algorithm 1, with K plain steps for the exact minimum; A is the paper's 1 − exp(−z/s).

    Example:
        >>> FedAMP(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    penalty: float = 0.1
    scale: float = 1.0
    step: float = 0.5

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        n = len(users.names)
        return {"step": 0, "x": x.repeat(n, 1)} | weighed(
            torch.eye(n, dtype=x.dtype, device=x.device)[0]
        )

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        weights = self.near(x)
        pull = Pull(self.penalty / self.step, weights @ x)
        users.exchange(down=x.shape[1], up=x.shape[1])
        moved = users.local_steps(x, step, self.local_steps, lr=lr, pull=pull)
        return {"step": step + self.local_steps, "x": users.moved(moved, x)} | weighed(weights[0])

    def near(self, x: Tensor) -> Tensor:
        """Return ξ, a row for each user."""
        apart = (x[:, None] - x[None]).square().sum(-1)
        weights = (self.step / self.scale * torch.exp(-apart / self.scale)).fill_diagonal_(0.0)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1.0)
        return weights + torch.diag(1 - weights.sum(1))
