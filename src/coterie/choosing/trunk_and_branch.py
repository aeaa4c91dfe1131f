"""Trunk and branch: the learner behind `AdaptiveAveraging`. See docs/adaptive.md.

    trunk    first half: F models follow the peers only; user 0's examples, which they do not see, say whom to
             follow. Trunk q is judged without fold q
    pooled   all steps: one more follows the peers by numbers of examples
    branch   second half, from the better of the two: F + 1 copies step by (1 − α) own + α peers, α falling; F of
             them are blind to one fold each, and their losses there say when to stop
    alone    all steps: F + 1 copies ask no peer

What is served is the mean of one path's points at its looks, by how often each look is the best under resampling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.choosing.account import compared, looks_of, sentence, stop_of
from coterie.choosing.when import Chosen, Path, Resampled, standard_error
from coterie.choosing.whom import GRAMS, Array, FittedWeights
from coterie.engines.engine import Engine
from coterie.learners.learner import Learner, NextStep
from coterie.learners.points import Own, Points, Sums
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.recording.costs import Costs
from coterie.recording.result import GuardDecision
from coterie.rules import Alone
from coterie.users.sampling import random_key

FIRST, LAST = 2.2, -4.6
"""The logit of α at the branch's first and last step: α falls from .9 to .01."""
LOOKS = 20
"""Looks in a run."""


class TrunkAndBranch(Learner):
    """Follow the peers first and the own examples more and more, and serve what the own examples found best.

    The model is, at every look, what would be served then.

    Args:
        spec: a run that is prepared.
        engine: where the gradients come from.
        costs: where what is asked of the users is counted.
        points: gradients and losses at many points; its parts are all own examples, then all but each fold.
        folds: the fold of each own example.
        nested: one trunk for each fold, judged without it; else one judged by all own examples.
        guarded: serve Alone's best look where its validation loss is lower.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        points: Points,
        folds: Tensor,
        *,
        nested: bool = True,
        guarded: bool = False,
    ) -> None:
        super().__init__(spec, Alone(), engine, costs)
        self.spec, self.points, self.nested, self.guarded = spec, points, nested, guarded
        self.folds, self.n_folds = folds, int(folds.max()) + 1
        self.n_trunks = self.n_folds if nested else 1
        self.half = max(1, round(spec.steps / 2))
        self.fitted = [FittedWeights(len(engine.names)) for _ in range(self.n_trunks)]
        self.by_size = _by_size(engine)
        self.trunk = "fitted"
        start = points.start()
        x, self._d = start[: points.d], points.d
        self.alone = Stack.of(spec, x.expand(self.n_folds + 1, -1))
        self.peers = Stack.of(spec, x.expand(self.n_trunks + 1, -1))
        self.buffers = [start[points.d :].expand(len(stack.x), -1).clone() for stack in (self.alone, self.peers)]
        self.paths = {"alone": Path()}
        held_out = 0 if spec.me.validation is None else len(spec.me.validation)
        everyone = np.concatenate([folds.numpy(), np.arange(held_out) % self.n_folds])
        self.resampled = Resampled(everyone, random_key(spec.seed, f"{spec.me.name}/resamples") % 2**63)
        self.chosen: Chosen | None = None
        self.rows_asked = self.gradients_asked = 0
        self._kept: tuple[Tensor, list[Array], Tensor] | None = None

    @property
    def followed(self) -> Any:
        """The rule that was asked for."""
        return self.spec.rule

    # ------------------------------------------------------------ steps

    def next_step(self) -> NextStep:
        """Ask everybody at all points, and return the step of all copies."""
        if self.chosen is None:
            self._look()
        return self._trunk_step() if self.step < self.half else self._branch_step()

    def _trunk_step(self) -> NextStep:
        step, trunks, points = self.step, self.n_trunks, self._points(1)
        own, parts = self._own(self._points(0), range(self.n_folds + 1)), self._judging()
        if step % max(1, self.half // GRAMS) == 0:
            everyone = torch.ones(trunks, len(self.by_size), dtype=torch.bool, device=points.device)
            rows, left_out = self.points.rows(points[:trunks], step, everyone)
            judged = self.points.on_all(points[:trunks], step, parts)
            pooled = self.points.sums(points[trunks:], step, self._tensor([self.by_size]))
            take = partial(self._take_gram, own, rows, judged, pooled)
            left_out = {**left_out, **pooled.left_out}
        else:
            weights = [fitted.weights for fitted in self.fitted]
            asked = self.points.sums(points, step, self._tensor([*weights, self.by_size]))
            take, left_out = partial(self._take_trunk, own, asked), dict(asked.left_out)
        return NextStep(own.gradients[0], own.loss, left_out, take)

    def _take_gram(self, own: Own, rows: Tensor, judged: Tensor, pooled: Sums) -> None:
        """Fit the weights again, and step by them."""
        for fitted, theirs, ours in zip(self.fitted, rows, judged, strict=True):
            fitted.add(theirs, ours)
        weights = self._tensor([fitted.weights for fitted in self.fitted])
        there = rows.isfinite().all(2)
        found = torch.einsum("rn,rnd->rd", weights * there, rows.masked_fill(~there.unsqueeze(2), 0.0))
        self.rows_asked += 1
        self.costs.compute([self.costs.me], int(self.points.parts[self._judging()[0]].sum()), times=len(rows))
        together = Sums(torch.cat([found, pooled.sums]), torch.cat([(weights * there).sum(1), pooled.answered]))
        self._take_trunk(own, together)

    def _take_trunk(self, own: Own, asked: Sums) -> None:
        """Let the trunks follow the peers, and Alone's copies their own gradients."""
        self._count([np.ones(len(self.by_size))] * (self.n_trunks + 1), len(own.gradients))
        self.peers.direction.copy_(asked.sums / asked.answered.clamp(min=1e-12).unsqueeze(1))
        if self.buffers[1].shape[1]:  # a trunk's running statistics are those of the examples that judge it
            moved = self._own(self._points(1), [*self._judging(), 0])
            self.buffers[1] = moved.buffers
        self._finish(own, 1.0)

    def _branch_step(self) -> NextStep:
        step, copies = self.step, self.n_folds + 1
        points = self._points(1)
        own_points, parts = points[:copies], [*range(copies), *range(copies)]
        if self.buffers[1].shape[1]:  # pooled needs no own gradient, but running statistics
            own_points, parts = points, [*parts, 0]
        own = self._own(torch.cat([self._points(0), own_points]), parts)
        weights, _, bounds = self._branch()
        asked = self.points.sums(points, step, weights, bounds)
        return NextStep(own.gradients[0], own.loss, asked.left_out, partial(self._take_branch, own, asked))

    def _take_branch(self, own: Own, asked: Sums) -> None:
        """Let the branch's copies follow the own gradients more and more, and pooled the peers."""
        copies, alpha = self.n_folds + 1, self.alpha_at(self.step)
        self._count(self._branch()[1], 2 * copies)
        share = alpha * asked.answered[:copies].unsqueeze(1)
        self.peers.direction[:copies] = (1 - share) * own.gradients[copies : 2 * copies] + alpha * asked.sums[
            :copies
        ]
        self.peers.direction[copies:] = asked.sums[copies:] / asked.answered[copies:].clamp(min=1e-12).unsqueeze(1)
        if self.buffers[1].shape[1]:
            self.buffers[1] = own.buffers[copies:]
        self._finish(own, alpha)

    def _finish(self, own: Own, weight: float) -> None:
        """Take the step of all copies; fork the trunk at its end, and look where it is time."""
        copies = self.n_folds + 1
        self.alone.direction.copy_(own.gradients[:copies])
        self.buffers[0] = own.buffers[:copies]
        self.alone.step()
        self.peers.step()
        self.step += 1
        self.state = {"step": self.step, "weight": weight}
        if self.step == self.half:
            self._fork()
        if self.step % max(1, self.spec.steps // LOOKS) == 0 or self.step in (self.half, self.spec.steps):
            self._look()

    def alpha_at(self, step: int) -> float:
        """Return the peers' weight at a step of the branch."""
        done = (step - self.half) / max(1, self.spec.steps - self.half - 1)
        return 1 / (1 + math.exp(-(FIRST + (LAST - FIRST) * min(1.0, done))))

    def _fork(self) -> None:
        """Begin the branch from the trunk of the lower loss on examples that did not steer it; pooled goes on."""
        trunks, copies = self.n_trunks, self.n_folds + 1
        ends = self.points.losses(self._points(1), self.spec.me.examples)
        fitted = self._crossed(ends[:trunks]) if self.nested else ends[0]
        self.trunk = "fitted" if bool(fitted.mean() <= ends[trunks].mean()) else "pooled"
        origins = [[trunks]] * copies
        if self.trunk == "fitted":
            origins = [list(range(trunks)), *([q] for q in range(trunks))] if self.nested else [[0]] * copies
        origins = [*origins, [trunks]]
        judged = self._bounds() > 0  # a peer that never answered is not asked any more
        if judged.any():
            self.by_size = self.by_size * judged / self.by_size[judged].sum()
            self.paths |= {"branch": Path(), "pooled": Path()}  # else nobody was followed, and Alone is served
        self.peers = self.peers.forked(origins)
        self.buffers[1] = torch.stack([self.buffers[1][rows].mean(0) for rows in origins])

    # ------------------------------------------------------------ looks

    def _look(self) -> None:
        """Note losses on examples that copies have not seen, and let the model be what would be served now."""
        copies = self.n_folds + 1
        self._judge("alone", self._points(0))
        if "branch" in self.paths:
            self._judge("branch", self._points(1)[:copies])
            self._judge("pooled", self._points(1)[copies:])
        self.chosen = self.resampled.choose(self.paths, nested=self.nested)
        path = self.paths[self.chosen.path]
        self.points.serve(path.mean_point(self.chosen.frequencies[self.chosen.path]))

    def _judge(self, name: str, points: Tensor) -> None:
        """Add a look to a path: the copy that sees all first, then the blind ones, where there are any."""
        each = self.points.losses(points, self.spec.me.examples)
        crossed = corrected = each[0]
        if len(points) > 1:
            crossed = self._crossed(each[1:])
            corrected = crossed + each[0] - each[1:].mean(0)
        if self.spec.me.validation is not None:
            held_out = self.points.losses(points[:1], self.spec.me.validation)[0]
            crossed, corrected = (torch.cat([losses, held_out]) for losses in (crossed, corrected))
        self.paths[name].add(self.step, points[0], crossed, corrected)

    def _crossed(self, losses: Tensor) -> Tensor:
        """Return the loss of each own example in the row of its fold."""
        return losses[self.folds, torch.arange(len(self.folds))]

    def consider(self, validation_loss: float) -> None:
        """Tell a scheduler that wants to know; what is best is chosen at the looks."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)
            for stack in (self.alone, self.peers):
                stack.set_rates(self.optimizer)

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model to serve; under a guard Alone's best look where its validation loss is lower."""
        model = copy.deepcopy(self.model)
        if not self.guarded or self.chosen is None or self.spec.me.validation is None:
            return model, {}, None
        point = self.points.start()[None]  # the model is what is served
        ours = self.points.losses(point, self.spec.me.validation)[0].numpy()
        path, n = self.paths["alone"], len(self.folds)
        table = path.table()[:, n:]
        look = int(table.mean(1).argmin())
        change, lower = ours - table[look], table[look].mean() < ours.mean()
        if lower:
            self.points.serve(path.points[look])
            model = copy.deepcopy(self.model)
            self.points.serve(point[0])
        decision = GuardDecision(
            served="alone" if lower else "collaborative",
            difference=float(change.mean()),
            error=standard_error(change),
        )
        return model, {"step": path.steps[look], "loss": float(table[look].mean())} if lower else {}, decision

    # ------------------------------------------------------------ weights

    def _weights(self) -> list[Array]:
        """Return the peers' weights in the branch's copies, then in pooled."""
        taus = [fitted.tau() for fitted in self.fitted]
        tau = np.mean(taus, axis=0)
        if self.trunk == "pooled":
            return [self.by_size] * (self.n_folds + 2)
        return [tau, *(taus if self.nested else [tau] * self.n_folds), self.by_size]

    def _branch(self) -> tuple[Tensor, list[Array], Tensor]:
        """Return the weights of the second half, also as arrays, and the bounds; the trunk's end fixes them."""
        if self._kept is None:
            weights = self._weights()
            self._kept = self._tensor(weights), weights, self._tensor(self._bounds())
        return self._kept

    def _bounds(self) -> Array:
        return np.asarray(np.mean([fitted.bounds() for fitted in self.fitted], axis=0))

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights in the path that would be served now; nothing where that is Alone."""
        path = "alone" if self.chosen is None else self.chosen.path
        if path == "alone":
            return {}
        return dict(zip(self.engine.names, (self._weights()[0 if path == "branch" else -1]).tolist(), strict=True))

    def account(self) -> dict[str, Any]:
        """Return who was listened to, when it stopped, what that cost, and what may be said of it."""
        if self.chosen is None:
            return {}
        names, chosen = self.engine.names, self.chosen
        kappa = np.mean([np.array(fitted.kappa) for fitted in self.fitted], axis=0)
        account: dict[str, Any] = {
            "path": chosen.path,
            "trunk": self.trunk,
            "folds": self.n_folds,
            "nested": self.nested,
            "tau": {name: weight for name, weight in self.tau().items() if weight},
            "looks": looks_of(self.paths, chosen),
            "stop": stop_of(self.paths[chosen.path], chosen.frequencies[chosen.path]),
            "steps": list(range(0, min(self.step, self.half), max(1, self.half // GRAMS))),
            "nobody": kappa[:, 0].tolist() if kappa.size else [],
            "weights": dict(zip(names, kappa[:, 1:].T.tolist(), strict=True)) if kappa.size else {},
            "cost": {"runs": self.gradients_asked / max(1, self.step), "rows": self.rows_asked * self.n_trunks},
            **compared(chosen, len(self.folds), nested=self.nested),
        }
        held_out = 0 if self.spec.me.validation is None else len(self.spec.me.validation)
        return account | {"sentence": sentence(account, held_out)}

    def _judging(self) -> list[int]:
        """Return the part of the own examples that judges each trunk."""
        return list(range(1, self.n_trunks + 1)) if self.nested else [0]

    def _tensor(self, values: list[Array] | Array) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.x)

    def _points(self, which: int) -> Tensor:
        stack, buffers = (self.alone, self.peers)[which], self.buffers[which]
        return torch.cat([stack.x, buffers], dim=1) if buffers.shape[1] else stack.x

    def _own(self, points: Tensor, parts: range | list[int]) -> Own:
        return self.points.own(points, self.step, list(parts))

    def _count(self, weights: list[Array], own: int) -> None:
        """Count a step: own gradients, and at every point a gradient of each peer that has weight there."""
        self.costs.compute([self.costs.me], times=own)
        self.gradients_asked += len(weights)
        for row in weights:
            asked = [name for name, weight in zip(self.engine.names, row, strict=True) if weight]
            self.costs.compute(asked)
            self.costs.exchange(asked, down=self._d, up=self._d)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "step": self.step,
            "half": self.half,
            "trunk": self.trunk,
            "by_size": torch.from_numpy(self.by_size),
            "model": self.model.state_dict(),
            "alone": self.alone.state_dict(),
            "peers": self.peers.state_dict(),
            "buffers": self.buffers,
            "fitted": [fitted.state_dict() for fitted in self.fitted],
            "paths": {name: path.state_dict() for name, path in self.paths.items()},
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "asked": [self.rows_asked, self.gradients_asked],
            "state": self.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.model.load_state_dict(state["model"])
        self.step, self.half, self.trunk, self.state = (state[key] for key in ("step", "half", "trunk", "state"))
        self.by_size, self._kept = state["by_size"].cpu().numpy(), None
        self.peers = Stack.of(self.spec, state["peers"]["x"].to(self.x))
        self.alone.load_state_dict(state["alone"])
        self.peers.load_state_dict(state["peers"])
        self.buffers = list(state["buffers"])
        for fitted, saved in zip(self.fitted, state["fitted"], strict=True):
            fitted.load_state_dict(saved)
        self.paths = {name: _path(saved) for name, saved in state["paths"].items()}
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self.rows_asked, self.gradients_asked = state["asked"]
        if self.paths["alone"].steps:
            self.chosen = self.resampled.choose(self.paths, nested=self.nested)


def _path(saved: Mapping[str, Any]) -> Path:
    """Return a path from its state; losses stay on the host."""
    losses = {key: [each.cpu() for each in saved[key]] for key in ("losses", "corrected")}
    return Path(list(saved["steps"]), list(saved["points"]), **losses)


def _by_size(engine: Engine) -> Array:
    """Return the peers' shares of all examples; one whose number is not known counts as the mean of the others."""
    sizes = engine.capabilities.examples
    known = [sizes.get(name) for name in engine.names]
    mean = float(np.mean([n for n in known if n])) if any(known) else 1.0
    counts = np.array([float(n or mean) for n in known])
    return np.asarray(counts / counts.sum())
