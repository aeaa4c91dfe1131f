"""Trunk and branch: the learner behind `AdaptiveAveraging`. See docs/adaptive.md.

    trunk    first half: F models follow the peers only; user 0's examples, which they do not see, say whom to
             follow. Trunk q is judged without fold q. A gradient far longer than the others' is not heard
    pooled   all steps: one more follows the peers by numbers of examples
    branch   second half, from the better of the two: F + 1 copies step by (1 − α) own + α peers, α falling; F of
             them are blind to one fold each, and their losses there say when to stop. A sum of the peers that is
             longer than they sent while they were judged is not heard
    alone    all steps: F + 1 copies ask no peer

With `exchange_every=K` the peers are asked at every K-th step, and where they are judged; in the steps between,
what they last said is followed.

What is served is the mean of one path's points at its looks, by how often each look is the best under resampling.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.choosing.account import compared, sentence, stop_of
from coterie.choosing.looks import Looks
from coterie.choosing.when import Path
from coterie.choosing.whom import GRAMS, Array, FittedWeights, added_noise, shares, sizes
from coterie.engines.engine import Engine
from coterie.gradients.trained_part import copied, load_trained_state, trained_state
from coterie.learners.learner import Learner, NextStep
from coterie.learners.points import Judged, Own, Sums
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.recording.costs import Costs
from coterie.recording.result import GuardDecision
from coterie.recording.traffic import Traffic
from coterie.rules import Alone

FIRST, LAST = 2.2, -4.6
"""The logit of α at the branch's first and last step: α falls from .9 to .01."""
LOOKS = 20
"""Looks in a run."""
FAR = 10.0
"""While peers are judged a gradient is taken for missing that is so many times as long as the median of all was
in any step before: not in this step, since those of good peers may vanish while another's does not."""


class TrunkAndBranch(Learner):
    """Follow the peers first and the own examples more and more, and serve what the own examples found best.

    The model is, at every look, what would be served then.
    """

    def __init__(self, spec: RunSpec, engine: Engine, costs: Costs, looks: Looks, *, guarded: bool) -> None:
        super().__init__(spec, Alone(), engine, costs)
        self.spec, self.looks, self.guarded = spec, looks, guarded
        self.points, self.nested = looks.points, looks.nested
        self.n_folds = int(looks.folds.max()) + 1  # the parts of `points`: all own examples, then all but each fold
        self.n_trunks = self.n_folds if self.nested else 1  # one for each fold, judged without it; or one for all
        self.half = max(1, round(spec.steps / 2))
        self.fitted = [FittedWeights(len(engine.names), self.half) for _ in range(self.n_trunks)]
        self.sizes = sizes(engine)
        self.by_size = shares(self.sizes)
        self._between_grams, self._between_looks = max(1, self.half // GRAMS), max(1, spec.steps // LOOKS)
        self.trunk = "fitted"
        start, d = self.points.start(), self.points.d
        self.alone = Stack.of(spec, start[:d].expand(self.n_folds + 1, -1))
        self.peers = Stack.of(spec, start[:d].expand(self.n_trunks + 1, -1))
        self.buffers = [start[d:].expand(len(stack.x), -1).clone() for stack in (self.alone, self.peers)]
        self.trunk_weights = self._tensor([*(fitted.weights for fitted in self.fitted), self.by_size])
        self.sketch = engine.capabilities.sketch
        self.grams = self.gradients_asked = 0
        self.unheard = torch.zeros(1, dtype=torch.long, device=self.x.device)
        self.longest = self.x.new_zeros(len(self.peers.x))  # how long what peers send to the trunks may be
        self._kept: tuple[Tensor, list[Array], Tensor] | None = None
        self._asks = True  # in the last step; else it used what the peers said before

    @property
    def followed(self) -> Any:
        """The rule that was asked for."""
        return self.spec.rule

    def next_step(self) -> NextStep:
        """Ask everybody at all points, and return the step of all copies."""
        if self.looks.chosen is None:
            self._look()
        return self._trunk_step() if self.step < self.half else self._branch_step()

    def _trunk_step(self) -> NextStep:
        step, points = self.step, self._points(1)
        if step % self._between_grams:
            asking = self._sums(points, self.trunk_weights)
            own = self.points.own(self._points(0), step, range(self.n_folds + 1))
            asked = asking()
            return NextStep(own.gradients[0], own.loss, asked.left_out, partial(self._take_trunk, own, asked))
        self._asks = True
        judging = self.points.judge(points, step, self.trunk_weights, self._judging())
        own = self.points.own(self._points(0), step, range(self.n_folds + 1))
        judged = judging()
        lengths, usual = judged.lengths()
        longest = torch.fmax(self.longest[:-1], (math.inf if self.spec.norm_bound is None else FAR) * usual)
        far = lengths > longest.unsqueeze(1)
        near = judged.without(far, f"more than {FAR:g} times as long as the median of all", self.engine.names)
        take = partial(self._take_gram, own, near, longest, far.any(0).cpu().numpy(), float(usual.mean()))
        return NextStep(own.gradients[0], own.loss, near.left_out, take)

    def _sums(self, points: Tensor, weights: Tensor) -> Callable[[], Sums]:
        """Ask for the peers' sums; between exchanges return the last."""
        self._asks = self.heard is None or not self._holds()
        if self.heard is None or self._asks:
            return self.points.ask(points, self.step, weights)
        return partial(Sums, self.heard["sums"], self.heard["answered"])

    def _take_gram(self, own: Own, judged: Judged, longest: Tensor, far: NDArray[np.bool_], usual: float) -> None:
        """Step by the weights that were asked for, and fit those of the next steps."""
        self.longest.copy_(torch.cat([longest, longest.max()[None]]).nan_to_num(0.0))
        sums, added = judged.sums(self.trunk_weights), added_noise(self.engine, self.points.d)
        for fitted, theirs, ours in zip(self.fitted, judged.theirs, judged.ours, strict=True):
            fitted.add(theirs, ours, added)
        told = sizes(self.engine)  # sites tell theirs when they answer
        self.sizes = np.where(np.isnan(told), self.sizes, told)
        self.by_size = shares(
            np.where(far & ~far.all(), 0.0, self.sizes), added / (self.spec.steps * max(usual * usual, 1e-30))
        )
        self._weigh()
        self.grams += 1
        self.costs.compute([self.costs.me], int(self.points.parts[self._judging()[0]].sum()), times=self.n_trunks)
        if self.sketch:
            self.costs.exchange(self.engine.names, down=0, up=self.n_trunks * self.sketch)
        self._take_trunk(own, sums)

    def _weigh(self) -> None:
        """Let the weights of the trunks and pooled, which lie where a captured step reads them, be those fitted."""
        self.trunk_weights.copy_(self._tensor([*(fitted.weights for fitted in self.fitted), self.by_size]))

    def _take_trunk(self, own: Own, asked: Sums) -> None:
        """Let the trunks follow the peers, and Alone's copies their own gradients."""
        self._keep(asked)
        self.follow(own, asked)
        if self.buffers[1].shape[1]:  # a trunk's running statistics are those of the examples that judge it
            self.buffers[1] = self.points.own(self._points(1), self.step, [*self._judging(), 0]).buffers
        self._finish(own)

    def follow(self, own: Own, asked: Sums) -> None:
        """Write the directions of a step of the trunk; none where a sum is far longer than the peers' gradients."""
        answered = asked.answered.clamp(min=1e-12)
        followed = asked.sums.norm(dim=1) <= self.longest * answered
        torch.div(asked.sums, _over(answered, followed), out=self.peers.direction)
        self.alone.direction.copy_(own.gradients)

    def _branch_step(self) -> NextStep:
        step, copies = self.step, self.n_folds + 1
        points = self._points(1)
        own_points, parts = points[:copies], [*range(copies), *range(copies)]
        if self.buffers[1].shape[1]:  # pooled needs no own gradient, but running statistics
            own_points, parts = points, [*parts, 0]
        asking = self._sums(points, self.second_half()[0])
        own = self.points.own(torch.cat([self._points(0), own_points]), step, parts)
        asked = asking()
        return NextStep(own.gradients[0], own.loss, asked.left_out, partial(self._take_branch, own, asked))

    def _take_branch(self, own: Own, asked: Sums) -> None:
        """Let the branch's copies follow the own gradients more and more, and pooled the peers."""
        self._keep(asked)
        self.mix(own, asked, self.alpha_at(self.step))
        if self.buffers[1].shape[1]:
            self.buffers[1] = own.buffers[self.n_folds + 1 :]
        self._finish(own)

    def mix(self, own: Own, asked: Sums, alpha: float | Tensor) -> None:
        """Write the directions of a step of the branch."""
        copies = self.n_folds + 1
        heard = asked.sums.norm(dim=1) <= self.second_half()[2]  # else more came than the peers sent while judged
        self.unheard += ~heard[:1]
        share, ours = alpha * (asked.answered * heard)[:copies].unsqueeze(1), own.gradients[copies : 2 * copies]
        branch, pooled = self.peers.direction[:copies], self.peers.direction[copies:]
        torch.mul(1 - share, ours, out=branch)
        branch += (alpha * heard[:copies]).unsqueeze(1) * asked.sums[:copies]
        answered = asked.answered[copies:].clamp(min=1e-12)
        torch.div(asked.sums[copies:], _over(answered, heard[copies:]), out=pooled)
        self.alone.direction.copy_(own.gradients[:copies])

    def _keep(self, asked: Sums) -> None:
        """Keep what the peers said for the steps up to the next exchange, where there are any."""
        if self.exchange_every > 1 and self._asks:
            self.heard = {"sums": asked.sums.clone(), "answered": asked.answered.clone()}

    def _finish(self, own: Own) -> None:
        """Take the step of all copies."""
        self.buffers[0] = own.buffers[: self.n_folds + 1]
        self.alone.step()
        self.peers.step()
        self.advanced(1)

    def advanced(self, n: int) -> None:
        """Count steps of one kind that were taken; fork the trunk at its end, and look where it is time."""
        branch = self.step >= self.half
        self._count(n)
        self.step += n
        self.state = {"step": self.step, "weight": self.alpha_at(self.step - 1) if branch else 1.0}
        if self.step == self.half:
            self._fork()
        if self.step % self._between_looks == 0 or self.step in (self.half, self.spec.steps):
            self._look()

    def until_other_work(self) -> int:
        """Return how many of the next steps are alike: to the next Gram matrix, look or fork."""
        step, looks = self.step, self._between_looks
        if not step or self.looks.chosen is None:
            return 0
        ends = [step - step % looks + looks, self.spec.steps]
        if step < self.half:
            ends += [step + -step % self._between_grams, self.half]
        return min(ends) - step

    def alpha_at(self, step: int) -> float:
        """Return the peers' weight at a step of the branch."""
        done = (step - self.half) / max(1, self.spec.steps - self.half - 1)
        return 1 / (1 + math.exp(-(FIRST + (LAST - FIRST) * min(1.0, done))))

    def _fork(self) -> None:
        """Begin the branch from the trunk of the lower loss on examples that did not steer it; pooled goes on."""
        trunks, copies = self.n_trunks, self.n_folds + 1
        ends = self.points.losses(self._points(1), self.spec.me.examples)
        fitted = self.looks.crossed(ends[:trunks]) if self.nested else ends[0]
        self.trunk = "fitted" if bool(fitted.mean() <= ends[trunks].mean()) else "pooled"
        origins = [[trunks]] * copies
        if self.trunk == "fitted":
            origins = [list(range(trunks)), *([q] for q in range(trunks))] if self.nested else [[0]] * copies
        origins = [*origins, [trunks]]
        judged = self._bounds() > 0  # a peer that never answered is not asked any more
        if judged.any():  # else nobody was followed, and Alone is served
            self.by_size = self.by_size * judged / self.by_size[judged].sum()
            self.looks.paths |= {"branch": Path(), "pooled": Path()}
        self.peers, self.heard = self.peers.forked(origins), None
        self.buffers[1] = torch.stack([self.buffers[1][rows].mean(0) for rows in origins])

    def _look(self) -> None:
        """Look at all paths that have begun."""
        copies = {"alone": self._points(0)}
        if "branch" in self.looks.paths:
            branch, pooled = torch.split(self._points(1), [self.n_folds + 1, 1])
            copies |= {"branch": branch, "pooled": pooled}
        self.looks.add(self.step, copies)

    def consider(self, validation_loss: float) -> None:
        """Tell a scheduler that wants to know; what is best is chosen at the looks."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)
            for stack in (self.alone, self.peers):
                stack.set_rates(self.optimizer)

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model to serve; under a guard the one trained alone where its validation loss is lower."""
        return self.looks.guarded() if self.guarded else (copied(self.model), {}, None)

    def trained_alone(self) -> nn.Module | None:
        """Return the model trained alone beside this one."""
        return self.looks.alone()

    def _weights(self) -> list[Array]:
        """Return the peers' weights in the branch's copies, then in pooled."""
        taus = [fitted.tau() for fitted in self.fitted]
        tau = np.mean(taus, axis=0)
        if self.trunk == "pooled":
            return [self.by_size] * (self.n_folds + 2)
        return [tau, *(taus if self.nested else [tau] * self.n_folds), self.by_size]

    def second_half(self) -> tuple[Tensor, list[Array], Tensor]:
        """Return the weights of the second half, also as arrays, and how long sums may be; fixed at the fork."""
        if self._kept is None:
            weights = self._weights()
            self._kept = self._tensor(weights), weights, self._tensor(np.array(weights) @ self._bounds())
        return self._kept

    def _bounds(self) -> Array:
        return np.asarray(np.mean([fitted.bounds() for fitted in self.fitted], axis=0))

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights in the path that would be served now; nothing where that is Alone."""
        if self.looks.chosen is None or self.looks.chosen.path == "alone":
            return {}
        weights = self._weights()[0 if self.looks.chosen.path == "branch" else -1]
        return dict(zip(self.engine.names, weights.tolist(), strict=True))

    def account(self, travelled: Mapping[str, Traffic]) -> dict[str, Any]:
        """Return who was listened to, when it stopped, what that cost, and what may be said of it."""
        names, chosen, paths = self.engine.names, self.looks.chosen, self.looks.paths
        mine = travelled.get(self.costs.me, Traffic())
        if chosen is None:
            return {}
        kappa = np.mean([np.array(fitted.kappa) for fitted in self.fitted], axis=0)
        account: dict[str, Any] = {
            "path": chosen.path,
            "trunk": self.trunk,
            "folds": self.n_folds,
            "nested": self.nested,
            "tau": {name: weight for name, weight in self.tau().items() if weight},
            "looks": {
                name: {"steps": list(path.steps), "frequencies": chosen.frequencies[name].tolist()}
                for name, path in paths.items()
            },
            "stop": stop_of(paths[chosen.path], chosen.frequencies[chosen.path]),
            "steps": list(range(0, min(self.step, self.half), self._between_grams)),
            "nobody": kappa[:, 0].tolist() if kappa.size else [],
            "weights": dict(zip(names, kappa[:, 1:].T.tolist(), strict=True)) if kappa.size else {},
            "unheard": int(self.unheard),
            "cost": {
                "runs": self.gradients_asked / max(1, self.step),
                "sketches" if self.sketch else "rows": self.grams * self.n_trunks,
                "messages": sum(each.messages for each in travelled.values()),
                "bytes": mine.bytes_sent + mine.bytes_received,
            },
            **compared(*self.looks.told(), len(self.looks.folds), nested=self.nested),
        }
        return account | {"sentence": sentence(account, self.looks.held_out)}

    def _judging(self) -> list[int]:
        """Return the part of the own examples that judges each trunk."""
        return list(range(1, self.n_trunks + 1)) if self.nested else [0]

    def _tensor(self, values: list[Array] | Array) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.x)

    def _points(self, which: int) -> Tensor:
        stack, buffers = (self.alone, self.peers)[which], self.buffers[which]
        return torch.cat([stack.x, buffers], dim=1) if buffers.shape[1] else stack.x

    def _count(self, n: int) -> None:
        """Count n steps: own gradients, and at every point a gradient of each peer that has weight there."""
        if self.step < self.half:
            own, weights = self.n_folds + 1, [*(fitted.weights for fitted in self.fitted), self.by_size]
            if self.step % self._between_grams == 0:  # everybody is judged
                weights = [np.ones(len(self.by_size))] * len(weights)
        else:
            own, weights = 2 * (self.n_folds + 1), self.second_half()[1]
        self.costs.compute([self.costs.me], times=own * n)
        if not self._asks:
            return
        self.gradients_asked += len(weights) * n
        for row in weights:
            asked = [name for name, weight in zip(self.engine.names, row, strict=True) if weight]
            self.costs.compute(asked, times=n)
            self.costs.exchange(asked, down=self.points.d, up=self.points.d, times=n)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        plain = {name: getattr(self, name) for name in ("step", "half", "trunk", "buffers", "state")}
        parts = {name: getattr(self, name).state_dict() for name in ("alone", "peers")}
        return {
            **plain,
            "unheard": self.unheard,
            "longest": self.longest,
            "model": trained_state(self.model),
            **parts,
            "sizes": torch.from_numpy(self.sizes),
            "by_size": torch.from_numpy(self.by_size),
            "fitted": [fitted.state_dict() for fitted in self.fitted],
            "paths": {name: dict(vars(path)) for name, path in self.looks.paths.items()},
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "asked": [self.grams, self.gradients_asked],
            "heard": self.heard,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.step, self.half, self.trunk, self.state = (state[key] for key in ("step", "half", "trunk", "state"))
        load_trained_state(self.model, state["model"])
        self.sizes, self.by_size = (state[name].cpu().numpy() for name in ("sizes", "by_size"))
        self._kept = None
        self.peers = Stack.of(self.spec, state["peers"]["x"].to(self.x))
        self.alone.load_state_dict(state["alone"])
        self.peers.load_state_dict(state["peers"])
        self.buffers = list(state["buffers"])
        for fitted, saved in zip(self.fitted, state["fitted"], strict=True):
            fitted.load_state_dict(saved)
        self._weigh()
        self.looks.load(state["paths"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self.grams, self.gradients_asked = state["asked"]
        self.heard = state.get("heard")
        self.unheard.copy_(state["unheard"])
        self.longest.copy_(state["longest"])


def _over(weights: Tensor, followed: Tensor) -> Tensor:
    """Return by what to divide rows of sums, so that those not followed become zero."""
    return torch.where(followed, weights, math.inf).unsqueeze(1)
