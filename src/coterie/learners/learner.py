"""A learner: parameters, optimizer, the rule's state and the step count, and the one way to take a step."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.engines.engine import Engine
from coterie.errors import blaming
from coterie.gradients.gradients import Gradients, cut, is_finite
from coterie.gradients.norm_bound import NormBound
from coterie.gradients.parameters import Parameters
from coterie.gradients.trained_part import copied, load_trained_state, trained_state
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Costs
from coterie.recording.result import GuardDecision
from coterie.recording.traffic import Traffic
from coterie.rules import Rule, State, weights_in


@dataclass(frozen=True, eq=False)
class NextStep:
    """A step that is computed and not yet taken."""

    own: Tensor  # user 0's gradient, or whatever is not finite where the step must not be taken
    own_loss: Tensor | float  # on user 0's batch
    left_out: Mapping[str, str]  # the peers left out of it, each with the reason
    take: Callable[[], None]

    def is_finite(self) -> bool:
        """Say whether the step can be taken."""
        return is_finite(self.own)


class Learner:
    """A model, the rule it follows, its optimizer, and the best it has been.

    Everything that a later step depends on is in `state_dict`; all randomness is a function of
    (seed, user, step), so there is no generator to save. The run must be prepared; the parameters of its model
    become views of the flat vector `x`.
    """

    def __init__(self, spec: RunSpec, rule: Rule, engine: Engine, costs: Costs) -> None:
        self.model, self.rule, self.engine, self.costs = spec.model, rule, engine, costs
        self.optimizer, self.clip_norm = spec.made_optimizer, spec.clip_norm
        self.scheduler = spec.made_scheduler(self.optimizer)
        self.parameters = Parameters(spec.model)
        self.x = self.parameters.share()
        self.state = self.initial_state()
        self.step = 0
        self.listens_from = 0
        self.bound = None if spec.norm_bound is None else NormBound(spec.norm_bound, self.x)
        self.best: dict[str, Any] = {}

    @property
    def followed(self) -> Any:
        """What the learner follows: its rule, or a method."""
        return self.rule

    def initial_state(self) -> State:
        """Return the rule's state before the first step."""
        return self.rule.init(self.x)

    def next_step(self) -> NextStep:
        """Ask everybody for gradients at x, and return the step that the rule makes of them."""
        g = self.gradients()
        return NextStep(g.own, g.own_loss, g.left_out, partial(self.advance, g))

    def gradients(self) -> Gradients:
        """Ask everybody for gradients at x; nobody but user 0 before step `listens_from`."""
        weights = self.rule.weights(self.engine.names) if self.step >= self.listens_from else {}
        rows = self.rule.needs_rows
        at_hand = self.bound is not None and self.engine.capabilities.rows_at_hand
        g = self.engine.gradients(self.x, self.step, weights, rows or at_hand)
        self.count([*weights])
        return g if self.bound is None or not weights else self.bound.kept(g, weights, rows=rows)

    def count(self, asked: list[str], steps: int = 1) -> None:
        """Count what steps cost: a gradient of everybody asked, and the parameters sent there and back."""
        self.costs.compute([self.costs.me, *asked], times=steps)
        self.costs.exchange(asked, down=self.x.numel(), up=self.x.numel(), times=steps)

    def advance(self, g: Gradients) -> None:
        """Take the step that the rule makes of these gradients."""
        if self.step >= self.listens_from:
            with blaming(f"the rule `{type(self.rule).__name__}`"):
                direction, self.state = self.rule(g, self.state)
        else:
            direction, self.state = g.own, self.state | {"step": self.step + 1, "weight": 0.0}
        self.optimize(direction)
        self.finish_step()

    def optimize(self, direction: Tensor) -> None:
        """Let the optimizer move the parameters along a direction, cut to the norm that is allowed."""
        self.parameters.set_gradient(direction if self.clip_norm is None else cut(direction, self.clip_norm))
        with blaming("the optimizer"):
            self.optimizer.step()

    def finish_step(self) -> None:
        """Let the scheduler go on, and count the step."""
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            with blaming("the scheduler"):
                self.scheduler.step()
        self.step += 1

    def consider(self, validation_loss: float) -> None:
        """Keep the model if it is the best by validation loss so far, and tell a scheduler that wants to know."""
        if validation_loss < self.best.get("loss", float("inf")):
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in trained_state(self.model).items()}
            self.best = {"step": self.step, "loss": validation_loss, "model": state}
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)

    @property
    def weight(self) -> float:
        """The weight that the peers had in the last step; NaN where there is no such thing."""
        return float(self.state.get("weight", math.nan))

    def tau(self) -> Mapping[str, float]:
        """Return the weight of each peer among the peers in the last step, where there is such a thing."""
        given = weights_in(self.state) if "tau" in self.state else self.rule.weights(self.engine.names)
        return {name: given[name] for name in self.engine.names if name in given}

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model to serve, what it was the best of, and how it compares with Alone, if known."""
        model = copied(self.model)
        if self.best:
            load_trained_state(model, self.best["model"])
        return model, self.best, None

    def trained_alone(self) -> nn.Module | None:
        """Return the model trained alone beside this one, where there is one."""
        return None

    def account(self, travelled: Mapping[str, Traffic]) -> Mapping[str, Any]:
        """Return what was found out on the way, and by which traffic, as plain data; empty where nothing was."""
        return {}

    def models(self) -> dict[str, nn.Module]:
        """Return the personal models of all users, where there are any beside user 0's."""
        return {}

    def restart_from(self, other: "Learner", listens_from: int) -> None:
        """Take over another learner's model and optimizer, and listen to nobody until a step."""
        fresh = self.rule.init(self.x) | {"step": self.step}
        mine = {"rule": fresh, "best": self.best, "listens_from": listens_from}
        self.load_state_dict(copy.deepcopy(other.state_dict()) | mine)  # else the optimizers would share tensors

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "step": self.step,
            "listens_from": self.listens_from,
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rule": self.state,
            "longest": self.bound and self.bound.longest,
            "best": self.best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        load_trained_state(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.listens_from = state["step"], state["listens_from"]
        self.state, self.best = state["rule"], state["best"]
        if self.bound is not None:
            self.bound.longest.copy_(state["longest"])
