"""FedALA: every number of a user's model starts a round between its own value and the common one."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(weight_lr=POSITIVE, weight_steps=COUNT)
class FedALA(LocalSteps):
    """Learn for every number of the model how much of the common model to take before the own steps.

        S times, all on one batch:  W_k ← W_k − γ g_k(y_k) ⊙ (w − x_k),  kept in [0, 1],  y_k = x_k
        + (w − x_k) ⊙ W_k x_k ← y_k, then K times  x_k ← x_k − η g_k(x_k);      w ← Σ p_k x_k,  p_k
        the shares of the examples

    from W_k = 1: FedAvg, which it stays with γ = 0. The first round has no common model yet, and
    skips the learning. W_k follows the training loss, so few examples drive it to the own model
    wherever that fits them better.

    Here all numbers of the model have a weight, and S steps on one batch of a round; the authors
    weigh the last layers only by choice, take one pass over a sample of the examples, and in the
    first round passes until the loss settles.

    Args:
        local_steps: K.
        weight_lr: γ, the step size of W_k.
        weight_steps: S.

    Reference: Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedALA: adaptive local aggregation for
    personalized federated learning, AAAI 2023; the update of W_k is that of the authors' code.

    Example:
        >>> FedALA(local_steps=5).gradients_a_round
        6
    """

    local_steps: int = 5
    weight_lr: float = 1.0
    weight_steps: int = 1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps + self.weight_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        rows = x.repeat(len(users.names), 1)
        return {"step": 0, "x": rows, "common": x, "share": rows.new_ones(rows.shape)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, share, step = state["x"], state["share"], state["step"]
        lacking = state["common"] - x
        # before the first round lacking is 0, and nothing is learned
        for _ in range(self.weight_steps):
            gradient = users.gradients(x + lacking * share, step)
            share = users.moved((share - self.weight_lr * gradient * lacking).clamp(0, 1), share)
        points = users.local_steps(x + lacking * share, step + 1, self.local_steps, lr=lr)
        users.exchange(down=x.shape[1], up=x.shape[1])
        moved = users.moved(points, x)
        return {
            "step": step + 1 + self.local_steps,
            "x": moved,
            "common": users.shares @ points,
            "share": share,
        }
