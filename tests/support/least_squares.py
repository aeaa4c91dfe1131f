"""Users with least squares problems: heterogeneous quadratics through the whole stack, solved in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import coterie
from coterie.methods import Method
from coterie.users.examples import InMemory

D = 3


@dataclass(frozen=True)
class LeastSquares:
    """f_k(x) = mean over examples of (aᵀx − b)² = ½ (x − o_k)ᵀ A_k (x − o_k) + const, exactly.

    `curvatures` are the A_k, of shape (users, D, D), `optima` the o_k. Batches are all examples, so gradients are
    exact.
    """

    users: list[coterie.User]
    curvatures: Tensor
    optima: Tensor

    def train(self, method: Method, *, rounds: int, lr: float, batch_size: int = 10**6, **more: Any) -> coterie.Run:
        model = nn.Linear(D, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        me, *peers = self.users
        return coterie.train(
            model,
            nn.functional.mse_loss,
            me,
            peers,
            method,
            lr=lr,
            steps=rounds,
            batch_size=batch_size,
            evaluate_every=rounds,
            **more,
        )

    def gradient(self, k: int, x: Tensor, step: int, batch_size: int) -> Tensor:
        """Return user k's gradient at x on its batch of a step, written out."""
        inputs, targets = self.users[k].batch(batch_size, seed=0, step=step)
        return 2 * inputs.T @ (inputs @ x - targets.flatten()) / len(inputs)

    def minimiser(self, weights: Tensor) -> Tensor:
        """Return the minimiser of Σ w_k f_k."""
        return balance(weights, self.curvatures, self.optima)


def least_squares(sizes: tuple[int, ...] = (8, 20, 12, 15), seed: int = 0, held_out: int = 0) -> LeastSquares:
    """Return users whose curvatures, optima and numbers of examples all differ; some of user 0's held out."""
    random = torch.Generator().manual_seed(seed)
    users, curvatures, optima = [], [], []
    for k, n in enumerate(sizes):
        inputs = (0.5 + 0.25 * k) * torch.randn(n, D, generator=random, dtype=torch.float64)
        truth = torch.randn(D, 1, generator=random, dtype=torch.float64)
        targets = inputs @ truth + 0.3 * torch.randn(n, 1, generator=random, dtype=torch.float64)
        users.append(coterie.User(f"user {k}", inputs, targets))
        if k == 0:
            own = truth
        curvatures.append(2 * inputs.T @ inputs / n)
        optima.append(torch.linalg.lstsq(inputs, targets).solution.flatten())
    if held_out:
        inputs = torch.randn(held_out, D, generator=random, dtype=torch.float64)
        users[0].validation = InMemory(inputs, inputs @ own)
    return LeastSquares(users, torch.stack(curvatures), torch.stack(optima))


def balance(weights: Tensor, pulls: Tensor, points: Tensor) -> Tensor:
    """Return the x where Σ w_k P_k (x − p_k) = 0."""
    total = torch.einsum("k,kij->ij", weights, pulls)
    found: Tensor = torch.linalg.solve(total, torch.einsum("k,kij,kj->i", weights, pulls, points))
    return found


def last_of(run: coterie.Run) -> Tensor:
    """Return every user's last model, a row each."""
    return torch.stack([_flat(model) for model in run.models.values()])


def path_of(problem: LeastSquares, method: Method, **settings: Any) -> Tensor:
    """Return user 0's model after every round, a row each."""
    path: list[Tensor] = []
    problem.train(method, callbacks=[lambda step: path.append(_flat(step.model))], **settings)
    return torch.stack(path)


def _flat(model: nn.Module) -> Tensor:
    return next(iter(model.parameters())).detach().flatten().clone()


def weights_of(run: coterie.Run) -> Tensor:
    """Return user 0's model as a vector."""
    return _flat(run.model)
