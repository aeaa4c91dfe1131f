"""MVR, or STORM: user 0 alone, with momentum that is corrected for the movement of the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.errors import KnobError
from coterie.methods.clients import Clients
from coterie.methods.local import check_local_steps
from coterie.rules import State


@dataclass(frozen=True)
class MVR:
    """Average past gradients as momentum does, each corrected for the movement of the model since.

        d_t = g_0(x_t) + (1 − a) (d_{t−1} − g_0(x_{t−1})),      x_{t+1} = x_t − η d_t

    both g_0 on the batch of step t. a = 1 is SGD. Unlike SVRG and SAGA it needs no pass over the examples and no
    table, so it works on streams. The error of d_t decreases with a and η, but not to 0 while they are constant.
    The model ends closer to the optimum than with SGD only where a is well below η times the curvature. d_0 is the
    first gradient. a is constant here, and so is η without a `scheduler`; in the papers both decrease.

    Args:
        local_steps: the number of steps in a round.
        rate: a, the weight of the new gradient, in (0, 1].

    Reference:
        Cutkosky and Orabona, Momentum-based variance reduction in non-convex SGD (STORM), NeurIPS 2019. Tran-Dinh
        et al., A hybrid stochastic optimization framework for composite nonconvex optimization, 2019.

    Example:
        >>> MVR(local_steps=10).gradients_a_round
        20
    """

    local_steps: int = 10
    rate: float = 0.1

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)
        if not 0 < self.rate <= 1:
            raise KnobError(f"`rate` must lie in (0, 1], got {self.rate!r}")

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return 2 * self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, with no gradient yet."""
        return {"step": 0, "x": x, "before": x, "weight": 0.0}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, x, before = state["step"], state["x"], state["before"]
        d: Tensor | None = state.get("d")
        for t in range(step, step + self.local_steps):
            fresh, old = (users.gradients(point.unsqueeze(0), t)[0] for point in (x, before))
            d = fresh if d is None else fresh + (1 - self.rate) * (d - old)
            x, before = x - lr * d, x
        return {"step": step + self.local_steps, "x": x, "before": before, "d": d, "weight": 0.0}

    def models(self, state: State) -> Tensor:
        """Return x, the model of user 0."""
        x: Tensor = state["x"]
        return x.unsqueeze(0)
