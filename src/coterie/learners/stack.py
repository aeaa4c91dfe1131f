"""The parameters of many runs as the rows of one matrix, stepped by few optimizers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec


class Stack:
    """Rows of parameters, and an optimizer for all rows that have the same settings.

    The optimizer must work element by element: then it treats stacked parameters as it treats each by itself.

    Args:
        x: of shape (K, d): where each run starts; it is changed in place.
        settings: in the order of the rows, a prepared run whose model, optimizer and scheduler they have, and how
            many rows those are.

    Example:
        >>> from coterie import User
        >>> model = torch.nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> me = User("me", [[1.0]], [[1.0]])
        >>> spec = RunSpec(model, torch.nn.functional.mse_loss, me, (), optimizer=sgd)
        >>> stack = Stack(torch.zeros(3, 2), [(spec, 3)])
        >>> stack.direction.copy_(torch.tensor([[2.0, 0.0]]))
        tensor([[2., 0.],
                [2., 0.],
                [2., 0.]])
        >>> stack.step()
        >>> stack.x[0]
        tensor([-1.,  0.])
    """

    def __init__(self, x: Tensor, settings: Sequence[tuple[RunSpec, int]]) -> None:
        self.x, self.direction = x, torch.zeros_like(x)
        self._steps: list[tuple[Optimizer, LRScheduler | None]] = []
        first = 0
        for spec, count in settings:
            rows = slice(first, first + count)
            optimizer = _over(spec, x[rows], self.direction[rows])
            self._steps.append((optimizer, spec.schedule(optimizer)))
            first += count

    def step(self) -> None:
        """Let every optimizer follow its rows of `direction`."""
        for optimizer, scheduler in self._steps:
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def _over(spec: RunSpec, x: Tensor, direction: Tensor) -> Optimizer:
    """Return a copy of the optimizer that holds rows of parameters in the place of the model's."""
    model, optimizer = copy.deepcopy((spec.model, spec.made_optimizer))
    parameters = Parameters(model)
    names = {id(p): name for name, p in parameters.named.items()}
    values, slopes = parameters.unflatten(x), parameters.unflatten(direction)
    for group in optimizer.param_groups:
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        pairs = [(values[name], slopes[name]) for name in held]
        if set(held) == set(values):
            pairs = [(x, direction)]  # one tensor in the place of many
        for value, slope in pairs:
            value.grad = slope
        group["params"] = [value for value, _ in pairs]
    return optimizer
