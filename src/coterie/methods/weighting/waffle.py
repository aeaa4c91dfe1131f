"""WAFFLE: SCAFFOLD with weights that move, round by round, from all users to those near user 0."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import COUNT, checked
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State
from coterie.rules.similarity import TINY

AVERAGED_ROUNDS = 3
"""The weights are averaged over this many rounds, as in the paper."""


@dataclass(frozen=True)
@checked(rounds=COUNT)
class Waffle(LocalSteps):
    """Weigh SCAFFOLD's updates by their distance from user 0's, more strictly as the rounds go by.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c)
        c_k⁺ = c_k − c + (x − x_k) / (Kη)
        D_k = ‖x_k − x_0‖²,  m and M the least and the largest of the peers'
        D_0 = m (1 − (1 − Ω)(M − m)/M),   Ω = 1 / (1 + exp(s (2r/R − 1))) in round r of R
        a_k ∝ max(0, Ω − (D_k − D_0)/(M − D_0)), to sum 1 and averaged over the last 3 rounds
        x ← x + Σ a_k (x_k − x),      c ← c + Σ a_k (c_k⁺ − c_k)

    Ω decreases from nearly 1 to nearly 0: from nearly all users to user 0 alone. c still depends on
    the earlier weights: in the end ∇f_0(x) = c_0 − c, which is not 0 where users differ. After the
    first rounds the corrections remove the differences between gradients: D_k then measures
    curvature and noise. All users take part in every round.

    Args:
        rounds: R; `steps` of `coterie.train`.
        local_steps: K.
        slope: s, how fast Ω decreases.

    Reference: Beaussart, Grimberg, Hartley and Jaggi, WAFFLE: weighted averaging for personalized
    federated learning, 2021, which combines SCAFFOLD with the weight erosion of Grimberg et al.
    2020 (`similarity.WeightErosion`).

    Example:
        >>> [round(Waffle(rounds=100).share(r), 3) for r in (0, 50, 100)]
        [0.961, 0.5, 0.039]
    """

    rounds: int
    local_steps: int = 5
    slope: float = 3.2

    def share(self, played: int) -> float:
        """Return Ω after so many rounds."""
        return 1 / (1 + math.exp(self.slope * (2 * played / self.rounds - 1)))

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, no corrections, no weights."""
        n = len(users.names)
        zeros = x.new_zeros(n, x.numel())
        return {
            "step": 0,
            "x": x,
            "c_k": zeros,
            "c": zeros[0],
            "last": x.new_zeros(0, n),
            "weight": 0.0,
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, c_k, step = state["x"], state["c"], state["c_k"], state["step"]
        points, following = self.corrected_steps(users, x, c_k, c, step=step, lr=lr)
        fresh = points.new_zeros(len(points))
        here = slice(None) if users.present is None else users.present
        fresh[here] = self._weights(points[here], self.share(step // self.local_steps))
        following = users.moved(following, c_k)
        last = torch.cat([state["last"], fresh.unsqueeze(0)])[-AVERAGED_ROUNDS:]
        weights = last.mean(0)
        x, c = x + weights @ (points - x), c + weights @ (following - c_k)
        return {
            "step": step + self.local_steps,
            "x": x,
            "c_k": following,
            "c": c,
            "last": last,
        } | weighed(weights)

    def _weights(self, points: Tensor, share: float) -> Tensor:
        distances = (points - points[0]).square().sum(1)
        if len(points) > 1:
            least, largest = distances[1:].min(), distances[1:].max()
            distances[0] = least * (1 - (1 - share) * (largest - least) / largest.clamp(min=TINY))
        spread = (distances.max() - distances[0]).clamp(min=TINY)
        weights = (share - (distances - distances[0]) / spread).clamp(min=0)
        return weights / weights.sum()
