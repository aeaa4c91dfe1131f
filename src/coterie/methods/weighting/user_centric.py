"""User-centric federated learning.

Mixing weights from the distances between gradients, relative to noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import COUNT, checked, optional, whole
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State
from coterie.rules.similarity import TINY


@dataclass(frozen=True)
@checked(clusters=optional(COUNT), blocks=whole(2))
class UserCentric(LocalSteps):
    """Mix models by weights that are computed once, from gradients at the start.

        G_k = ∇f_k(x_0),   σ_k² = mean_b ‖g_kb − G_k‖² over B blocks of user k's examples
        w_kj ∝ n_j exp(−‖G_k − G_j‖² / (2σ_kσ_j)), to sum 1 over j
        then every round:  x_k ← K local steps from x_k;   x_k ← Σ_j w_kj x_j

    With C clusters k-means groups the rows of w, and every user mixes by the mean row of its
    cluster, so that C models are sent, not one for each user. Gradients at the random start decide
    everything: users who differ only near their optima are not told apart. B sets σ and with it the
    scale of distances: with more blocks, each has fewer examples and more noise, and distances
    count less. k-means starts from users who are far from each other.

    Args:
        local_steps: K.
        clusters: C; when None, one for each user.
        blocks: B, the gradients that a user computes before the first round.

    Reference: Mestoukirdi, Zecchin, Gesbert, Li and Gresset, User-centric federated learning, 2021,
    whose n_j are here the numbers of examples too.

    Example:
        >>> UserCentric(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    clusters: int | None = None
    blocks: int = 5

    models_in = "points"

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all users at x, and the mixing weights."""
        mixing = self.mixing(users, x)
        users.exchange(down=x.numel(), up=x.numel() + 1)
        return {"step": 0, "points": x.repeat(len(users.names), 1), "mixing": mixing} | weighed(
            mixing[0]
        )

    def mixing(self, users: Clients, x: Tensor) -> Tensor:
        """Return w, a row for each user.

        A user whose gradients are not finite mixes with no other.
        """
        means, noises = zip(*(self._gradient(users, name, x) for name in users.names), strict=True)
        noise, apart = torch.stack(noises), _squared_distances(torch.stack(means))
        likeness = torch.exp(-apart / (2 * torch.outer(noise, noise)).clamp(min=TINY))
        weights = users.sizes * torch.nan_to_num(likeness, nan=0.0).fill_diagonal_(1.0)
        weights = weights / weights.sum(1, keepdim=True)
        if self.clusters is None or self.clusters >= len(weights):
            return weights
        return _grouped(weights, self.clusters)

    def _gradient(self, users: Clients, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return G_k and σ_k."""
        blocks = users.blocks(name, self.blocks)
        rows = torch.stack([users.gradient_on(name, x, block) for block in blocks])
        shares = rows.new_tensor([len(block) for block in blocks])
        mean = (shares / shares.sum()) @ rows
        return mean, (rows - mean).square().sum(1).mean().sqrt()

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, points, mixing = state["step"], state["points"], state["mixing"]
        points = users.local_steps(points, step, self.local_steps, lr=lr)
        users.exchange(down=points.shape[1], up=points.shape[1])
        if users.present is not None:
            mixing = mixing * users.present
            mixing = mixing / mixing.sum(1, keepdim=True)
        return state | {
            "step": step + self.local_steps,
            "points": users.moved(mixing @ points, points),
        }


def _squared_distances(rows: Tensor) -> Tensor:
    return (rows.unsqueeze(0) - rows.unsqueeze(1)).square().sum(2)


def _grouped(rows: Tensor, count: int) -> Tensor:
    """Return the rows, each replaced by the mean of its cluster, by k-means."""
    from scipy.cluster.vq import kmeans2

    starts = [0]
    distances = _squared_distances(rows)
    while len(starts) < count:
        starts.append(int(distances[starts].min(0).values.argmax()))
    points = rows.double().cpu().numpy()
    centres, labels = kmeans2(points, points[starts], minit="matrix")
    return rows.new_tensor(centres[labels])
