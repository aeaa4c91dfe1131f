"""Per-FedAvg: train a common model such that one own step turns it into a good personal model."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import POSITIVE
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
class PerFedAvg(LocalSteps):
    """Average the models that all users have trained to be good *after* one own step.

        x_k ← x, then K times  y_k = x_k − a g_k(x_k),  x_k ← x_k − η (g_k(y_k) − a h_k);      x ←
        mean_k x_k h_k = 0
        (first order) h_k = (g_k(x_k + δ g_k(y_k)) − g_k(x_k − δ g_k(y_k))) / 2δ  ≈  ∇²f_k(x_k)
        g_k(y_k)   (Hessian-free)

    each g_k of a line on a new batch, the two of h_k on the same one. User k's personal model is x
    − a g_k(x).

    The Hessian-free variant with K = 1 is gradient descent on the meta-objective, mean_k f_k(x −
    a∇f_k(x)), whose minimiser on quadratics solves Σ (1 − aA_k)A_k(1 − aA_k)(x − o_k) = 0. The
    first-order variant omits a factor: it converges to the solution of Σ A_k(1 − aA_k)(x − o_k) =
    0. With K steps the matrix B_k before (x − o_k) becomes 1 − (1 − ηB_k)^K. All users take part in
    every round, or a sample: `Sampled`.

    Args:
        local_steps: K.
        inner_lr: a, the step size of the adaptation; η is that of training.
        difference: δ of the Hessian-free variant; first order when None.

    Reference: Fallah, Mokhtari, Ozdaglar, Personalized federated learning with theoretical
    guarantees: a model-agnostic meta-learning approach, NeurIPS 2020, Algorithm 1 and its two
    approximations.

    Example:
        >>> PerFedAvg(local_steps=5).gradients_a_round, PerFedAvg(5, difference=1e-3).gradients_a_round
        (11, 21)
    """

    local_steps: int = 1
    inner_lr: float = 0.01
    difference: float | None = None

    models_in = "models"

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE("inner_lr", self.inner_lr)
        if self.difference is not None:
            POSITIVE("difference", self.difference)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, including the one that adapts its own model."""
        return (2 if self.difference is None else 4) * self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, not yet adapted."""
        return {"step": 0, "x": x, "models": x.unsqueeze(0)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, a, delta = state["x"], state["step"], self.inner_lr, self.difference
        points = x.expand(len(users.names), -1)
        for _ in range(self.local_steps):
            adapted = users.local_steps(points, step, 1, lr=a)
            outer = users.gradients(adapted, step + 1)
            step += 2
            if delta is not None:
                ahead, behind = (users.gradients(points + d * outer, step) for d in (delta, -delta))
                outer = outer - a * (ahead - behind) / (2 * delta)
                step += 1
            points = points - lr * outer
        users.exchange(down=x.numel(), up=x.numel())
        x = users.mean(points)
        models = users.local_steps(x.expand(users.personal, -1), step, 1, lr=a)
        return {"step": step + 1, "x": x, "models": models}
