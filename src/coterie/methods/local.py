"""Local steps: the plain gradient steps that users take between two exchanges."""

from typing import Any, ClassVar

from torch import Tensor

from coterie.arguments import COUNT
from coterie.methods.clients import Clients
from coterie.rules import State


class LocalSteps:
    """What the methods share whose users take `local_steps` steps in a round."""

    local_steps: int
    models_in: ClassVar[str] = "x"
    """The entry of the state that holds the models: a row for each user, or one vector for all."""

    def __post_init__(self) -> None:
        COUNT("local_steps", self.local_steps)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps

    def models(self, state: State) -> Tensor:
        """Return the personal models, or the one for all as a row."""
        models: Tensor = state[self.models_in]
        return models.reshape(-1, models.shape[-1])

    def corrected_steps(
        self, users: Clients, x: Tensor, c_k: Tensor, c: Tensor, *, step: int, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Take SCAFFOLD's local steps from x, and return where they lead and the next corrections.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c);   c_k⁺ = c_k − c + (x − x_k) /
        (Kη)
        """
        points = local_steps(users, x.expand_as(c_k), step, self.local_steps, lr=lr, add=c - c_k)
        users.exchange(down=2 * x.numel(), up=2 * x.numel())
        return points, c_k - c + (x - points) / (self.local_steps * lr)


def local_steps(
    users: Clients, points: Tensor, step: int, count: int, *, lr: float, add: Tensor | None = None
) -> Tensor:
    """Let every user take plain gradient steps from its point, x_k ← x_k − η (g_k(x_k) + a_k).

    `points` and a_k, in `add`, are a row for each user; one row of points moves user 0 alone.
    """
    return users.local_steps(points, step, count, lr=lr, add=add)


def weighed(weights: Tensor) -> dict[str, Any]:
    """Return the entries of the state by which a method reports user 0's weight and then its peers'."""
    return {"weights": weights, "weight": float(weights[1:].sum())}
