"""Rounds of a federated method, one after the other, as `coterie.train` takes them."""

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from coterie.arguments import Check, where
from coterie.engines.engine import Answers
from coterie.gradients.parameters import Parameters, copied
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.methods.clients import Clients
from coterie.rules import State

LR = 0.1
"""The size of plain steps where none is given."""


@runtime_checkable
class Method(Protocol):
    """A federated method.

    Rounds in which users take plain gradient steps of their own and share what they found.

    The knobs are fields; the state is passed and returned. A state holds tensors and numbers by
    name, so that a checkpoint can hold it, and `step`, the number of batches that every user has
    drawn; where user 0 weighs models, `weights`, a tensor of its own weight and then the peers',
    and `weight`, the peers' total.
    """

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, to compare at equal gradients."""

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round."""

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round with this step size."""

    def models(self, state: State) -> Tensor:
        """Return the personal models.

        A row for each user, user 0 first; one row where there is one for all.
        """


METHOD = Check(
    "be a method, such as `FedAvg(5)`",
    # a class has all methods of its instances, and is none
    where(lambda value: isinstance(value, Method), refused=type),
    remedies={type: "give it its knobs: `FedAvg(5)`"},
)
"""A method within another."""


class Rounds(Learner):
    """The learner of a method.

    A step is a round. The optimizer is plain SGD, whose step size the rounds take.

    The guard compares it with a model trained alone and lets it be: what a method keeps from
    earlier rounds (control variates, weights, when to begin tuning) belongs to its own path.
    """

    can_restart: ClassVar[bool] = False
    can_capture: ClassVar[bool] = False

    def __init__(self, spec: RunSpec, method: Method, users: Clients) -> None:
        self.method, self.users = method, users
        super().__init__(spec, users.asked, users.costs)
        # the model's parameters, which a round has moved; a schedule may go on
        self.stacks = (Stack.of_model(spec, self.x, self.scheduler),)

    @property
    def followed(self) -> Method:
        """The method."""
        return self.method

    def initial_state(self) -> State:
        """Return the method's state before the first round."""
        return self.method.init(self.users, self.x.clone())

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Play a round, and return user 0's model after it as the step to take."""
        self.users.left_out, self.users.own_losses = {}, []
        state = self.method.round(
            self.users, copy.copy(self.state), self.optimizer.param_groups[0]["lr"]
        )
        losses, model = self.users.own_losses, self.method.models(state)[0]
        mean = sum(losses) / len(losses) if losses else math.nan
        return NextStep(model, mean, self.users.left_out, partial(self._take, state, model))

    def _take(self, state: State, model: Tensor) -> None:
        """Take over what a round gave."""
        self.state = state
        self.x.copy_(model)
        self.optimizer.zero_grad()  # so that its step, which a scheduler expects, moves nothing

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights, where the method learns them."""
        weights = self.state.get("weights")
        if weights is None:
            return {}
        return dict(zip(self.users.names[1:], weights[1:].tolist(), strict=True))

    def models(self) -> dict[str, nn.Module]:
        """Return the personal model of each user, as it is now.

        Where they are elsewhere, user 0's alone.
        """
        models = {name: copied(self.model) for name in self.users.names[: self.users.personal]}
        rows = self.method.models(self.state)
        rows = rows.expand(len(models), -1) if self.users.here else rows[:1]
        for model, row in zip(models.values(), rows, strict=True):
            Parameters(model).load(row)
        return models
