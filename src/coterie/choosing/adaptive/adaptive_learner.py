"""Trunk and branch: the learner behind `AdaptiveAveraging`. See docs/adaptive.md.

    trunk    first half: F models follow the peers only; user 0's examples, which they do not see,
             say whom to follow. Trunk q is judged without fold q. A gradient far longer than the
             others' is left out
    pooled   all steps: one more follows the peers by numbers of examples
    branch   second half: from the trunks, and from pooled, copies follow the own examples, held
             back by weight decay towards where they began
    alone    all steps: copies follow the own examples from the start, held back towards 0

Of each setting of branch and alone, a step size and a weight decay, there are F + 1 copies: one
sees all own examples, F are blind to one fold each. With `exchange_every=K` the peers are asked at
every K-th step, and where they are judged; in the steps between, what they last said is followed.

What is served is a mixture of all points at the evaluations, by how well the blind copies predict
the rows that they did not see (`evaluations`). This file takes the steps of all copies, in order.
`Schedule` says at which step what is done, `weights` whom the trunks follow.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.choosing.adaptive.closed_form import CLOSED_FORM, LAST_LAYER, ClosedForms
from coterie.choosing.adaptive.evaluations import HeldOutEvaluations
from coterie.choosing.adaptive.own_paths import OwnPaths, Path, TrunkPaths
from coterie.choosing.adaptive.weights import Array, PeerWeights, WithoutOutliers
from coterie.choosing.e_steps import ESteps
from coterie.choosing.memory import give_back
from coterie.choosing.mixture import A_FIT, account_of
from coterie.engines.asking import GradientsAtPoints
from coterie.engines.engine import Answers, Engine, Question
from coterie.gradients.gradients import gave_nothing
from coterie.gradients.parameters import copied, load_trained_state, trained_state
from coterie.learners.captured import StackBlock
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable, why_not_stacked
from coterie.mixture.candidates import ALONE_KINDS
from coterie.mixture.families import LOSS
from coterie.recording.costs import Costs, Traffic
from coterie.recording.result import GuardDecision

CHOSEN = (
    "branch",
    *(named.format("hierarchical, chosen peers") for named in (CLOSED_FORM, LAST_LAYER)),
)
"""The kinds that follow chosen peers; all others that ask peers follow all."""

GRAMS = 12
"""Gram matrices in a trunk, evenly spaced; one at every step gave nothing more."""
EVALUATIONS = 7
"""Evaluations in each half of a run, beside that before the first step."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: the trunk up to `half`, then the branch.

    Example:
        >>> schedule = Schedule.of(60)
        >>> schedule.half, [*schedule.judging][:4]
        (30, [0, 2, 4, 6])
        >>> sorted(schedule.evaluations)
        [0, 1, 2, 3, 5, 10, 17, 30, 31, 32, 33, 35, 40, 47, 60]
    """

    steps: int
    half: int  # the branch's first step
    between_grams: int  # in the trunk every peer is judged so often

    @classmethod
    def of(cls, steps: int) -> Self:
        """Return the schedule of a run of so many steps."""
        half = max(1, round(steps / 2))
        return cls(steps, half, max(1, half // GRAMS))

    @functools.cached_property
    def evaluations(self) -> frozenset[int]:
        """The steps after which all copies are judged: dense where a half begins."""
        after = (
            np.geomspace(max(1, n // 50), max(1, n), EVALUATIONS).round().astype(int)
            for n in (self.half, self.steps - self.half)
        )
        first, second = ({*each.tolist()} for each in after)
        second = {min(self.half + step, self.steps) for step in second}
        return frozenset({0, self.half, self.steps, *first, *second})

    @functools.cached_property
    def judging(self) -> range:
        """The steps that judge every peer by itself."""
        return range(0, self.half, self.between_grams)

    def exchanges(self, every: int) -> tuple[int, int]:
        """Return in how many steps of each half peers are asked.

        Every so many, where they are judged, and at the fork.

        Example:
            >>> Schedule.of(240).exchanges(8), Schedule.of(240).exchanges(1)
            ((24, 15), (120, 120))
        """
        asked = {
            *range(0, self.steps, every),
            *self.judging,
            min(self.half, self.steps - 1),
        }
        first = sum(step < self.half for step in asked)
        return first, len(asked) - first

    def alike(self, step: int) -> int:
        """Return how many steps from this one on are the same work.

        To the next Gram matrix, evaluation or fork.
        """
        ends = [min(each for each in (*self.evaluations, self.steps + 1) if each > step)]
        if step < self.half:
            ends.append(step + -step % self.between_grams)
        return min(ends) - step


class OwnSetting(NamedTuple):
    """How copies follow the own examples."""

    rate: float  # the step size, in multiples of the optimizer's
    decay: float  # how strongly they are drawn back
    from_pooled: bool = False  # whether the branch begins from pooled, not from the trunks


class AdaptiveLearner(Learner):
    """Follow the peers first and the own examples then, and serve a mixture of all that came of it.

    The model is, from evaluation to evaluation, the best candidate so far.
    """

    can_restart = False

    def __init__(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        looks: HeldOutEvaluations,
        settings: Sequence[OwnSetting],
        *,
        linear: bool = True,
        own: GradientsAtPoints | None = None,
        apart: bool = False,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, engine, costs)
        self.looks, self.points = looks, looks.points
        self.linear, self.own, self.told = linear, own, told or {}
        self.tau_of_prior, self.exchanges = np.zeros(0), 0
        # the parts of `points`: all own examples, then all but each fold
        self.n_folds = int(looks.folds.max()) + 1
        self.settings = sorted(settings)  # those of one step size come one after the other
        self.schedule = Schedule.of(spec.steps)
        self.peer_weights = PeerWeights(
            engine, spec.steps, self.schedule.half, self.points.d, self.n_folds
        )
        start, d = self.points.start(), self.points.d
        # the part of the own examples that each copy of alone, and of the branch, sees
        self.parts = [*range(self.n_folds + 1)] * len(self.settings)
        self.judging = [*range(1, self.n_folds + 1)]  # the part that judges each trunk
        self.alone: Stack | None = None
        self.branch: Stack | None = None
        # only pooled where the trunks follow one another, `apart`
        self.peers = Stack.of(spec, start[:d].expand(1 if apart else self.n_folds + 1, -1))
        stacks = {"peers": self.peers}
        self.paths: list[OwnPaths] = []  # in the place of the two stacks of own copies
        self.ends = list[Tensor]()  # where the trunks and pooled were at the fork, for these
        self.trunks: TrunkPaths | None = None
        if apart:
            first_half, trunks = (
                (0, self.schedule.half),
                [Path("trunk", 1.0, 0.0, q) for q in self.judging],
            )
            about: dict[str, Any] = {"span": first_half, "within": first_half}
            self.trunks = TrunkPaths(
                spec, trunks, direct=self._direct_trunk, begin=lambda _: start, **about
            )
        if own is None:
            self.alone = self._own_stack(start[:d].expand(len(self.parts), -1))
            stacks["alone"] = self.alone
        else:
            self.paths.append(self._own_paths("alone", lambda _: start))
        self.buffers = {
            name: start[d:].expand(len(stack.x), -1).clone() for name, stack in stacks.items()
        }
        copies = 0 if self.alone is None else len(self.alone.x)
        self.origins = start.new_zeros(copies, d)  # towards which the branch is held back
        decays = [each.decay for each in self.settings]
        self.decays = self.x.new_tensor(decays).repeat_interleave(self.n_folds + 1)[:, None]
        self._collect()
        self.trunk_weights = self.x.new_zeros(self.n_folds + 1, len(engine.names))
        self.pooled_weights = self.trunk_weights[-1:].clone()
        self._each_trunk = list(torch.split(self.trunk_weights[:-1], 1))
        self._weigh()
        self.sketch = engine.capabilities.sketch
        self.grams = self.gradients_asked = 0
        # how long what peers send may be
        self.longest = self.x.new_zeros(self.n_folds + 1)
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

    def _own_stack(self, x: Tensor) -> Stack:
        """Return copies that follow the own examples, each by its setting's step size."""
        copies, rates = self.n_folds + 1, [each.rate for each in self.settings]
        counts = {rate: rates.count(rate) * copies for rate in dict.fromkeys(rates)}
        apart = why_not_stacked(self.spec.made_optimizer)
        held: list[tuple[RunSpec, int]] = []
        for rate, count in counts.items():
            spec = self.spec.at_rate(rate)
            held += [(spec, 1)] * count if apart else [(spec, count)]
        return Stack(x.clone(), held)

    def _own_paths(self, kind: str, begin: Callable[[Path], Tensor]) -> OwnPaths:
        """Return the paths of all settings, blind copies first, one after the other.

        Those of alone take their steps in the first half of the run, those of the branch in the
        second: few copies are held at once.
        """
        if self.own is None:
            raise AssertionError("copies are followed in parallel")
        paths = [
            Path(kind + " from pooled" * (kind == "branch" and each.from_pooled), *each[:2], part)
            for each in self.settings
            for part in (*self.judging, 0)
        ]
        half, steps, after = self.schedule.half, self.spec.steps, self.schedule.evaluations - {0}
        about: dict[str, Any] = {"span": (0, steps), "within": (0, half), "judged": after}
        if kind == "branch":
            about = dict.fromkeys(("span", "within"), (half, steps))
            about["judged"] = frozenset(each for each in after if each >= half)
        return OwnPaths(self.spec, paths, points=self.own, looks=self.looks, begin=begin, **about)

    def _branch_origin(self, path: Path) -> Tensor:
        """Return where a path of the branch begins: from its trunk, the mean of them, or pooled."""
        *trunks, pooled = self.ends
        if path.kind != "branch":
            return pooled
        return (
            trunks[path.part - 1]
            if path.part
            else functools.reduce(torch.add, trunks) / len(trunks)
        )

    def question(self) -> Question:
        """Return what the next step asks.

        The peers at the models that follow them, user 0 where copies need its gradient.
        """
        if not self.looks.paths:
            self._look()
        apart = self.trunks is not None
        points, judges = self._points("peers"), self.step in self.schedule.judging and not apart
        in_trunk = self.step < self.schedule.half and not apart
        weights = self.trunk_weights if in_trunk else self.pooled_weights
        own = [self._points("alone")] if self.alone is not None else []
        if self.branch is not None:
            own.append(self._points("branch"))
        parts = self.parts * len(own)
        if self.buffers["peers"].shape[1]:  # running statistics are those of the own examples
            own.append(points)
            parts = [*parts, *([*self.judging, 0] if in_trunk else [0])]
        self._asks = judges or self.last_exchange is None or not self._holds()
        if judges:
            self._pooled = self.peer_weights.by_size
        if not self._asks:
            points, weights = points[:0], self._nobody
        each = self.judging if judges else ()
        into = None if own or not self._asks else self.peers.direction
        points = torch.cat([points, *own]) if own else points
        return Question(points, self.step, weights, own=parts, each=each, into=into)

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Return the step of all copies that the answers make; asked for here when None."""
        rates = self.optimizer if isinstance(self.scheduler, ReduceLROnPlateau) else None
        if self.trunks is not None:  # which pooled needs
            self.trunks.follow(self.step, rates)
        before = sum(paths.taken for paths in self.paths)
        for paths in self.paths:
            paths.follow(self.step, rates)
        taken = sum(paths.taken for paths in self.paths) - before
        self.costs.compute([self.costs.me], times=taken)
        answers = self.points.ask(self.question()) if answers is None else answers
        asked = len(self.peers.x) if self._asks else 0
        given, losses = cast("Tensor", answers.sums), cast("Tensor", answers.losses)
        own, sums, answered = given[asked:], given[:asked], answers.answered
        mine, loss = (
            (own[0], losses[0]) if len(own) else (self.paths[0].largest, self.paths[0].loss)
        )
        if not self._asks and self.last_exchange is not None:  # between exchanges: the last sums
            sums, answered = self.last_exchange["sums"], self.last_exchange["answered"]
        if not self._asks or answers.judged is None:
            take = partial(self._take, answers, own, sums, answered)
            return NextStep(mine, loss, answers.left_out if self._asks else {}, take)
        near = self._near(answers, slice(self.n_folds))
        take = partial(self._take_judging, answers, own, sums, near)
        return NextStep(mine, loss, near.left_out, take)

    def _take_judging(
        self, answers: Answers, own: Tensor, sums: Tensor, near: WithoutOutliers
    ) -> None:
        """Step by the weights that were asked for, and fit those of the next steps."""
        sums, answered = near.sums(sums, answers.answered, self.trunk_weights)
        self._fit(near, slice(self.n_folds))
        if self.sketch:
            self.costs.exchange(self.engine.names, down=0, up=self.n_folds * self.sketch)
        self._take(replace(answers, left_out=near.left_out), own, sums, answered)

    def _near(self, answers: Answers, trunks: slice) -> WithoutOutliers:
        """Return what these trunks are weighed by, without gradients that are far too long."""
        bounded, names = self.spec.norm_bound is not None, self.engine.names
        return WithoutOutliers.of(answers, self.longest[trunks], bounded=bounded, names=names)

    def _fit(self, near: WithoutOutliers, trunks: slice) -> None:
        """Fit the weights of the next steps of these trunks, and of pooled."""
        self.longest[trunks] = near.longest.nan_to_num(0.0)
        self.longest[-1] = self.longest[:-1].max()
        self.peer_weights.fit(near, trunks)
        self._weigh()
        count = len(near.longest)
        self.grams += count
        seen = int(self.points.parts[self.judging[0]].sum())
        self.costs.compute([self.costs.me], seen, times=count)

    def _direct_trunk(self, q: int, step: int, stack: Stack) -> None:
        """Write the direction of a trunk that is followed by itself, at a step of its own."""
        judges = step in self.schedule.judging
        if not judges and step % self.exchange_every:
            return  # that of the last exchange
        weights, trunk = self._each_trunk[q], slice(q, q + 1)
        of_step = np.ones(len(self.engine.names)) if judges else self._weights[q]
        each = self.judging[trunk] if judges else ()
        answers = self.points.ask(Question(stack.x, step, weights, each=each, into=stack.direction))
        sums, answered = cast("Tensor", answers.sums), answers.answered
        silent, names = gave_nothing(answers.left_out), self.engine.names
        given = [name for name, w in zip(names, of_step, strict=True) if w and name not in silent]
        self.gradients_asked += bool(of_step.any())
        self.costs.compute(given)
        self.costs.exchange(given, down=self.points.d, up=self.points.d)
        if judges:
            near = self._near(answers, trunk)
            sums, answered = near.sums(sums, answered, weights)
            self._fit(near, trunk)
        self.direct(sums[:0], sums, answered, (self.longest[trunk], stack.direction))

    def _weigh(self) -> None:
        """Let the weights of the trunks and pooled, which lie where a captured step reads them, be those fitted."""
        self._weights = self.peer_weights.of_trunks()
        self.trunk_weights.copy_(torch.from_numpy(np.array(self._weights)))
        self.pooled_weights.copy_(self.trunk_weights[-1:])

    def _take(self, answers: Answers, own: Tensor, sums: Tensor, answered: Tensor) -> None:
        """Take the step of all copies; keep what the peers said for the steps up to the next exchange."""
        silent = gave_nothing(answers.left_out) if answers.left_out else ()
        self._gave = np.array([name not in silent for name in self.engine.names])
        if answers.refused is not None:
            self._gave = ~answers.refused.numpy()
        if self.exchange_every > 1 and self._asks:
            self.last_exchange = {"sums": sums.clone(), "answered": answered.clone()}
        self.direct(own, sums, answered)
        if self.buffers["peers"].shape[1] and answers.buffers is not None:
            names = [name for name in ("alone", "branch", "peers") if name in self.buffers]
            ends = [len(self.buffers[name]) for name in names]
            self.buffers |= dict(zip(names, torch.split(answers.buffers, ends), strict=True))

    def direct(
        self,
        own: Tensor,
        sums: Tensor,
        answered: Tensor,
        trunk: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write the directions of all copies, or of a `trunk` by itself: how long sums may be, and where.

        The peers' sums, or nothing where they are far too long; own gradients with weight decay.
        """
        copies = 0 if self.alone is None else len(self.alone.x)
        if self.alone is not None:
            torch.addcmul(own[:copies], self.decays, self.alone.x, out=self.alone.direction)
        longest, direction = trunk or (self.longest[-len(self.peers.x) :], self.peers.direction)
        answered = answered.clamp(min=1e-12)
        near = sums.norm(dim=-1) <= longest * answered
        torch.div(sums, torch.where(near, answered, math.inf).unsqueeze(-1), out=direction)
        if self.branch is not None:
            away = self.branch.x - self.origins
            ours = own[copies : 2 * copies]
            torch.addcmul(ours, self.decays, away, out=self.branch.direction)

    def advanced(self, n: int) -> None:
        """Count steps of one kind that were taken.

        Own gradients, and at every point one of each peer that has weight there and gave it. Fork
        the trunk at its end, and evaluate where it is time.
        """
        weights, peers, copies = self._weights, self.engine.names, (self.alone, self.branch)
        own = sum(len(each.x) for each in copies if each is not None)
        if self.step >= self.schedule.half or self.trunks is not None:
            weights = weights[-1:]
        elif self.step in self.schedule.judging:  # everybody is asked at every trunk
            weights = [*[np.ones(len(peers))] * self.n_folds, self._pooled]
        self.costs.compute([self.costs.me], times=own * n)
        gave_at = np.broadcast_to(self._gave, np.shape(weights))
        for row, gave in zip(weights, gave_at, strict=True) if self._asks else ():
            self.gradients_asked += n * bool(row.any())
            given = list(compress(peers, ((row != 0) & gave).tolist()))
            self.costs.compute(given, times=n)
            self.costs.exchange(given, down=self.points.d, up=self.points.d, times=n)
        self.state = {"step": self.step + n, "weight": float(self.step < self.schedule.half)}
        self.step += n
        if self.step == self.schedule.half:
            self._fork()
        if self.step == self.schedule.steps:
            self._close()
        if self.step in self.schedule.evaluations:
            self._look()

    def block(self) -> StackBlock | str:
        """Return the steps between two Gram matrices, evaluations or forks, which are the same work."""
        if self.own is not None:
            return "copies follow the own examples one after the other"
        if self.exchange_every > 1:
            return "not all steps are alike with `exchange_every`"
        why = self.points.why_not_captured or why_not_capturable(self.optimizer)
        return why or StackBlock(self)

    drawn_for = ()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What a step reads beside parameters: weights, how long sums may be, origins."""
        return self.trunk_weights, self.pooled_weights, self.longest, self.origins

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples of the next steps, a row for each step."""
        return [self.points.block(step)]

    def numbers(self, step: int) -> list[float]:
        """Return the numbers of a step: none."""
        return []

    def directions(self, drawn: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """Write the directions of all copies on the examples drawn; return user 0's loss."""
        answers = self.points.on(self.question(), drawn[0])
        sums, asked = cast("Tensor", answers.sums), len(self.peers.x)
        self.direct(sums[asked:], sums[:asked], answers.answered)
        return cast("Tensor", answers.losses)[0]

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps of a block; nothing else is made of their losses."""
        self.advanced(n)

    def repeats(self) -> int:
        """Return how many of the next steps are alike: to the next Gram matrix, evaluation or fork."""
        return 0 if not self.step or not self.looks.paths else self.schedule.alike(self.step)

    def _fork(self) -> None:
        """Begin the branch, where any peer can be followed; pooled goes on.

        Settings begin in turn from the trunks, each blind copy from the trunk that was judged
        without its fold, and from pooled.
        """
        followed_any, trunks = self.peer_weights.fork(), self.n_folds
        self._weigh()
        x, held = self.peers.x, self.buffers["peers"]
        if self.trunks is None:
            self.peers = self.peers.forked([[trunks]])
        self.last_exchange = None
        self.longest = self.x.new_tensor(
            [float(self.peer_weights.by_size @ self.peer_weights.bounds())]
        )
        self.buffers["peers"] = held[-1:].clone()
        if followed_any and self.own is not None:
            self.ends = list(torch.cat([x, held], 1))
            if self.trunks is not None:
                self.ends, self.trunks.ends = [*self.trunks.ends, *self.ends], []
            self.paths.append(self._own_paths("branch", self._branch_origin))
        elif followed_any:
            rows = [[*range(trunks)], *([q] for q in range(trunks))], [[trunks]] * (trunks + 1)
            begin = [row for each in self.settings for row in rows[each.from_pooled]]
            self.origins = torch.stack([x[row].mean(0) for row in begin])
            self.branch = self._own_stack(self.origins)
            self.buffers["branch"] = torch.stack([held[row].mean(0) for row in begin])
        self._collect()

    def _collect(self) -> None:
        copies = self.alone, self.peers, self.branch
        self.stacks = tuple(each for each in copies if each is not None)

    def _close(self) -> None:
        """Find, at the end, what has a closed form."""
        self.ends = []
        looks = self.looks
        if not self.linear or looks.family is LOSS:
            return
        about = looks.family, looks.targets_of_all(), looks.folds_of_all
        forms = ClosedForms(self.spec, self.engine, *about)
        # rows go through its layers at each peer, whose running statistics are its own
        followed = self.peer_weights.bounds().any() and not self.buffers["peers"].shape[1]
        about_steps: dict[str, Any] = {"first": self.spec.steps}
        if self.own is not None:
            self.peers.forget()
            about_steps["before_each"] = give_back
        e_steps = ESteps(self.engine, self.costs, self.peers.x[-1], A_FIT, **about_steps)
        looks.find_closed(forms, e_steps, self._points("peers")[-1] if followed else None)
        self.tau_of_prior, self.exchanges = forms.tau, e_steps.exchanges

    def _look(self) -> None:
        """Judge all copies that are candidates."""
        kinds = {}
        if self.alone is not None:
            kinds["alone"] = self._by_setting("alone")
        elif not self.step:  # from then on its paths add their points
            kinds["alone"] = self.points.start().expand(len(self.settings), 1, -1)
        if self.branch is not None:
            from_pooled = [each.from_pooled for each in self.settings]
            branch, wanted = self._by_setting("branch"), torch.tensor(from_pooled)
            kinds |= {"branch": branch[~wanted], "branch from pooled": branch[wanted]}
        if self.step and self.peer_weights.bounds().any():
            kinds["pooled"] = self._points("peers")[-1:, None]
        self.looks.add(kinds)

    def _by_setting(self, of: Literal["alone", "branch"]) -> Tensor:
        """Return where the copies of each setting are, (settings, copies, numbers of a point)."""
        points = self._points(of)
        return points.view(len(self.settings), -1, points.shape[1])

    def consider(self, validation_loss: float) -> None:
        """Tell a scheduler that wants to know; what is served is found by the mixture."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)
            for stack in self.stacks:
                stack.set_rates(self.optimizer)

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the mixture."""
        if not self.looks.paths:
            return copied(self.model), {}, None
        return self.looks.model(self.looks.fitted().served), {}, None

    def trained_alone(self) -> nn.Module | None:
        """Return the mixture of the candidates that ask no peer."""
        return self.looks.model(self.looks.fitted().alone) if self.looks.paths else None

    def out_of_fold(self) -> Array | None:
        """Return the losses of the own examples by mixtures that did not see their fold."""
        return self.looks.fitted().served.losses if self.looks.paths else None

    def tau(self) -> Mapping[str, float]:
        """Return the peers' weights in what would be served now."""
        if not self.looks.paths:
            return {}
        share = {kind: one.weight for kind, one in self.looks.fitted().entries.items()}
        of_all = sum(share[kind] for kind in share if kind not in (*ALONE_KINDS, *CHOSEN))
        weights = self.peer_weights.served(share.get("branch", 0.0), of_all)
        if len(self.tau_of_prior):
            of_prior = sum(share.get(kind, 0.0) for kind in CHOSEN[1:])
            weights = weights + of_prior * self.tau_of_prior
        return dict(zip(self.engine.names, weights.tolist(), strict=True))

    def account(self, travelled: Mapping[str, Traffic]) -> dict[str, Any]:
        """Return the leaderboard, who was listened to, what that cost, and what may be said of it."""
        if not self.looks.paths:
            return {}
        mine, kappa = travelled.get(self.costs.me, Traffic()), self.peer_weights.kappa()
        test, on_test = self.spec.me.test, None
        if test is not None:
            on_test = partial(self.looks.losses, test)
        return account_of(self.looks.fitted(), self.tau(), len(self.spec.me), on_test) | {
            "steps": list(self.schedule.judging[: len(kappa)]),
            "nobody": kappa[:, 0].tolist() if kappa.size else [],
            "weights": dict(zip(self.engine.names, kappa[:, 1:].T.tolist(), strict=True))
            if kappa.size
            else {},
            "cost": {
                "runs": self.gradients_asked / max(1, self.step),
                "sketches" if self.sketch else "rows": self.grams,
                "exchanges": self.exchanges,
                "messages": sum(each.messages for each in travelled.values()),
                "bytes": mine.bytes_sent + mine.bytes_received,
            },
            **self.told,
        }

    def _points(self, of: Literal["alone", "peers", "branch"]) -> Tensor:
        """Return where the copies are, with the model's buffers where passes move them."""
        stack = {"alone": self.alone, "peers": self.peers, "branch": self.branch}[of]
        if stack is None:
            raise AssertionError("the branch begins at half of the steps")
        buffers = self.buffers[of]
        return torch.cat([stack.x, buffers], dim=1) if buffers.shape[1] else stack.x

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        names = ("step", "state", "longest", "origins", "buffers", "last_exchange")
        return {
            **{name: getattr(self, name) for name in names},
            "half": self.schedule.half,
            **self.peer_weights.state_dict(),
            "model": trained_state(self.model),
            "alone": self.alone and self.alone.state_dict(),
            "own_paths": [each.state_dict() for each in self.paths],
            "trunks": self.trunks and self.trunks.state_dict(),
            "ends": self.ends,
            "peers": self.peers.state_dict(),
            "branch": self.branch and self.branch.state_dict(),
            "paths": self.looks.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "asked": [self.grams, self.gradients_asked, self.exchanges],
            "tau_of_prior": torch.from_numpy(self.tau_of_prior),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.step, self.state = state["step"], state["state"]
        self.schedule = replace(self.schedule, half=state["half"])
        load_trained_state(self.model, state["model"])
        self.peers = Stack.of(self.spec, state["peers"]["x"].to(self.x))
        if self.alone is not None:
            self.alone.load_state_dict(state["alone"])
        self.peers.load_state_dict(state["peers"])
        self.branch = None if state["branch"] is None else self._own_stack(state["branch"]["x"])
        if self.branch is not None:
            self.branch.load_state_dict(state["branch"])
        self._collect()
        self.ends = [each.to(self.x) for each in state["ends"]]
        if self.trunks is not None:
            self.trunks.load_state_dict(state["trunks"])
        if len(state["own_paths"]) > len(self.paths):
            self.paths.append(self._own_paths("branch", self._branch_origin))
        for paths, saved in zip(self.paths, state["own_paths"], strict=True):
            paths.load_state_dict(saved)
        self.buffers, self.last_exchange = dict(state["buffers"]), state["last_exchange"]
        self.origins, self.longest = (state[name].to(self.x) for name in ("origins", "longest"))
        self.peer_weights.load_state_dict(state)
        self._weigh()
        self.looks.load_state_dict(state["paths"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self.grams, self.gradients_asked, self.exchanges = state["asked"]
        self.tau_of_prior = state["tau_of_prior"].cpu().numpy()
