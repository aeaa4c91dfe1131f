"""Mime and MimeLite: local steps that mimic those of a server that has all examples."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import checked, real
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(momentum=real("lie in [0, 1)", lambda momentum: 0 <= momentum < 1))
class Mime(LocalSteps):
    """Use the server's momentum in every local step, and update it only when the round ends.

        G = mean_k ∇f_k(x), over all examples
        x_k ← x, then K times  x_k ← x_k − η ((1 − β) d_k + β m)
        d_k = g_k(x_k)                      (MimeLite)
        d_k = g_k(x_k) − g_k(x) + G         (Mime; both g_k on the same batch)
        x ← mean_k x_k,      m ← (1 − β) G + β m

    Mime's fixed point is the minimiser of the mean of the f_k for every K. MimeLite's is not; at β
    = 0 MimeLite is FedAvg with equal shares. All users get one model. All take part in every round,
    or a sample: `Sampled`. The paper allows the statistics of any server optimizer; here they are
    those of SGD with momentum.

    Args:
        local_steps: K.
        momentum: β, in [0, 1).
        lite: omit the correction, which halves the number of gradients.

    Reference: Karimireddy et al., Breaking the centralized barrier for cross-device federated
    learning, NeurIPS 2021 (Mime: mimicking centralized stochastic algorithms in federated learning,
    2020), Algorithm 1.

    Example:
        >>> Mime(local_steps=5).gradients_a_round, Mime(local_steps=5, lite=True).gradients_a_round
        (11, 6)
    """

    local_steps: int = 5
    momentum: float = 0.9
    lite: bool = False

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, one of them over all its examples."""
        return self.local_steps * (1 if self.lite else 2) + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, at rest."""
        return {"step": 0, "x": x, "m": x.new_zeros(x.shape)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, m, step = state["x"], state["m"], state["step"]
        start = x.expand(len(users.names), -1)
        mean = users.mean(users.full_gradients(start))
        points = start
        for k in range(self.local_steps):
            d = users.gradients(points, step + k)
            if not self.lite:
                d = d - users.gradients(start, step + k) + mean
            points = points - lr * ((1 - self.momentum) * d + self.momentum * m)
        users.exchange(down=x.numel() * (2 if self.lite else 3), up=2 * x.numel())
        m = (1 - self.momentum) * mean + self.momentum * m
        return {"step": step + self.local_steps, "x": users.mean(points), "m": m}
