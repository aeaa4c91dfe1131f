"""The peers' weights at all copies of a run.

Fitted in the trunks, by numbers of examples in pooled.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from coterie.choosing.adaptive.directions import WithoutOutliers
from coterie.choosing.adaptive.schedule import Schedule
from coterie.choosing.adaptive.weights import Array, FittedWeights, added_noise, shares, sizes
from coterie.engines.engine import Engine


class PeerWeights:
    """Whom each copy follows.

    Every trunk its fitted weights, pooled the peers' shares of all examples.

    Args:
        engine: which tells numbers of examples, and the noise that private peers add.
        schedule: of the run.
        d: how many numbers a gradient has.
        n_folds: into how many parts user 0's examples are split; each has a trunk.
    """

    def __init__(self, engine: Engine, schedule: Schedule, d: int, n_folds: int) -> None:
        self.engine, self.steps, self.d = engine, schedule.steps, d
        self.fitted = [FittedWeights(len(engine.names), schedule.half) for _ in range(n_folds)]
        self.sizes = sizes(engine)
        self.by_size = shares(self.sizes)

    def fit(self, near: WithoutOutliers) -> None:
        """Fit the weights of the next steps."""
        added = added_noise(self.engine, self.d)
        for fitted, theirs, ours in zip(
            self.fitted, near.evidence.theirs, near.evidence.ours, strict=True
        ):
            fitted.add(theirs, ours, added)
        told = sizes(self.engine)  # sites tell theirs when they answer
        self.sizes = np.where(np.isnan(told), self.sizes, told)
        noise = added / (self.steps * max(near.usual * near.usual, 1e-30))
        self.by_size = shares(self.sizes, noise, without=near.outlier)

    def fork(self) -> bool:
        """Leave out of pooled peers that never answered.

        Say whether any peer is left.
        """
        judged = self.bounds() > 0
        if not self.by_size[
            judged
        ].any():  # all who answered were far too long at the last Gram matrix
            self.by_size = shares(self.sizes)
        if judged.any():
            self.by_size = self.by_size * judged / self.by_size[judged].sum()
        else:
            self.by_size = np.zeros_like(self.by_size)
        return bool(judged.any())

    def of_trunks(self) -> list[Array]:
        """Return the weights in each trunk, then in pooled."""
        return [*(fitted.weights for fitted in self.fitted), self.by_size]

    def served(self, branch: float, pooled: float) -> Array:
        """Return the peers' weights where what came of the trunks and of pooled has these shares."""
        tau = np.mean([fitted.tau() if fitted.kappa else self.by_size for fitted in self.fitted], 0)
        return np.asarray(branch * tau + pooled * self.by_size)

    def bounds(self) -> Array:
        """Return how long each peer's gradients were while it was judged.

        0 for one that never answered.
        """
        if not self.fitted[0].kappa:
            return np.zeros_like(self.by_size)
        return np.asarray(np.mean([fitted.bounds() for fitted in self.fitted], axis=0))

    def kappa(self) -> Array:
        """Return κ of every Gram matrix, nobody's first, the mean over trunks."""
        return np.asarray(np.mean([np.array(fitted.kappa) for fitted in self.fitted], axis=0))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later weights depend on."""
        return {
            "sizes": torch.from_numpy(self.sizes),
            "by_size": torch.from_numpy(self.by_size),
            "fitted": [fitted.state_dict() for fitted in self.fitted],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.sizes, self.by_size = (state[name].cpu().numpy() for name in ("sizes", "by_size"))
        for fitted, saved in zip(self.fitted, state["fitted"], strict=True):
            fitted.load_state_dict(saved)
