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
EYE = torch.eye(D, dtype=torch.float64)
START = torch.zeros(D, dtype=torch.float64)
LOCAL_STEPS = [1, 3, 8]


@dataclass(frozen=True)
class LeastSquares:
    """f_k(x) = mean over examples of (aᵀx − b)² = ½ (x − o_k)ᵀ A_k (x − o_k) + const, exactly.

    `curvatures` are the A_k, of shape (users, D, D), `optima` the o_k. Batches are all examples, so
    gradients are exact.
    """

    users: list[coterie.User]
    curvatures: Tensor
    optima: Tensor

    def train(
        self, method: Method, *, rounds: int, lr: float, batch_size: int = 10**6, **more: Any
    ) -> coterie.Run:
        """Play rounds; what is served is the method's model, unless `guard` says otherwise."""
        model = nn.Linear(D, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        me, *peers = self.users
        how: dict[str, Any] = {"evaluate_every": rounds, "guard": "off"} | more
        loss = nn.functional.mse_loss
        return coterie.train(
            model, loss, me, peers, method, lr=lr, steps=rounds, batch_size=batch_size, **how
        )

    def gradient(self, k: int, x: Tensor, step: int = 0, batch_size: int = 10**6) -> Tensor:
        """Return user k's gradient at x, written out: on its batch of a step, or on all its examples."""
        inputs, targets = self.users[k].batch(batch_size, seed=0, step=step)
        gradient: Tensor = 2 * inputs.T @ (inputs @ x - targets.flatten()) / len(inputs)
        return gradient

    def loss(self, k: int, x: Tensor) -> Tensor:
        """Return user k's loss at x on all its examples."""
        inputs, targets = self.users[k].batch(10**6, seed=0, step=0)
        loss: Tensor = ((inputs @ x - targets.flatten()) ** 2).mean()
        return loss

    def walk(self, k: int, x: Tensor, count: int, lr: float, add: Tensor | float = 0.0) -> Tensor:
        """Return where user k is after so many local steps, x ← x − η (∇f_k(x) + add), in a plain loop."""
        for _ in range(count):
            x = x - lr * (self.gradient(k, x) + add)
        return x

    def minimiser(self, weights: Tensor) -> Tensor:
        """Return the minimiser of Σ w_k f_k."""
        return balance(weights, self.curvatures, self.optima)


def least_squares(
    sizes: tuple[int, ...] = (8, 20, 12, 15), seed: int = 0, held_out: int = 0
) -> LeastSquares:
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


def planted(truths: list[Tensor], examples: int = 40, noise: float = 0.1) -> LeastSquares:
    """Return users of one curvature, but for the draw, with these truths; user 0 holds 40 examples out."""
    random = torch.Generator().manual_seed(3)
    users, curvatures, optima = [], [], []
    for k, truth in enumerate([truths[0], *truths]):  # the first is what user 0 holds out
        inputs = torch.randn(examples, D, generator=random, dtype=torch.float64)
        targets = (inputs @ truth).unsqueeze(1)
        targets = targets + noise * torch.randn(examples, 1, generator=random, dtype=torch.float64)
        users.append(coterie.User(f"user {k - 1}", inputs, targets))
        curvatures.append(2 * inputs.T @ inputs / examples)
        optima.append(torch.linalg.lstsq(inputs, targets).solution.flatten())
    held_out, *users = users
    users[0].validation = held_out.examples
    return LeastSquares(users, torch.stack(curvatures[1:]), torch.stack(optima[1:]))


def balance(weights: Tensor, pulls: Tensor, points: Tensor) -> Tensor:
    """Return the x where Σ w_k P_k (x − p_k) = 0."""
    total = torch.einsum("k,kij->ij", weights, pulls)
    x: Tensor = torch.linalg.solve(total, torch.einsum("k,kij,kj->i", weights, pulls, points))
    return x


def pull(curvatures: Tensor, local_steps: int, lr: float) -> Tensor:
    """Return 1 − (1 − ηA_k)^K: by how much K steps bring a point nearer to o_k."""
    kept: Tensor = torch.linalg.matrix_power(EYE - lr * curvatures, local_steps)
    return EYE - kept


def same_models(run: coterie.Run, rows: list[Tensor]) -> bool:
    """Say whether every user's last model is its row, and `run.model` the first."""
    models = last_of(run)
    return torch.allclose(models, torch.stack(rows), rtol=0, atol=1e-12) and torch.equal(
        models[0], weights_of(run)
    )


def last_of(run: coterie.Run) -> Tensor:
    """Return every user's last model, a row each."""
    return torch.stack([_flat(model) for model in run.models.values()])


def path_of(problem: LeastSquares, method: Method, **settings: Any) -> Tensor:
    """Return user 0's model after every round, a row each."""
    path: list[Tensor] = []
    problem.train(method, hooks=[lambda step: path.append(_flat(step.model))], **settings)
    return torch.stack(path)


def _flat(model: nn.Module) -> Tensor:
    return next(iter(model.parameters())).detach().flatten().clone()


def weights_of(run: coterie.Run) -> Tensor:
    """Return user 0's model as a vector."""
    return _flat(run.model)


PROBLEM = least_squares()
HELD_OUT = least_squares(held_out=30)
"""The same users, user 0 with validation examples: `run.model` is then the best one, not the last."""

N = len(PROBLEM.users)
EQUAL = torch.full((N,), 1 / N, dtype=torch.float64)
EXAMPLES = torch.tensor([len(user) for user in PROBLEM.users], dtype=torch.float64)
SHARES = EXAMPLES / EXAMPLES.sum()

TRUTH = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
OTHER = torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64)
COPIES_AND_STRANGERS = planted([TRUTH, TRUTH, -TRUTH, TRUTH, OTHER])
"""Users 1 and 3 want what user 0 wants, user 2 the opposite, user 4 something else."""
