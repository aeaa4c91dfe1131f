"""Cross-fitting and cross-validation on user 0's own examples: the weights of the peers, and how much they help.

User 0's examples are split into folds, and for each fold a model is trained without it. The gradient and the loss
on examples that a model was fitted to are biased; those on the fold that it has not seen are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.gradients.simplex import simplex_minimum
from coterie.learners.side_by_side import Runs, side_by_side
from coterie.learners.spec import RunSpec
from coterie.recording.progress import progress_bar
from coterie.users.examples import InMemory
from coterie.users.sampling import random_key
from coterie.users.user import User

Array: TypeAlias = NDArray[np.float64]

GRAM_EVERY = 5
"""Steps from one Gram matrix to the next; after each the weights are fitted again."""
GRAM_MEMORY = 50
"""How many Gram matrices the running mean goes back over; before that it is the mean of all."""
SHRINKAGE = 0.1
"""How far the Gram matrix is drawn towards its diagonal. The noise of h is in all its entries; left on the diagonal
alone, a part of it makes peers that differ by less than the own examples can show share the weight."""
MIN_SHARE = 0.25
"""Peers with less than this share of an equal weight get none. A network that can fit everything fits wrong labels
too, however small their weight: only zero keeps them out."""
EVALUATIONS = 10
"""How many times the held-out losses of a run are evaluated."""


@dataclass(frozen=True, eq=False)
class FittedWeights:
    """The weights of user 0 and its peers, fitted to gradients on unseen examples.

    Args:
        tau: the weight of each peer among the peers, of shape (N,); equal where only the own gradient counted.
        steps: the steps at which `kappa` was fitted.
        kappa: the weights of the own gradient and of each peer's over time, of shape (times, 1 + N).
    """

    tau: Array
    steps: list[int]
    kappa: Array


def split(me: User, folds: int, seed: int) -> Tensor:
    """Return the fold of each of a user's examples, equal in size and, as far as they go, in targets.

    Example:
        >>> user = User("a", torch.zeros(6, 1), [0, 0, 0, 1, 1, 1])
        >>> sorted(split(user, 3, seed=0)[:3].tolist())
        [0, 1, 2]
    """
    random = np.random.default_rng(random_key(seed, f"{me.name}/folds"))
    targets = np.zeros(len(me))
    if isinstance(me.examples, InMemory):  # of a target of several numbers, the first
        targets = me.examples.targets.cpu().reshape(len(me), -1)[:, 0].numpy()
    dealt = np.arange(len(me)) % folds
    if np.issubdtype(targets.dtype, np.floating):  # numbers have one order only: shuffle each round
        dealt = np.concatenate([random.permutation(folds) for _ in range(-(-len(me) // folds))])[: len(me)]
    fold = np.empty(len(me), dtype=np.int64)
    fold[np.lexsort((random.random(len(me)), targets))] = dealt
    return torch.from_numpy(fold)


def fit_weights(problem: RunSpec, folds: Tensor, progress: bool | None = False) -> FittedWeights:
    """Fit the weights whose combination of gradients is nearest to the gradient on unseen examples.

        H = running mean over steps and runs of (G − 1hᵀ)(G − 1hᵀ)ᵀ,   κ = argmin over the simplex of κᵀHκ

    G has the own gradient and the peers' as rows, h is the gradient on the fold that the run does not see; its
    noise adds the same to every κ. H is drawn towards its diagonal by `SHRINKAGE` first. All runs step by κ, and τ
    is the peers' part of κ, averaged over the last third.

    Args:
        problem: what to train.
        folds: the fold of each own example, from `split`.
        progress: show a progress bar; None: when standard error is a terminal.
    """
    seen = training_masks(folds)
    runs = side_by_side(problem, seen)
    gram, times = np.zeros((1 + len(problem.peers),) * 2), 0
    kappa, steps, weights = [], [], torch.empty(0)
    with progress_bar(progress, "fitting weights", problem.steps) as show:
        for step in range(problem.steps):
            if step % GRAM_EVERY == 0:
                fresh = runs.grams().mean(0).numpy()
                if np.isfinite(fresh).all():
                    times += 1
                    gram += (fresh - gram) * max(1 / times, 1 / GRAM_MEMORY)
                kappa.append(simplex_minimum((1 - SHRINKAGE) * gram + SHRINKAGE * np.diag(np.diag(gram))))
                steps.append(step)
                weights = torch.from_numpy(kappa[-1]).expand(len(seen), -1)
            runs.advance(weights)
            show(step + 1, math.nan, 1 - kappa[-1][0], None)
    return FittedWeights(_late(np.array(kappa)), steps, np.array(kappa))


def cross_validate(problem: RunSpec, folds: Tensor, weights: Array, progress: bool | None = False) -> Array:
    """Return the held-out loss of each own example under each candidate.

    Args:
        problem: what to train.
        folds: the fold of each own example, from `split`.
        weights: of shape (candidates, 1 + N): of the own gradient and of each peer's.
        progress: show a progress bar; None: when standard error is a terminal.

    Returns:
        Losses of shape (evaluations, candidates, examples).
    """
    seen = training_masks(folds)
    runs = side_by_side(problem, seen.repeat(len(weights), 1))
    each = torch.from_numpy(weights).repeat_interleave(len(seen), 0)
    evaluated = sorted({-(-problem.steps * k // EVALUATIONS) for k in range(1, EVALUATIONS + 1)})
    losses: list[Array] = []
    with progress_bar(progress, "cross-validating", problem.steps) as show:
        for step in range(1, problem.steps + 1):
            runs.advance(each)
            if step in evaluated:
                losses.append(_by_candidate(runs, seen, len(weights)))
            show(step, float(losses[-1].mean(1).min()) if losses else math.nan, math.nan, None)
    return np.stack(losses)


def training_masks(folds: Tensor) -> Tensor:
    """Return which examples each run sees: one run for each fold, which sees all but that.

    Example:
        >>> training_masks(torch.tensor([0, 1, 0])).tolist()
        [[False, True, False], [True, False, True]]
    """
    return folds != torch.arange(int(folds.max()) + 1)[:, None]


def _late(kappa: Array) -> Array:
    """Return the peers' weights averaged over the last third of the times, the small ones set to zero."""
    late = kappa[-max(1, len(kappa) // 3) :, 1:]
    late = late[late.sum(1) > 1e-9]
    if not len(late):
        return np.full(kappa.shape[1] - 1, 1 / (kappa.shape[1] - 1))
    tau = (late / late.sum(1, keepdims=True)).mean(0)
    tau[tau < MIN_SHARE / len(tau)] = 0.0
    return np.asarray(tau / tau.sum())


def _by_candidate(runs: Runs, seen: Tensor, candidates: int) -> Array:
    """Return each example's held-out loss under each candidate; infinite for a run that failed."""
    losses = runs.held_out_losses().cpu().reshape(candidates, *seen.shape)
    return np.asarray(losses.nan_to_num(nan=torch.inf).masked_fill(seen, 0.0).sum(1).numpy())
