"""Sets and intervals that cover.

Split conformal prediction for user 0 that borrows its peers' residuals.

A score says how badly a model predicts a row: |y − ŷ| for numbers, 1 − p_y for classes. User 0's
scores are of rows that the model was not trained on. A prediction is all answers whose score is at
most a threshold q, the least number with

    Σ_{own i: s_i ≤ q} 1 + Σ_{peers' j: s_j ≤ q} m  ≥  c (n + 1 + mB)

of n own scores of weight 1, B peers' scores of weight m each, and a last one, of the new row, which
counts as infinite.

**What is guaranteed.** Without peers (B = 0), for a new row exchangeable with the n own ones:
P(covered) ≥ c, whatever model and data are; q is infinite where n < c/(1 − c), and then everything
is in the set. With peers whose scores are exchangeable with the own ones too, and a choice of peers
that does not look at the scores: P(covered) ≥ c again. Where a peer's scores are of another
distribution, at total variation d from the own, at least c − d·mB/(n + 1 + mB) (Barber, Candès,
Ramdas and Tibshirani 2023, Theorem 2, for fixed weights).

Peers lend only where own scores are too few for a set, n < c/(1 − c): with 10 and with 40 own scores
they made sets hardly narrower where users are alike, and wider elsewhere (docs/conformal.md). They
are chosen by the scores, which no theorem covers. A rank test (Mann–Whitney, by its normal
limit) says whether the own scores are larger than a peer's, which would make sets too small (p <
`TOO_SMALL`), or smaller, which would make them too large (p < `TOO_LARGE`); such a peer lends
nothing. mB is at most `MOST` times n, so that own rows are never drowned. What that covers is
measured, in docs/conformal.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from coterie.arguments import real

Array = NDArray[np.float64]
Scores = Sequence[float] | Array
COVERAGE = real("lie between 0 and 1", lambda coverage: 0 < coverage < 1)
TOO_SMALL, TOO_LARGE = 0.1, 0.3
"""The least p, for each of the two errors, with which a peer's scores count as the own."""
MOST = 4.0
"""How many times the own rows' weight peers may have together."""


class Threshold(NamedTuple):
    """The largest score in a set, and who lent scores for it."""

    score: float
    lenders: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """The scores of user 0's held-out rows, and of each peer's rows, under the model served.

    Example:
        >>> own = [0.1, 0.4, 0.2, 0.9, 0.3]
        >>> Calibration(own).threshold(0.8)
        Threshold(score=0.9, lenders=())
        >>> Calibration(own).threshold(0.9)  # 5 rows cannot cover more than 5 times in 6
        Threshold(score=inf, lenders=())
        >>> alike, loud = [0.1, 0.2, 0.3, 0.4, 0.9] * 4, [5.0] * 20
        >>> Calibration(own, {"a": alike, "b": loud}).threshold(0.9)
        Threshold(score=0.9, lenders=('a',))
    """

    own: Scores
    peers: Mapping[str, Scores] = field(default_factory=dict)

    def lenders(self) -> tuple[str, ...]:
        """Return the peers whose scores are not told apart from the own ones."""
        return tuple(
            name
            for name, lent in self.peers.items()
            if len(lent) and len(self.own) and self._resembles(lent)
        )

    def _resembles(self, lent: Scores) -> bool:
        n, m, ordered = len(self.own), len(lent), np.sort(np.asarray(lent, float))
        below = sum(np.searchsorted(ordered, self.own, side) for side in ("left", "right")) / (
            2 * m
        )
        z = (float(np.mean(below)) - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
        return bool(ndtr(-z) >= TOO_SMALL and ndtr(z) >= TOO_LARGE)

    def threshold(self, coverage: float) -> Threshold:
        """Return the threshold of a coverage c, by own scores; where they are too few, with peers' that are alike."""
        coverage, n = COVERAGE("coverage", coverage), len(self.own)
        too_few = n < coverage * (n + 1) * (1 - 1e-12)
        names = self.lenders() if too_few else ()
        lent = (
            np.concatenate([np.asarray(self.peers[name], float) for name in names])
            if names
            else np.empty(0)
        )
        each = min(1.0, MOST * n / len(lent)) if len(lent) else 0.0
        scores = np.concatenate([np.asarray(self.own, float), lent])
        weights = np.concatenate([np.ones(n), np.full(len(lent), each)])
        order = np.argsort(scores)
        enough = np.cumsum(weights[order]) >= coverage * (weights.sum() + 1) * (1 - 1e-12)
        return Threshold(
            float(scores[order][enough.argmax()]) if enough.any() else float("inf"), names
        )


def scores(outputs: Array, targets: Array) -> Array:
    """Return each row's score.

    |y − ŷ| where outputs are numbers, 1 − p_y where they are rows of probabilities.

    Example:
        >>> scores(np.array([[0.7, 0.3], [0.2, 0.8]]), np.array([0, 0])).round(1).tolist()
        [0.3, 0.8]
    """
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return np.asarray(
            1 - np.take_along_axis(outputs, targets.astype(int).reshape(-1, 1), 1)[:, 0]
        )
    return np.abs(targets.reshape(-1) - outputs.reshape(-1))


def scores_of_losses(losses: Array, *, classes: bool) -> Array:
    """Return each row's score from its loss: −log p_y of classes, else the squared error.

    Losses of own rows by models that did not see their fold are told by every fit in folds; so all
    own rows can calibrate, and none need be held out.

    Example:
        >>> scores_of_losses(np.array([0.0, np.log(4)]), classes=True).tolist()
        [0.0, 0.75]
        >>> scores_of_losses(np.array([0.0, 4.0]), classes=False).tolist()
        [0.0, 2.0]
    """
    return -np.expm1(-losses) if classes else np.sqrt(losses)
