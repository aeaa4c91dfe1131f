"""Rows of one stack that all step together, each member's seen as a stack or an optimizer of its own."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from coterie.gradients.parameters import Parameters
from coterie.learners.stack import Stack


class JoinedRows(Stack):
    """A member's rows of a stack. They step when the whole does; what else is done to them is done apart."""

    def __init__(self, whole: Stack, first: int, last: int) -> None:
        self.whole, self.places = whole, range(first, last)
        self.x, self.direction = whole.x[first:last], whole.direction[first:last]

    def step(self) -> None:
        """Do nothing: the whole steps."""

    def forked(self, origins: Sequence[Sequence[int]]) -> Stack:
        """Return a stack of its own whose rows are means of rows of this."""
        return self.whole.forked([[self.places[row] for row in rows] for rows in origins])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a stack of its own would have."""
        return self.apart().state_dict()

    def apart(self) -> Stack:
        """Return these rows as a stack of its own."""
        return self.whole.forked([[place] for place in self.places])


def join(stacks: Sequence[Stack]) -> tuple[Stack, list[JoinedRows]]:
    """Return stacks of one setting as one, and each of them as rows of it."""
    whole = Stack.joined([stack.apart() if isinstance(stack, JoinedRows) else stack for stack in stacks])
    rows, first = [], 0
    for stack in stacks:
        rows.append(JoinedRows(whole, first, first + len(stack.x)))
        rows[-1].direction.copy_(stack.direction)  # a member may have ended while others have left theirs
        first += len(stack.x)
    return whole, rows


class RowOptimizer:
    """The optimizer of one learner, whose parameters are a row of a stack that steps for all.

    Its own optimizer, which it had before, is brought up to date where its state is asked for.
    """

    def __init__(self, whole: Stack, row: int, own: Optimizer, parameters: Parameters) -> None:
        self.whole, self.row, self.own, self.parameters = whole, row, own, parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with their step sizes."""
        return self.own.param_groups

    def step(self) -> None:
        """Leave the gradient where the whole takes it from."""
        gradients = [p.grad for p in self.parameters.named.values() if p.grad is not None]
        self.whole.direction[self.row] = Parameters.flatten(gradients)
        self.own._opt_called = True  # type: ignore[attr-defined]  # a scheduler wants to know

    def state_dict(self) -> dict[str, Any]:
        """Return the state that an optimizer of its own would have."""
        for key, value in self.whole.state_of_rows().items():
            by_row = isinstance(value, Tensor) and value.shape == self.whole.x.shape
            pieces = self.parameters.unflatten(value[self.row].clone()) if by_row else {}
            for name, p in self.parameters.named.items():
                self.own.state[p][key] = pieces[name] if by_row else copy.deepcopy(value)
        return self.own.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.own.load_state_dict(dict(state))
        self.push()

    def push(self) -> None:
        """Bring the row up to date with the optimizer of its own."""
        states = [self.own.state[p] for p in self.parameters.named.values() if p in self.own.state]
        if not states:
            return
        rows = self.whole.state_of_rows()
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.ndim:
                held = rows.setdefault(key, torch.zeros_like(self.whole.x))
                held[self.row] = Parameters.flatten(state[key] for state in states)
            else:
                rows[key] = copy.deepcopy(value)
