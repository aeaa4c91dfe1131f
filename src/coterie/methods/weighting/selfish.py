"""Selfish federated learning: several internal users share one objective, and the others help."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import SHARE, instance, listed, optional
from coterie.errors import KnobError
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State

_NAMES = listed(instance(str, ""), "a list of names of peers", {str: 'write `internal=["ward 3"]`'})


@dataclass(frozen=True)
class Selfish(LocalSteps):
    """Minimise the mean loss of the internal users, with local steps of all users corrected towards it.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c_I),   c_I = mean over internal
        users of c_k c_k⁺ = c_k − c_I + (x − x_k) / (Kη) x ← (1 − α) mean_I x_k + α mean_E x_k

    where I are user 0 and the internal users named, and E the external ones. Its fixed point is the
    minimiser of mean_I f_k for every K and α, as long as η is small for the external users'
    curvature: they reduce the noise and add no bias, as in bias correction. With few own examples
    that minimiser overfits. α = 0 is SCAFFOLD among the internal users. In the paper external users
    have weights; here all are equal.

    Args:
        local_steps: K.
        internal: the names of the internal users other than user 0.
        alpha: α, the external users' weight, in [0, 1]; when None, all users have equal weight.

    Reference: The setting of Luo, Hu and Yu, Rethinking client reweighting for selfish federated
    learning, 2021; the corrections of Karimireddy et al., SCAFFOLD, ICML 2020.

    Example:
        >>> Selfish(local_steps=5, internal=("ward 3",)).gradients_a_round
        5
    """

    local_steps: int = 5
    internal: tuple[str, ...] = ()
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "internal", _NAMES("internal", self.internal))
        optional(SHARE)("alpha", self.alpha)  # None gives all users equal weight

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and no correction yet."""
        if unknown := [name for name in self.internal if name not in users.names[1:]]:
            raise KnobError(
                f"`internal` names {unknown[0]!r}, who is no peer; the peers are {users.names[1:]}"
            )
        return {"step": 0, "x": x, "c": x.new_zeros(len(users.names), x.numel())} | weighed(
            self._weights(users, x)
        )

    def _inside(self, users: Clients, like: Tensor) -> Tensor:
        """Return the weight of each user in the mean of the internal ones."""
        inside = like.new_tensor(
            [k == 0 or name in self.internal for k, name in enumerate(users.names)]
        )
        return inside / inside.sum()

    def _weights(self, users: Clients, like: Tensor) -> Tensor:
        inside = self._inside(users, like)
        outside = (inside == 0).to(inside)
        if users.present is not None:
            inside, outside = inside * users.present, outside * users.present
            inside = inside / inside.sum()
        if self.alpha is None or not outside.any():
            here = (inside + outside > 0).to(inside)
            return here / here.sum()
        return torch.lerp(inside, outside / outside.sum(), self.alpha)

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, step = state["x"], state["c"], state["step"]
        points, following = self.corrected_steps(
            users, x, c, self._inside(users, x) @ c, step=step, lr=lr
        )
        weights = self._weights(users, x)
        moved = {"x": weights @ points, "c": users.moved(following, c)}
        return {"step": step + self.local_steps} | moved | weighed(weights)
