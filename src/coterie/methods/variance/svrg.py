"""SVRG: user 0 alone; each step is corrected by its batch's gradient at a point with known full gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.methods.clients import Clients
from coterie.methods.local import check_local_steps
from coterie.rules import State


@dataclass(frozen=True)
class SVRG:
    """Take steps whose noise vanishes as the model converges, without peers.

        y = x, G = ∇f_0(y) over all examples, then K times  x ← x − η (g_0(x) − g_0(y) + G)

    both g_0 on the same batch. On a strongly convex finite sum it converges linearly with a constant step size,
    where SGD keeps a noise floor. The next round starts at the last x (option I of the paper). It converges to the
    optimum of the own examples, which overfits where they are few.

    Args:
        local_steps: K, the number of steps between two passes over all examples.

    Reference:
        Johnson and Zhang, Accelerating stochastic gradient descent using predictive variance reduction, NeurIPS
        2013.

    Example:
        >>> SVRG(local_steps=10).gradients_a_round
        21
    """

    local_steps: int = 10

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, one of them over all its examples."""
        return 2 * self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x."""
        return {"step": 0, "x": x, "weight": 0.0}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, start = state["step"], state["x"].unsqueeze(0)
        whole, x = users.full_gradients(start), start
        for k in range(self.local_steps):
            x = x - lr * (users.gradients(x, step + k) - users.gradients(start, step + k) + whole)
        return {"step": step + self.local_steps, "x": x[0], "weight": 0.0}

    def models(self, state: State) -> Tensor:
        """Return x, the model of user 0."""
        x: Tensor = state["x"]
        return x.unsqueeze(0)
