"""The guard: never worse than alone, up to the reported validation error.

No rule of averaging can promise that: a peer that sends plausible, slowly alternating drift beats every robust
average. So user 0 also keeps a shadow, the same model trained alone, at the price of one more own gradient a
step. Every so often the two are compared on held-out examples; where the collaborative track is significantly
worse it restarts from the shadow and listens to nobody for a while, twice as long each time. What is served is
the better of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from coterie.evaluation.evaluate import losses
from coterie.learners.learner import Track
from coterie.users.examples import Examples
from coterie.users.user import Loss

ENOUGH = 100
"""How many held-out examples a guard needs by default: with fewer it would mostly judge noise."""

WORSE = 2.0
"""By how many standard errors the collaborative track must be worse to be restarted."""


@dataclass(frozen=True)
class Comparison:
    """Held-out losses of the collaborative model less those of the one trained alone.

    Args:
        difference: the mean; below zero, collaboration helped.
        error: its standard error, paired by example.
        alone: the mean loss of the model trained alone.
    """

    difference: float
    error: float
    alone: float


class Guard:
    """A shadow trained alone, and the comparison with it.

    Args:
        shadow: a track of the same model, optimizer and batches that follows `Alone`.
        loss: the mean loss of a batch from (output, target).
        held_out: the examples to compare on.
        every: the steps between comparisons.
    """

    def __init__(self, shadow: Track, loss: Loss, held_out: Examples, every: int) -> None:
        self.shadow, self.loss, self.held_out, self.every = shadow, loss, held_out, every
        self.restarts = 0

    def compare(self, ours: nn.Module, alone: nn.Module) -> Comparison:
        """Compare two models on the held-out examples."""
        theirs = losses(alone, self.loss, self.held_out)
        change = losses(ours, self.loss, self.held_out) - theirs
        error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.inf
        return Comparison(float(change.mean()), error, float(theirs.mean()))

    def check(self, track: Track) -> Comparison:
        """Compare the collaborative track with the shadow, and restart it where it is significantly worse."""
        found = self.compare(track.model, self.shadow.model)
        self.shadow.consider(found.alone)
        if not found.difference <= WORSE * found.error:  # a loss that is not a number is worse
            self.restart(track)
        return found

    def restart(self, track: Track) -> None:
        """Let the track go on from the shadow, listening to nobody for twice as long as the last time."""
        track.restart_from(self.shadow, listens_from=track.step + self.every * 2**self.restarts)
        self.restarts += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {"shadow": self.shadow.state_dict(), "restarts": self.restarts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.shadow.load_state_dict(state["shadow"])
        self.restarts = state["restarts"]
