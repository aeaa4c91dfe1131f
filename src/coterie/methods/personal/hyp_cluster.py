"""HypCluster, or IFCA.

There are several models, and every user trains the one that fits it best.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State
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
