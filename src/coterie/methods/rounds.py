"""Rounds of a federated method, one after the other, as `coterie.train` takes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coterie.gradients.gradients import Gradients
from coterie.gradients.parameters import Parameters
from coterie.learners.learner import Track
from coterie.methods.clients import Clients
from coterie.rules import State


@runtime_checkable
class Method(Protocol):
    """A federated method: rounds in which users take plain gradient steps of their own and share what they found.

    The knobs are fields; the state is passed and returned. A state holds tensors and numbers by name, so that a
    checkpoint can hold it, and `step`, the number of batches that every user has drawn; where user 0 weighs models,
    `weights`, a tensor of its own weight and then the peers', and `weight`, the peers' total.
    """

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, to compare at equal gradients."""

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round."""

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round with this step size."""

    def models(self, state: State) -> Tensor:
        """Return the personal models: a row for each user, user 0 first; one row where there is one for all."""


class Rounds(Track):
    """The model of user 0 on its way through the rounds of a method.

    Args:
        model: whose parameters become views of the flat vector `x`.
        method: what a round is.
        users: who takes part.
        optimizer: plain SGD of the model's parameters, whose step size the rounds take.
        scheduler: of that step size.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        users: Clients,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.method, self.users, self.engine = method, users, users.engine
        self.parameters = Parameters(model)
        self.x = self.parameters.share()
        self.state = method.init(users, self.x.clone())
        self.step, self.listens_from = 0, 0
        self.best: dict[str, Any] = {}
        self.costs = users.costs
        self._next = self.state

    def gradients(self) -> Gradients:
        """Play a round, and return what it moves user 0's model by, as if that were a gradient."""
        self.users.left_out, self.users.own_losses = {}, []
        lr = self.optimizer.param_groups[0]["lr"]
        self._next = self.method.round(self.users, copy.copy(self.state), lr)
        losses = self.users.own_losses
        moved = (self.x - self.method.models(self._next)[0]) / lr
        mean = sum(losses) / len(losses) if losses else math.nan
        return Gradients(own=moved, x=self.x, own_loss=mean, left_out=self.users.left_out)

    def advance(self, g: Gradients) -> None:
        """Take over what the round gave."""
        self.state = self._next
        self.x.copy_(self.method.models(self.state)[0])
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights, where the method learns them."""
        weights = self.state.get("weights")
        return {} if weights is None else dict(zip(self.users.names[1:], weights[1:].tolist(), strict=True))

    def models(self) -> dict[str, nn.Module]:
        """Return the personal model of each user, as it is now."""
        found = {}
        rows = self.method.models(self.state).expand(len(self.users.names), -1)
        for name, row in zip(self.users.names, rows, strict=True):
            found[name] = copy.deepcopy(self.model)
            Parameters(found[name]).load(row)
        return found
