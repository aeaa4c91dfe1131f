"""Trunk and branch: the learner behind `AdaptiveAveraging`. See docs/adaptive.md.

    trunk    first half: F models follow the peers only; user 0's examples, which they do not see,
             say whom to follow. Trunk q is judged without fold q. A gradient far longer than the
             others' is left out
    pooled   all steps: one more follows the peers by numbers of examples
    branch   second half, from the better of the two: F + 1 copies step by (1 − α) own + α peers,
             α falling; F of them are blind to one fold each, and their losses there say when to
             stop. A sum of the peers longer than they sent while they were judged is left out
    alone    all steps: F + 1 copies ask no peer

With `exchange_every=K` the peers are asked at every K-th step, and where they are judged; in the
steps between, what they last said is followed.

What is served is the mean of one path's points at its evaluations, by how often each is the best
under resampling.

This file takes the steps of all copies, in order. `schedule` says at which step what is done,
`weights` and `peer_weights` whom each copy follows, `directions` the direction of a step,
`evaluations` and `stopping` what is served, `account` what is told of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.choosing.adaptive.account import account_of
from coterie.choosing.adaptive.directions import (
    FixedWeights,
    PeerSums,
    WithoutOutliers,
    followed,
    mixed,
    peer_sums,
)
from coterie.choosing.adaptive.evaluations import HeldOutEvaluations
from coterie.choosing.adaptive.peer_weights import PeerWeights
from coterie.choosing.adaptive.schedule import Schedule
from coterie.choosing.adaptive.stopping import Candidate
from coterie.choosing.adaptive.weights import Array
from coterie.engines.engine import Answers, Engine, Question
from coterie.gradients.gradients import gave_nothing
from coterie.gradients.parameters import copied, load_trained_state, trained_state
from coterie.learners.captured import StackBlock
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable
from coterie.recording.costs import Costs, Traffic
from coterie.recording.result import GuardDecision


class AdaptiveLearner(Learner):
    """Follow the peers first and the own examples more and more, and serve what the own examples found best.

    The model is, at every evaluation, what would be served then.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        evaluations: HeldOutEvaluations,
        *,
        guarded: bool,
    ) -> None:
        super().__init__(spec, engine, costs)
        self.evaluations, self.guarded = evaluations, guarded
        self.points, self.nested = evaluations.points, evaluations.nested
        # the parts of `points`: all own examples, then all but each fold
        self.n_folds = int(evaluations.folds.max()) + 1
        # one for each fold, judged without it; or one for all
        self.n_trunks = self.n_folds if self.nested else 1
        self.schedule = Schedule.of(spec.steps)
        self.peer_weights = PeerWeights(
            engine, self.schedule, self.points.d, self.n_folds, nested=self.nested
        )
        start, d = self.points.start(), self.points.d
        self.alone = Stack.of(spec, start[:d].expand(self.n_folds + 1, -1))
        self.peers = Stack.of(spec, start[:d].expand(self.n_trunks + 1, -1))
        stacks = {"alone": self.alone, "peers": self.peers}
        self.buffers = {
            name: start[d:].expand(len(stack.x), -1).clone() for name, stack in stacks.items()
        }
        self._arrays = self.peer_weights.of_trunks()
        self.trunk_weights = self._tensor(self._arrays)
        self.sketch = engine.capabilities.sketch
        self.grams = self.gradients_asked = 0
        self.steps_without_peers = torch.zeros(1, dtype=torch.long, device=self.x.device)
        # how long what peers send to the trunks may be
        self.longest = self.x.new_zeros(len(self.peers.x))
        self._second_half: FixedWeights | None = None
        self._nobody = self.trunk_weights[:0]
        self._asks = True  # in the last step; else it used what the peers said before
        # which peers gave in the last step; by point if not alike
        self._gave = np.ones(len(engine.names), bool)
        # by which pooled was asked for in the last step that judged
        self._pooled = self.peer_weights.by_size

    @property
    def followed(self) -> Any:
        """The rule that was asked for."""
        return self.spec.rule

    def question(self) -> Question:
        """Return what the next step asks.

        The peers at their models, user 0 where copies need its gradient.
        """
        if self.evaluations.chosen is None:
            self._evaluate()
        points, first_phase, judges = (
            self._points("peers"),
            self.step < self.schedule.half,
            self.schedule.judges(self.step),
        )
        weights = self.trunk_weights if first_phase else self.second_half().weights
        own, parts = [self._points("alone")], [*range(self.n_folds + 1)]
        carried = self.buffers["peers"].shape[1] > 0
        if not first_phase:  # pooled needs no own gradient, but running statistics
            own.append(points if carried else points[: self.n_folds + 1])
            parts += [*range(self.n_folds + 1), *([0] if carried else [])]
        elif carried:  # a trunk's running statistics are those of the examples that judge it
            own.append(points)
            parts += [*self._judging(), 0]
        self._asks = judges or self.last_exchange is None or not self._holds()
        if judges:
            self._pooled = self.peer_weights.by_size
        if not self._asks:
            points, weights = points[:0], self._nobody
        each = self._judging() if judges else ()
        return Question(torch.cat([points, *own]), self.step, weights, own=parts, each=each)

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Return the step of all copies that the answers make; asked for here when None."""
        answers = self.points.ask(self.question()) if answers is None else answers
        asked = len(self.peers.x) if self._asks else 0
        own, loss = (each[0] for each in self.own_answers(answers))
        if not self._asks and self.last_exchange is not None:  # between exchanges: the last sums
            peers = PeerSums(self.last_exchange["sums"], self.last_exchange["answered"])
            return NextStep(own, loss, {}, partial(self._take, answers, peers))
        if answers.judged is None:
            take = partial(self._take, answers, peer_sums(answers, asked))
            return NextStep(own, loss, answers.left_out, take)
        bounded, names = self.spec.norm_bound is not None, self.engine.names
        near = WithoutOutliers.of(answers, self.longest[:-1], bounded=bounded, names=names)
        return NextStep(own, loss, near.left_out, partial(self._take_judging, answers, near))

    def _take_judging(self, answers: Answers, near: WithoutOutliers) -> None:
        """Step by the weights that were asked for, and fit those of the next steps."""
        self.longest.copy_(torch.cat([near.longest, near.longest.max()[None]]).nan_to_num(0.0))
        sums = PeerSums(*near.sums(answers, self.trunk_weights))
        self.peer_weights.fit(near)
        self._weigh()
        self.grams += 1
        self.costs.compute(
            [self.costs.me], int(self.points.parts[self._judging()[0]].sum()), times=self.n_trunks
        )
        if self.sketch:
            self.costs.exchange(self.engine.names, down=0, up=self.n_trunks * self.sketch)
        self._take(replace(answers, left_out=near.left_out), sums)

    def _weigh(self) -> None:
        """Let the weights of the trunks and pooled, which lie where a captured step reads them, be those fitted."""
        self._arrays = self.peer_weights.of_trunks()
        self.trunk_weights.copy_(self._tensor(self._arrays))

    def own_answers(self, answers: Answers) -> tuple[Tensor, Tensor]:
        """Return user 0's gradients and losses."""
        if answers.sums is None or answers.losses is None:
            raise AssertionError("sums were asked for, and user 0")
        return answers.sums[len(self.peers.x) if self._asks else 0 :], answers.losses

    def _take(self, answers: Answers, peers: PeerSums) -> None:
        """Take the step of all copies."""
        self._keep(answers, peers)
        self.direct(self.own_answers(answers)[0], peers, self.schedule.alpha(self.step))
        if self.buffers["peers"].shape[1] and answers.buffers is not None:
            self.buffers["peers"] = answers.buffers[self.n_folds + 1 :]
            self.buffers["alone"] = answers.buffers[: self.n_folds + 1]

    def direct(self, own: Tensor, peers: PeerSums, alpha: float | Tensor) -> None:
        """Write the directions of all copies.

        The trunks' follow the peers, the branch's mix them with `own`.
        """
        copies = self.n_folds + 1
        self.alone.direction.copy_(own[:copies])
        if self.step < self.schedule.half:
            followed(peers, self.longest, out=self.peers.direction)
        else:
            ours, longest = own[copies : 2 * copies], self.second_half().longest
            self.steps_without_peers += ~mixed(
                ours, peers, longest, alpha, out=self.peers.direction
            )[:1]

    def second_half(self) -> FixedWeights:
        """Return the peers' weights in the second half, and how long their sums may be.

        Fixed at the fork.
        """
        if self._second_half is None:
            arrays = self.peer_weights.of_branch()
            longest = np.array(arrays) @ self.peer_weights.bounds()
            self._second_half = FixedWeights(self._tensor(arrays), arrays, self._tensor(longest))
        return self._second_half

    def _keep(self, answers: Answers, peers: PeerSums) -> None:
        """Keep what the peers said for the steps up to the next exchange, where there are any."""
        silent = gave_nothing(answers.left_out) if answers.left_out else ()
        self._gave = np.array([name not in silent for name in self.engine.names])
        if answers.refused is not None:
            self._gave = ~answers.refused.numpy()
        if self.exchange_every > 1 and self._asks:
            self.last_exchange = {"sums": peers.sums.clone(), "answered": peers.answered.clone()}

    def advanced(self, n: int) -> None:
        """Count steps of one kind that were taken.

        Fork the trunk at its end, and evaluate where it is time.
        """
        branch = self.step >= self.schedule.half
        self._count(n)
        self.step += n
        self.state = {
            "step": self.step,
            "weight": self.schedule.alpha(self.step - 1) if branch else 1.0,
        }
        if self.step == self.schedule.half:
            self._fork()
        if self.schedule.evaluates(self.step):
            self._evaluate()

    def block(self) -> StackBlock | str:
        """Return the steps between two Gram matrices, evaluations or forks, which are the same work."""
        if self.exchange_every > 1:
            return "not all steps are alike with `exchange_every`"
        why = self.points.why_not_captured or why_not_capturable(self.optimizer)
        return why or StackBlock(self)

    drawn_for = ()

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The parameters of all copies."""
        return self.alone, self.peers

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What a step reads and changes beside: weights, how long sums may be, a count."""
        if self.step < self.schedule.half:
            return self.trunk_weights, self.longest, self.steps_without_peers
        fixed = self.second_half()
        return fixed.weights, fixed.longest, self.steps_without_peers

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples of the next steps, a row for each step."""
        return [self.points.block(step)]

    def numbers(self, step: int) -> list[float]:
        """Return α at a step."""
        return [1.0 if self.step < self.schedule.half else self.schedule.alpha(step)]

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the directions of all copies on the examples drawn; return user 0's loss."""
        answers = self.points.on(self.question(), drawn[0])
        own, losses = self.own_answers(answers)
        self.direct(own, peer_sums(answers, len(self.peers.x)), numbers[0])
        return losses[0]

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps of a block; nothing else is made of their losses."""
        self.advanced(n)

    def repeats(self) -> int:
        """Return how many of the next steps are alike: to the next Gram matrix, evaluation or fork."""
        return (
            0
            if not self.step or self.evaluations.chosen is None
            else self.schedule.alike(self.step)
        )

    def _fork(self) -> None:
        """Begin the branch from the trunk of the lower loss on examples that did not steer it.

        Pooled goes on.
        """
        trunks, copies = self.n_trunks, self.n_folds + 1
        ends = self.points.losses(self._points("peers"), self.spec.me.examples)
        fitted = self.evaluations.crossed(ends[:trunks]) if self.nested else ends[0]
        ours, theirs = (
            losses.mean().nan_to_num(math.inf, math.inf) for losses in (fitted, ends[trunks])
        )
        # no loss is worse than one that is no number
        better = "fitted" if bool(ours <= theirs) else "pooled"
        origins = [[trunks]] * copies
        if better == "fitted":
            origins = (
                [list(range(trunks)), *([q] for q in range(trunks))]
                if self.nested
                else [[0]] * copies
            )
        origins = [*origins, [trunks]]
        if self.peer_weights.fork(better):  # else nobody was followed, and Alone is served
            self.evaluations.paths |= {"branch": Candidate(), "pooled": Candidate()}
        self.peers, self.last_exchange = self.peers.forked(origins), None
        self.buffers["peers"] = torch.stack(
            [self.buffers["peers"][rows].mean(0) for rows in origins]
        )

    def _evaluate(self) -> None:
        """Evaluate all paths that have begun."""
        copies = {"alone": self._points("alone")}
        if "branch" in self.evaluations.paths:
            branch, pooled = torch.split(self._points("peers"), [self.n_folds + 1, 1])
            copies |= {"branch": branch, "pooled": pooled}
        self.evaluations.add(self.step, copies)

    def consider(self, validation_loss: float) -> None:
        """Tell a scheduler that wants to know; what is best is chosen at the evaluations."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)
            for stack in (self.alone, self.peers):
                stack.set_rates(self.optimizer)

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model to serve.

        Under a guard the one trained alone where its validation loss is lower.
        """
        return self.evaluations.guarded() if self.guarded else (copied(self.model), {}, None)

    def trained_alone(self) -> nn.Module | None:
        """Return the model trained alone beside this one."""
        return self.evaluations.alone()

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights in the path that would be served now.

        Nothing where that is Alone.
        """
        return (
            {}
            if self.evaluations.chosen is None
            else self.peer_weights.served(self.evaluations.chosen.path)
        )

    def account(self, travelled: Mapping[str, Traffic]) -> dict[str, Any]:
        """Return who was listened to, when it stopped, what that cost, and what may be said of it."""
        mine = travelled.get(self.costs.me, Traffic())
        cost = {
            "runs": self.gradients_asked / max(1, self.step),
            "sketches" if self.sketch else "rows": self.grams * self.n_trunks,
            "messages": sum(each.messages for each in travelled.values()),
            "bytes": mine.bytes_sent + mine.bytes_received,
        }
        judged = self.schedule.judged(self.step)
        overruled = self.guarded and self.evaluations.overruled()
        return account_of(
            self.evaluations,
            self.peer_weights,
            judged,
            int(self.steps_without_peers),
            cost,
            overruled=overruled,
        )

    def _judging(self) -> list[int]:
        """Return the part of the own examples that judges each trunk."""
        return list(range(1, self.n_trunks + 1)) if self.nested else [0]

    def _tensor(self, values: list[Array] | Array) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.x)

    def _points(self, of: Literal["alone", "peers"]) -> Tensor:
        """Return where the copies are, with the model's buffers where passes move them."""
        x, buffers = (self.alone if of == "alone" else self.peers).x, self.buffers[of]
        return torch.cat([x, buffers], dim=1) if buffers.shape[1] else x

    def _count(self, n: int) -> None:
        """Count n steps: own gradients, and at every point one of each peer that has weight there and gave it."""
        if self.step < self.schedule.half:
            own, weights = self.n_folds + 1, self._arrays
            if self.schedule.judges(self.step):  # everybody is asked at every trunk
                weights = [*[np.ones(len(self.engine.names))] * self.n_trunks, self._pooled]
        else:
            own, weights = 2 * (self.n_folds + 1), self.second_half().arrays
        self.costs.compute([self.costs.me], times=own * n)
        if not self._asks:
            return
        for row, gave in zip(weights, np.broadcast_to(self._gave, np.shape(weights)), strict=True):
            self.gradients_asked += n * bool(row.any())
            given = [
                name for name, yes in zip(self.engine.names, (row != 0) & gave, strict=True) if yes
            ]
            self.costs.compute(given, times=n)
            self.costs.exchange(given, down=self.points.d, up=self.points.d, times=n)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            **{
                name: getattr(self, name)
                for name in ("step", "state", "steps_without_peers", "longest")
            },
            "half": self.schedule.half,
            "buffers": list(self.buffers.values()),
            **self.peer_weights.state_dict(),
            "model": trained_state(self.model),
            "alone": self.alone.state_dict(),
            "peers": self.peers.state_dict(),
            "paths": {name: dict(vars(path)) for name, path in self.evaluations.paths.items()},
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "asked": [self.grams, self.gradients_asked],
            "last_exchange": self.last_exchange,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.step, self.state = state["step"], state["state"]
        self.schedule = replace(self.schedule, half=state["half"])
        load_trained_state(self.model, state["model"])
        self._second_half = None
        self.peers = Stack.of(self.spec, state["peers"]["x"].to(self.x))
        self.alone.load_state_dict(state["alone"])
        self.peers.load_state_dict(state["peers"])
        self.buffers = dict(zip(self.buffers, state["buffers"], strict=True))
        self.peer_weights.load_state_dict(state)
        self._weigh()
        self.evaluations.load(state["paths"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self.grams, self.gradients_asked = state["asked"]
        self.last_exchange = state.get("last_exchange")
        self.steps_without_peers.copy_(state["steps_without_peers"])
        self.longest.copy_(state["longest"])
