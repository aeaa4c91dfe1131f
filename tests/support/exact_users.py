"""Clients whose gradients and losses come from closed forms: hundreds of rounds in no time."""

from __future__ import annotations

import torch
from tests.support.least_squares import PROBLEM, START, LeastSquares
from torch import Tensor

from coterie.methods import Clients, Method
from coterie.recording.costs import Costs


class ExactUsers(Clients):
    """The users of a problem, whose gradients are computed from A_k and o_k."""

    def __init__(self, problem: LeastSquares) -> None:
        self.problem = problem
        self.names = tuple(user.name for user in problem.users)
        self.sizes = torch.tensor([float(len(user)) for user in problem.users], dtype=torch.float64)
        self.costs = Costs(dict.fromkeys(self.names, 1))
        self.least = torch.stack([problem.loss(k, x) for k, x in enumerate(problem.optima)])

    @property
    def seed(self) -> int:
        return 0

    def gradients(self, points: Tensor, step: int) -> Tensor:
        return torch.einsum("kij,kj->ki", self.problem.curvatures, points - self.problem.optima)

    def full_gradients(self, points: Tensor) -> Tensor:
        return self.gradients(points, 0)

    def losses(self, points: Tensor, step: int) -> Tensor:
        apart = points - self.problem.optima
        return torch.einsum("ki,kij,kj->k", apart, self.problem.curvatures, apart) / 2 + self.least

    def losses_over_all(self, models: Tensor, step: int) -> Tensor:
        return torch.stack(
            [self.losses(model.expand(len(self.names), -1), step) for model in models]
        )

    def play(self, method: Method, rounds: int, lr: float) -> Tensor:
        """Return the personal models after some rounds."""
        state = method.init(self, START)
        for _ in range(rounds):
            state = method.round(self, state, lr)
        return method.models(state).expand(len(self.names), -1)


EXACT = ExactUsers(PROBLEM)
