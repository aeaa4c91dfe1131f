"""pFedMe: personal models near a common one, which moves to where they are (Moreau envelopes)."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(inner_steps=COUNT, penalty=POSITIVE, inner_lr=POSITIVE, server_lr=POSITIVE)
class PFedMe(LocalSteps):
    """Fit a personal model near the local one, move the local one to it, and average the local ones.

        w_k ← w, then K times:
            θ_k ← w_k, then S times, all on one batch,  θ_k ← θ_k − a (g_k(θ_k) + λ (θ_k − w_k))
            w_k ← w_k − ηλ (w_k − θ_k)
        w ← (1 − β) w + β mean_k w_k

    θ_k, the personal model, is about argmin f_k(θ) + (λ/2)‖θ − w_k‖², and λ(w_k − θ_k) the gradient
    of its least value, so w goes down the mean of these. On quadratics, with M_k = A_k + λ, P_k = 1
    − (1 − aM_k)^S and E_k = λP_kM_k⁻¹A_k, w converges to the solution of  Σ (1 − (1 − ηE_k)^K)(w −
    o_k) = 0. Here θ_k starts at w_k in every local step. The step ηλ must be below 2.

    Args:
        local_steps: K.
        penalty: λ; the larger it is, the nearer θ_k is to w.
        inner_steps: S.
        inner_lr: a, the step size of θ_k; η is that of training.
        server_lr: β.

    Reference: T. Dinh, Tran, Nguyen, Personalized federated learning with Moreau envelopes, NeurIPS
    2020, Algorithm 1.

    Example:
        >>> PFedMe(local_steps=2, inner_steps=5).gradients_a_round
        10
    """

    local_steps: int = 1
    penalty: float = 1.0
    inner_steps: int = 5
    inner_lr: float = 0.05
    server_lr: float = 1.0

    models_in = "theta"

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps * self.inner_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        return {"step": 0, "w": x, "theta": x.repeat(len(users.names), 1)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        w, theta, step = state["w"], state["theta"], state["step"]
        local = w.expand_as(theta)
        for batch in range(step, step + self.local_steps):
            near = local
            for _ in range(self.inner_steps):
                near = near - self.inner_lr * (
                    users.gradients(near, batch) + self.penalty * (near - local)
                )
            theta = users.moved(near, theta)
            local = local - lr * self.penalty * (local - near)
        users.exchange(down=w.numel(), up=w.numel())
        w = w + self.server_lr * (users.mean(local) - w)
        return {"step": step + self.local_steps, "w": w, "theta": theta}
