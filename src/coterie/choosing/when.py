"""When to stop, and which path to serve: losses at looks, and how often each look is best under resampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.choosing.whom import Array

RESAMPLES = 300
"""Bootstrap resamples of the examples."""
HANDICAP = 0.5
"""With one trunk: how much better than pooled the branch must be, in paired standard errors, since the branch's
weights were fitted to the examples that judge it."""
WORST = 1e9
"""What a loss that is not finite, or larger, counts as: such a look is never the best."""


@dataclass
class Path:
    """One path: the points of the copy that sees all examples, and losses of examples that the judged copy has not.

    Losses, of shape (n + v,), are of each own example by the copy that is blind to it, then of each validation
    example; looks and paths are chosen by them. A blind copy has had fewer examples than the one that sees all:
    Burman's correction, for what is told, adds the latter's loss less the blind copies' mean loss, by example.
    """

    steps: list[int] = field(default_factory=list)  # of the looks
    points: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    corrected: list[Tensor] = field(default_factory=list)

    def add(self, step: int, point: Tensor, losses: Tensor, corrected: Tensor) -> None:
        """Add a look."""
        self.steps.append(step)
        self.points.append(point.clone())
        self.losses.append(losses)
        self.corrected.append(corrected)

    def table(self, *, corrected: bool = False) -> Array:
        """Return the losses of all looks, of shape (looks, n + v)."""
        losses = torch.stack(self.corrected if corrected else self.losses).double()
        return np.asarray(losses.nan_to_num(WORST, WORST, WORST).clamp(max=WORST).numpy())

    def mean_point(self, frequencies: Array) -> Tensor:
        """Return the mean of the points with these frequencies; points of none may be anything."""
        used = [(f, point) for f, point in zip(frequencies.tolist(), self.points, strict=True) if f]
        mean = torch.zeros_like(used[0][1])
        for frequency, point in used:
            mean.add_(point, alpha=frequency)
        return used[0][1].clone() if len(used) == 1 else mean


@dataclass(frozen=True, eq=False)
class Chosen:
    """What is served."""

    path: str
    frequencies: Mapping[str, Array]  # of each path's looks
    served: Array  # the loss of each example, (n + v,), looks and path chosen without the example's fold
    alone: Array  # the same for Alone


class Resampled:
    """Bootstrap resamples of examples, each of which lies in a fold, drawn once."""

    def __init__(self, folds: NDArray[np.int64], seed: int) -> None:
        n = len(folds)
        self.folds, self.count = folds, int(folds.max()) + 1
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
        self.counts = np.minimum(drawn, 255).astype(np.uint8)

    def frequencies(self, table: Array, without: int | None = None) -> Array:
        """Return how often each look is the best by losses (looks, n), without the examples of one fold."""
        kept = np.ones(len(self.folds), bool) if without is None else self.folds != without
        best = (table[:, kept] @ self.counts[:, kept].T.astype(float)).argmin(0)
        return np.asarray(np.bincount(best, minlength=len(table)) / len(best))

    def choose(self, paths: Mapping[str, Path], *, nested: bool) -> Chosen:
        """Choose a path, and the frequencies of its looks.

        Paths are compared by each example's loss with frequencies made without its fold. `nested`: the branch's
        weights were fitted without the examples that judge it.
        """
        tables = {name: path.table() for name, path in paths.items()}
        folds = range(self.count)
        weights = {name: np.stack([self.frequencies(t, q) for q in folds]) for name, t in tables.items()}
        by_fold = {name: weights[name] @ tables[name] for name in paths}  # (folds, examples)
        path = best_path(
            {name: each[self.folds, np.arange(len(self.folds))] for name, each in by_fold.items()}, nested
        )
        told = {name: weights[name] @ p.table(corrected=True) for name, p in paths.items()}
        served, alone = np.empty(len(self.folds)), np.empty(len(self.folds))
        for q in folds:  # the path, too, is chosen without the fold that judges it
            judging = self.folds == q
            its = best_path({name: each[q][~judging] for name, each in by_fold.items()}, nested)
            served[judging], alone[judging] = told[its][q][judging], told["alone"][q][judging]
        frequencies = {name: self.frequencies(table) for name, table in tables.items()}
        return Chosen(path, frequencies, served, alone)


def best_path(scores: Mapping[str, Array], nested: bool = True) -> str:
    """Return the path of least mean loss: branch or pooled, or Alone where it is not worse."""
    if "branch" not in scores:
        return "alone"
    lead = scores["pooled"] - scores["branch"]
    handicap = 0.0 if nested else HANDICAP * standard_error(lead)
    best = "pooled" if lead.mean() < handicap else "branch"
    return "alone" if scores["alone"].mean() <= scores[best].mean() else best


def standard_error(values: Sequence[float] | Array) -> float:
    """Return the standard error of a mean; infinite for one value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
