"""Clusters of users: those whom one model fits best (HypCluster, IFCA), or with like gradients (user-centric)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked, optional, whole
from coterie.methods.clients import Clients, LocalSteps, weighed
from coterie.rules import State
from coterie.rules.similarity import TINY
from coterie.users.sampling import seeded


@dataclass(frozen=True)
@checked(clusters=COUNT, spread=POSITIVE)
class HypCluster(LocalSteps):
    """Let every user choose the best of q models by its loss, and average within each choice.

        c_k = argmin_j loss_k(x_j) over all its examples;      y_k ← x_{c_k}, then K times  y_k ←
        y_k − η g_k(y_k) x_j ← Σ p_k y_k / Σ p_k  over the users with c_k = j,  p_k the shares of
        the examples

    Once the clusters no longer change it is FedAvg in each of them; with one cluster it is FedAvg.
    A model that no user chooses does not move. The starting models decide which clusters form, or
    whether one model takes all users; they are x plus noise, drawn from (seed, model). IFCA is the
    same algorithm with restarts. All users take part in every round, or a sample: `Sampled`. In a
    round a user also computes q losses of all its examples.

    Args:
        clusters: q.
        local_steps: K.
        spread: the standard deviation of the noise that is added to x; the first model starts at x
            itself.

    Reference: Mansour, Mohri, Ro, Suresh, Three approaches for personalization with applications to
    federated learning, arXiv:2002.10619, 2020, section 3, algorithm HypCluster. Ghosh, Chung, Yin,
    Ramchandran, An efficient framework for clustered federated learning, NeurIPS 2020, Algorithm 1,
    model averaging.

    Example:
        >>> HypCluster(clusters=3, local_steps=5).gradients_a_round
        5
    """

    clusters: int = 2
    local_steps: int = 1
    spread: float = 0.1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: q models around x; every user has the first."""
        models = x.repeat(self.clusters, 1)
        with seeded(users.seed, "clusters", 0):
            noise = torch.randn(self.clusters - 1, x.numel(), dtype=x.dtype)
        models[1:] += self.spread * noise.to(x.device)
        return {
            "step": 0,
            "x": models,
            "cluster": torch.zeros(len(users.names), dtype=torch.long, device=x.device),
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        losses = users.losses_over_all(x, step)
        cluster = users.moved(losses.nan_to_num(torch.inf).argmin(0), state["cluster"])
        points = users.local_steps(x[cluster], step + 1, self.local_steps, lr=lr)
        users.exchange(down=x.numel(), up=x.shape[1] + 1)
        p = users.shares * (cluster == torch.arange(len(x), device=x.device).unsqueeze(1))
        total = p.sum(1, keepdim=True)
        x = torch.where(total > 0, p @ points / total.clamp_min(1e-30), x)
        return {"step": step + 1 + self.local_steps, "x": x, "cluster": cluster}

    def models(self, state: State) -> Tensor:
        """Return the model of each user's cluster."""
        x: Tensor = state["x"]
        return x[state["cluster"]]


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
