"""The guard: never worse than alone, up to the reported validation error.

No rule of averaging can promise that: a peer that sends plausible, slowly alternating drift beats every robust
average. So user 0 also keeps a shadow, the same model trained alone, at the price of one more own gradient a
step. Every so often the two are compared on held-out examples; where the collaborative learner is significantly
worse it restarts from the shadow and listens to nobody for a while, twice as long each time. What is served is
the better of the two.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from coterie.evaluation.evaluate import example_losses
from coterie.gradients.trained_part import copied, load_trained_state
from coterie.learners.learner import Learner
from coterie.recording.result import GuardCheck, GuardDecision
from coterie.users.examples import Examples
from coterie.users.user import Loss

MIN_HELD_OUT = 100
"""How many held-out examples a guard needs by default: with fewer it would mostly judge noise."""

WORSE_BY_ERRORS = 2.0
"""By how many standard errors the collaborative learner must be worse to be restarted."""


class Guard:
    """A shadow with the learner's model, optimizer and batches that follows `Alone`, and comparisons with it."""

    def __init__(self, shadow: Learner, loss: Loss, held_out: Examples, every: int) -> None:
        self.shadow, self.loss, self.held_out, self.every = shadow, loss, held_out, every
        self.restarts = 0

    def compare(self, ours: nn.Module, alone: nn.Module) -> tuple[float, float, float]:
        """Return held-out loss of ours less that of alone, its standard error, paired by example, and alone's."""
        theirs = example_losses(alone, self.loss, self.held_out)
        change = example_losses(ours, self.loss, self.held_out) - theirs
        error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.inf
        return float(change.mean()), error, float(theirs.mean())

    def check(self, learner: Learner) -> GuardCheck:
        """Compare the collaborative learner with the shadow, and restart it where it is significantly worse."""
        difference, error, alone = self.compare(learner.model, self.shadow.model)
        self.shadow.consider(alone)
        if not difference <= WORSE_BY_ERRORS * error:  # a loss that is not a number is worse
            self.restart(learner)
        return GuardCheck(alone_loss=alone, difference=difference, error=error, restarts=self.restarts)

    def decide(
        self, model: nn.Module, best: dict[str, Any]
    ) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the better of a model and the best of the shadow, its `Learner.best`, and the decision."""
        alone = self.alone()
        if alone is None:
            return model, best, None
        difference, error, _ = self.compare(model, alone)
        if not best or self.shadow.best["loss"] < best["loss"]:
            return alone, self.shadow.best, GuardDecision(served="alone", difference=difference, error=error)
        return model, best, GuardDecision(served="collaborative", difference=difference, error=error)

    def alone(self) -> nn.Module | None:
        """Return the best of the shadow, the model trained alone; None before the first comparison."""
        if not self.shadow.best:
            return None
        alone = copied(self.shadow.model)
        load_trained_state(alone, self.shadow.best["model"])
        return alone

    def restart(self, learner: Learner) -> None:
        """Let the learner go on from the shadow, listening to nobody for twice as long as the last time."""
        learner.restart_from(self.shadow, listens_from=learner.step + self.every * 2**self.restarts)
        self.restarts += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {"shadow": self.shadow.state_dict(), "restarts": self.restarts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.shadow.load_state_dict(state["shadow"])
        self.restarts = state["restarts"]
