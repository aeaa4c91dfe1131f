"""When to stop, and which path to serve.

Losses at looks, and how often each look is best under resampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.choosing import gradient_squares
from coterie.choosing.adaptive.weights import Array

RESAMPLES = 300
"""Bootstrap resamples of the examples."""
HANDICAP = 0.5
"""With one trunk: how much better than pooled the branch must be, in paired standard errors, since the branch's
weights were fitted to the examples that judge it."""
WORST = 1e9
"""What a loss that is not finite, or larger, counts as.

Such a look is never the best. It is in losses usual at the
start, where those are above 1: squares of large numbers are large."""


@dataclass
class Candidate:
    """One path: the points of the copy that sees all examples, and losses of examples that the judged copy has not.

    Losses, of shape (n + v,), are of each own example by the copy that is blind to it, then of each
    validation example; looks and paths are chosen by them. A blind copy has had fewer examples than
    the one that sees all: see `HeldOutEvaluations.corrected` for what is told. The losses of the
    copy that sees all are kept, too.
    """

    steps: list[int] = field(default_factory=list)  # of the looks
    points: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    corrected: list[Tensor] = field(default_factory=list)
    full: list[Tensor] = field(default_factory=list)

    def add(
        self, step: int, point: Tensor, losses: Tensor, corrected: Tensor, full: Tensor
    ) -> None:
        """Add a look."""
        self.steps.append(step)
        self.points.append(point.clone())
        self.losses.append(losses)
        self.corrected.append(corrected)
        self.full.append(full)

    def table(
        self, kind: Literal["losses", "corrected", "full"] = "losses", worst: float = WORST
    ) -> Array:
        """Return losses of all looks, of shape (looks, n + v), none above the worst."""
        losses = torch.stack(getattr(self, kind)).double()
        return np.asarray(losses.nan_to_num(worst, worst, worst).clamp(max=worst).numpy())

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
    # the same without the examples of each fold, of shape (folds, looks)
    without: Mapping[str, Array]
    by_example: NDArray[np.str_]  # the path that would be served without each example, (n + v,)


class Resampled:
    """Bootstrap resamples of examples, each of which lies in a fold, drawn once.

    `distance` makes of losses that by which looks and paths are chosen; what is told of them are
    the losses. A loss that is not finite is the worst there too.
    """

    def __init__(
        self, folds: NDArray[np.int64], seed: int, distance: Callable[[Array], Array] = np.asarray
    ) -> None:
        n = len(folds)
        self.folds, self.count, self.distance = folds, int(folds.max()) + 1, distance
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
        self.counts = np.minimum(drawn, 255).astype(np.uint8)

    def frequencies(self, table: Array, without: int | None = None) -> Array:
        """Return how often each look is the best by losses (looks, n), without the examples of one fold."""
        kept = np.ones(len(self.folds), bool) if without is None else self.folds != without
        best = (table[:, kept] @ self.counts[:, kept].T.astype(float)).argmin(0)
        return np.asarray(np.bincount(best, minlength=len(table)) / len(best))

    def choose(self, paths: Mapping[str, Candidate], *, nested: bool) -> Chosen:
        """Choose a path, and the frequencies of its looks.

        Paths are compared by each example's distance with frequencies made without its fold.
        `nested`: the branch's weights were fitted without the examples that judge it.
        """
        worst = worst_loss(paths)
        losses = {name: path.table(worst=worst) for name, path in paths.items()}
        tables = {
            name: np.where(each < worst, self.distance(each), worst)
            for name, each in losses.items()
        }
        folds = range(self.count)
        without = {
            name: np.stack([self.frequencies(t, q) for q in folds]) for name, t in tables.items()
        }
        scores = {name: self._own_fold(without[name] @ tables[name]) for name in paths}
        frequencies = {name: self.frequencies(table) for name, table in tables.items()}
        return Chosen(best_path(scores, nested), frequencies, without, best_paths(scores, nested))

    def told(
        self, chosen: Chosen, paths: Mapping[str, Candidate], losses_at: Callable[[Tensor], Array]
    ) -> tuple[Array, Array]:
        """Return each example's loss, (n + v,), under what is served and under Alone, corrected for the choice.

        Evaluations are chosen without the example's fold, the path without the example: one chosen
        without the whole fold is often a worse one. What is served is a mean of points; its loss is
        lower than the mean of theirs. By how much is seen from the copy that sees all examples, by
        `losses_at` its mean point.
        """
        worst = worst_loss(paths)

        def of(name: str) -> Array:
            path, without = paths[name], chosen.without[name]
            full, corrected = path.table("full", worst), path.table("corrected", worst)
            lower = [losses_at(path.mean_point(looks)) - looks @ full for looks in without]
            return self._own_fold(without @ corrected + np.stack(lower))

        alone = of("alone")
        served = alone.copy()
        for name in set(chosen.by_example.tolist()) - {"alone"}:
            its = chosen.by_example == name
            served[its] = of(name)[its]
        return served, alone

    def _own_fold(self, by_fold: Array) -> Array:
        """Return of each example the value in the row of its fold."""
        return np.asarray(by_fold[self.folds, np.arange(len(self.folds))])


def hellinger(losses: Array) -> Array:
    """Return 1 − √p of losses −log p.

    The squared Hellinger distance from a prediction to what was true.

    It is at most 1. The loss has no bound: the longer a network is trained, the surer it becomes
    also where it is wrong, and a few such examples would stop it long before it makes the fewest
    mistakes.

    Example:
        >>> hellinger(np.array([0.0, 2 * np.log(2), np.log(100), 1e9])).round(2).tolist()
        [0.0, 0.5, 0.9, 1.0]
    """
    # finite where a loss is no −log p, and below 0
    return np.asarray(-np.expm1(-0.5 * np.maximum(losses, -100.0)))


def worst_loss(paths: Mapping[str, Candidate]) -> float:
    """Return what losses count as at most.

    `WORST` losses that are usual at the start, from which all paths go.
    """
    start = paths["alone"].losses[0].double()
    usual = float(start[start.isfinite()].median()) if bool(start.isfinite().any()) else 1.0
    return WORST * max(1.0, usual)


def best_path(scores: Mapping[str, Array], nested: bool = True) -> str:
    """Return the path of least mean score: branch or pooled, or Alone where it is not worse."""
    if "branch" not in scores:
        return "alone"
    lead = scores["pooled"] - scores["branch"]
    handicap = 0.0 if nested else HANDICAP * standard_error(lead)
    best = "pooled" if lead.mean() < handicap else "branch"
    return "alone" if scores["alone"].mean() <= scores[best].mean() else best


def best_paths(scores: Mapping[str, Array], nested: bool = True) -> NDArray[np.str_]:
    """Return what `best_path` says without each of the examples; a handicap is that of all."""
    n = len(scores["alone"])
    if "branch" not in scores:
        return np.full(n, "alone")
    rest = {name: (each.sum() - each) / max(1, n - 1) for name, each in scores.items()}
    handicap = 0.0 if nested else HANDICAP * standard_error(scores["pooled"] - scores["branch"])
    pooled = rest["pooled"] - rest["branch"] < handicap
    best = np.where(pooled, rest["pooled"], rest["branch"])
    return np.where(rest["alone"] <= best, "alone", np.where(pooled, "pooled", "branch"))


def standard_error(values: Sequence[float] | Array) -> float:
    """Return the standard error of a mean; infinite for one value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")


def skewed_error(values: Array) -> float:
    """Return the standard error of a mean of losses, few of which are large.

    Half of what covers 95 % of resamples.

    Example:
        >>> skewed_error(np.array([0.0, 0.1, 0.0, 0.1, 0.0, 3.0])) > standard_error([0.0, 0.1, 0.0, 0.1, 0.0, 3.0])
        True
    """
    n, centred = len(values), values - values.mean()
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    weights = np.concatenate([np.ones((1, n)), drawn]) / n
    means = weights @ centred
    variances = (weights @ centred**2 - means**2) / max(1, n - 1)
    return gradient_squares.Resampled(means, variances).error
