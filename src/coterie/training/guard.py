"""The guard: never worse than alone, up to the reported validation error.

No rule of averaging can promise that: a peer that sends plausible, slowly alternating drift beats
every robust average. So user 0 also keeps a shadow, the same model trained alone, at the price of
one more own gradient a step. Every so often the two are compared on held-out examples; where the
collaborative learner is significantly worse it restarts from the shadow and listens to nobody for a
while, twice as long each time; a method is not restarted. What is served is the better of the two.

Significantly: so much worse, on so few examples and seen so often, that of the runs whose peers do
    no harm chance
restarts one in twenty at most. What the examples cannot show the guard does not see: a peer that
holds copies of them can look better on them than it is.
"""

import math
from collections.abc import Mapping
from typing import Any

from scipy import special
from torch import Tensor, nn

from coterie.evaluation.evaluate import example_losses, paired_error
from coterie.gradients.parameters import copied, load_trained_state
from coterie.learners.learner import Learner
from coterie.recording.result import GuardCheck, GuardDecision
from coterie.users.examples import Examples
from coterie.users.user import Loss

BY_CHANCE = 0.05
"""How often a run whose peers do no harm may be restarted by chance, all comparisons of the run together."""


class Guard:
    """A shadow with the learner's model, optimizer and batches that follows `Alone`, and comparisons with it.

    `every` and `comparisons`: how many steps lie between two comparisons, and how many of those a
    run has.
    """

    def __init__(
        self, shadow: Learner, loss: Loss, held_out: Examples, every: int, comparisons: int
    ) -> None:
        self.shadow, self.loss, self.held_out, self.every = shadow, loss, held_out, every
        self.level = BY_CHANCE / comparisons  # the chances of all comparisons add up to no more
        self.restarts = 0
        # held-out losses that were computed together with others
        self.known: dict[nn.Module, Tensor] = {}

    def compare(self, ours: nn.Module, alone: nn.Module) -> tuple[float, float, float]:
        """Return held-out loss of ours less that of alone, its standard error, paired by example, and alone's."""
        losses_alone = self._losses(alone)
        change = self._losses(ours) - losses_alone
        return float(change.mean()), paired_error(change), float(losses_alone.mean())

    def _losses(self, model: nn.Module) -> Tensor:
        known = self.known.pop(model, None)
        return example_losses(model, self.loss, self.held_out) if known is None else known

    def check(self, learner: Learner) -> GuardCheck:
        """Compare the collaborative learner with the shadow, and restart it where it is significantly worse."""
        difference, error, alone = self.compare(learner.model, self.shadow.model)
        self.shadow.consider(alone)
        if (
            learner.can_restart
            and worse_by_chance(difference, error, len(self.held_out)) < self.level
        ):
            self.restart(learner)
        return GuardCheck(
            alone_loss=alone, difference=difference, error=error, restarts=self.restarts
        )

    def decide(
        self, model: nn.Module, best: dict[str, Any]
    ) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the better of a model and the best of the shadow, its `Learner.best`, and the decision."""
        alone = self.alone()
        if alone is None:
            return model, best, None
        difference, error, _ = self.compare(model, alone)
        found: dict[str, Any] = {
            "difference": difference,
            "error": error,
            "alone_step": self.shadow.best["step"],
        }
        if not best or self.shadow.best["loss"] < best["loss"]:
            return alone, self.shadow.best, GuardDecision(served="alone", **found)
        return model, best, GuardDecision(served="collaborative", **found)

    def alone(self) -> nn.Module | None:
        """Return the best of the shadow, the model trained alone.

        None before the first comparison.
        """
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


def worse_by_chance(difference: float, error: float, n: int) -> float:
    """Return how often chance alone shows a loss worse by as much on n examples, by Student's t, one-sided.

    n differences have one sign by chance in one case of 2ⁿ, so that nothing is rarer. A loss that
    is not a number is worse, not by chance.

    Example:
        >>> round(worse_by_chance(0.2, 0.1, 31), 3), worse_by_chance(0.2, 0.001, 5)
        (0.027, 0.03125)
    """
    if math.isnan(difference) or difference == math.inf:
        return 0.0
    if n < 2 or difference <= 0 or not math.isfinite(error):
        return 1.0
    return max(2.0**-n, float(special.stdtr(n - 1, -difference / error)) if error else 0.0)
