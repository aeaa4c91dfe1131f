"""The looks of a run.

Losses of examples that copies have not seen, noted on every path, and what they choose.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.choosing.adaptive.stopping import (
    Candidate,
    Chosen,
    Resampled,
    hellinger,
    standard_error,
    worst_loss,
)
from coterie.choosing.adaptive.weights import Array
from coterie.engines.asking import GradientsAtPoints
from coterie.evaluation.losses import is_log_likelihood, is_squared
from coterie.gradients.parameters import copied
from coterie.learners.spec import RunSpec
from coterie.recording.result import GuardDecision
from coterie.users.examples import InMemory
from coterie.users.sampling import random_key
from coterie.users.trees import leaves
from coterie.users.user import User


class HeldOutEvaluations:
    """The paths with their looks. After each look the model is what would be served then."""

    def __init__(
        self, spec: RunSpec, points: GradientsAtPoints, folds: Tensor, *, nested: bool
    ) -> None:
        self.spec, self.points, self.folds, self.nested = spec, points, folds, nested
        self.paths = {"alone": Candidate()}
        self.held_out = 0 if spec.me.validation is None else len(spec.me.validation)
        everyone = np.concatenate(
            [folds.numpy(), np.arange(self.held_out) % (int(folds.max()) + 1)]
        )
        distance, self.chosen_by = (
            (hellinger, "1 − √p") if is_log_likelihood(spec.loss) else (np.asarray, "loss")
        )
        drawn = random_key(spec.seed, f"{spec.me.name}/resamples") % 2**63
        self._resampled = Resampled(everyone, drawn, distance)
        self.chosen: Chosen | None = None

    def add(self, step: int, copies: Mapping[str, Tensor]) -> None:
        """Note losses at the points of each path's copies.

        The one that sees all first, then any blind ones.
        """
        for name, points in copies.items():
            each = self.points.losses(points, self.spec.me.examples)
            crossed = corrected = full = each[0]
            if len(points) > 1:
                crossed = self.crossed(each[1:])
                corrected = self.corrected(crossed, each)
            if self.spec.me.validation is not None:
                held_out = self.points.losses(points[:1], self.spec.me.validation)[0]
                crossed, corrected, full = (
                    torch.cat([one, held_out]) for one in (crossed, corrected, full)
                )
            self.paths[name].add(step, points[0], crossed, corrected, full)
        self.chosen = self._resampled.choose(self.paths, nested=self.nested)
        path = self.paths[self.chosen.path]
        self.points.serve(path.mean_point(self.chosen.frequencies[self.chosen.path]))

    def crossed(self, losses: Tensor) -> Tensor:
        """Return the loss of each own example in the row of its fold."""
        return losses[self.folds, torch.arange(len(self.folds))]

    def corrected(self, crossed: Tensor, each: Tensor) -> Tensor:
        """Return losses by blind copies less what these lose by the examples that they lack.

        Burman (1989) adds the loss of the copy that sees all less the mean loss of the blind ones.
        For least squares that is right to first order. For losses of classes it took off too much,
        and what is told stays as it is; see `benchmarks/honesty.py`.
        """
        return crossed + each[0] - each[1:].mean(0) if is_squared(self.spec.loss) else crossed

    def guarded(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model, or the one trained alone where its validation loss is lower.

        See `Learner.served`.
        """
        judged = self._guarded()
        if judged is None or judged[0].served != "alone":
            return copied(self.spec.model), {}, judged and judged[0]
        decision, best, point = judged
        return self._with(point), best, decision

    def overruled(self) -> bool:
        """Say whether a guard serves the model trained alone."""
        judged = self._guarded()
        return judged is not None and judged[0].served == "alone"

    def _guarded(self) -> tuple[GuardDecision, dict[str, Any], Tensor] | None:
        """Return what a guard decides, and Alone's best look and point.

        None without validation examples.
        """
        if self.chosen is None or self.spec.me.validation is None:
            return None
        # Both are means over looks chosen alike: the best of many looks would look better than it
        # is.
        path, frequencies = self.paths["alone"], self.chosen.frequencies["alone"]
        # the model is what is served
        points = torch.stack([self.points.start(), path.mean_point(frequencies)])
        worst = worst_loss(self.paths)  # what both lose where neither's loss is finite
        ours, theirs = (
            self.points.losses(points, self.spec.me.validation)
            .double()
            .nan_to_num(worst, worst)
            .numpy()
        )
        change, lower = ours - theirs, not ours.mean() <= theirs.mean()
        decision = GuardDecision(
            served="alone" if lower else "collaborative",
            difference=float(change.mean()),
            error=standard_error(change),
        )
        best = {"step": path.steps[int(frequencies.argmax())], "loss": float(theirs.mean())}
        return decision, best, points[1]

    def told(self) -> tuple[Array, Array]:
        """Return the loss of each own and validation example under what is served and under Alone."""

        def losses_at(point: Tensor) -> Array:
            held = [
                part
                for part in (self.spec.me.examples, self.spec.me.validation)
                if part is not None
            ]
            return (
                torch.cat([self.points.losses(point[None], part)[0] for part in held])
                .double()
                .numpy()
            )

        if self.chosen is None:
            raise AssertionError("nothing has been looked at yet")
        return self._resampled.told(self.chosen, self.paths, losses_at)

    def alone(self) -> nn.Module | None:
        """Return the model trained alone, as its looks say."""
        if self.chosen is None:
            return None
        return self._with(self.paths["alone"].mean_point(self.chosen.frequencies["alone"]))

    def _with(self, point: Tensor) -> nn.Module:
        """Return a copy of the model with the parameters and buffers of a point."""
        served = self.points.start()
        self.points.serve(point)
        model = copied(self.spec.model)
        self.points.serve(served)
        return model

    def load(self, paths: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up saved paths, their losses on the host."""
        self.paths = {}
        for name, saved in paths.items():
            kinds = ([each.cpu() for each in saved[key]] for key in ("losses", "corrected", "full"))
            self.paths[name] = Candidate(list(saved["steps"]), list(saved["points"]), *kinds)
        if self.paths["alone"].steps:
            self.chosen = self._resampled.choose(self.paths, nested=self.nested)


def split(me: User, folds: int, seed: int) -> Tensor:
    """Return the fold of each of a user's examples, equal in size and, as far as they go, in targets."""
    random = np.random.default_rng(random_key(seed, f"{me.name}/folds"))
    targets = np.zeros(len(me))
    held = leaves(me.examples.targets) if isinstance(me.examples, InMemory) else []
    if held:  # of a target of several numbers, the first
        first = held[0].cpu().reshape(len(me), -1)[:, 0]
        # NumPy has no bfloat16
        targets = (first.double() if first.is_floating_point() else first).numpy()
    dealt = np.arange(len(me)) % folds
    if np.issubdtype(targets.dtype, np.floating):  # numbers have one order only: shuffle each round
        dealt = np.concatenate([random.permutation(folds) for _ in range(-(-len(me) // folds))])[
            : len(me)
        ]
    fold = np.empty(len(me), dtype=np.int64)
    fold[np.lexsort((random.random(len(me)), targets))] = dealt
    return torch.from_numpy(fold)
