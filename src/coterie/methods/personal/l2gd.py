"""L2GD: own steps, and at random times a step towards the mean of all models."""

import math
from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import POSITIVE, checked, real
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State
from coterie.users.sampling import uniform


@dataclass(frozen=True)
@checked(penalty=POSITIVE, probability=real("lie between 0 and 1", lambda p: 0 < p < 1))
class L2GD(LocalSteps):
    """Toss a coin: with probability p move towards the mean of all models, else by the own gradient.

        heads:  x_k ← x_k − (ηλ/p) (x_k − mean_j x_j)           tails:  x_k ← x_k − (η/(1 − p))
            g_k(x_k)

    which in expectation is gradient descent on Σ f_k(x_k) + (λ/2) ‖x_k − mean_j x_j‖²: alone at λ →
    0, one model at λ → ∞. On quadratics the mean over time is its minimiser at any stable step
    size. At the end of a round, right after an own step, the mean differs from it by −(η/(1 − p))
    ∇f_k; each path fluctuates around it by O(√η).

    A round ends after K own steps. Consecutive heads leave the mean as it is, so they take one
    exchange. Their number before an own step is geometric and is drawn from (seed, step). The
    paper's α is nη here. A step beyond the mean, ηλ/p > 1, which the paper excludes, is cut at the
    mean.

    Args:
        local_steps: K.
        penalty: λ.
        probability: p, in (0, 1); there are Kp exchanges a round on average.

    Reference: Hanzely, Richtárik, Federated learning of a mixture of global and local models,
    arXiv:2002.05516, 2020, Algorithm 1.

    Example:
        >>> L2GD(local_steps=5, penalty=0.1).gradients_a_round
        5
    """

    local_steps: int = 1
    penalty: float = 0.1
    probability: float = 0.5

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        return {"step": 0, "x": x.repeat(len(users.names), 1)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, p = state["x"], self.probability
        kept = 1 - min(1.0, lr * self.penalty / p)
        for step in range(state["step"], state["step"] + self.local_steps):
            if heads := heads_in_a_row(p, users.seed, step):
                centre = users.mean(x)
                x = users.moved(centre + kept**heads * (x - centre), x)
                users.exchange(down=x.shape[1], up=x.shape[1])
            x = users.local_steps(x, step, 1, lr=lr / (1 - p))
        return {"step": state["step"] + self.local_steps, "x": x}


def heads_in_a_row(probability: float, seed: int, step: int) -> int:
    """Return how many times a coin shows heads before tails: m with probability pᵐ(1 − p)."""
    return int(math.log1p(-uniform(seed, "coin", step)) / math.log(probability))
