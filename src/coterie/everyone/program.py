"""Everybody's next step as one program: passes that serve all members, then one step of all their rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from coterie.choosing.adaptive.branch import mixed
from coterie.choosing.adaptive.trunk import followed
from coterie.evaluation.losses import PerExample, on_device
from coterie.everyone.members import AnsweredEngine, TrunkMember
from coterie.everyone.passes import SharedPasses, WeightedSums
from coterie.everyone.rows import RowOptimizer, join
from coterie.gradients.gradients import Gradients, is_finite
from coterie.learners.learner import Learner
from coterie.learners.points import Own, Sums
from coterie.learners.program import HOST, HeldOut
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.training.loop import TrainingLoop
from coterie.users.trees import Tree


class Program(Protocol):
    """Members of one kind, who take a step at a time."""

    def begin(self) -> None:
        """Begin, once the runs are open."""

    def leave(self, loop: TrainingLoop) -> None:
        """Go on without a member."""

    def answer(self) -> None:
        """Compute what all members ask for in the next step, and leave it with them."""

    def step(self) -> None:
        """Let all rows step, once every member has left its direction, and members go on."""

    def repeat(self, most: int, stop: Callable[[], bool]) -> list[list[float]]:
        """Take steps that are the same work for all, at most so many, and return everybody's losses in each.

        None are taken where the next step is other work, or where its gradients are to be looked at one by one.
        """


class TrunksTogether:
    """Members who follow `AdaptiveAveraging`."""

    def __init__(self, passes: SharedPasses, members: Mapping[int, TrunkMember]) -> None:
        self.passes, self._places = passes, dict(members)
        self.members = list(members.values())
        for member in self.members:
            member.waits = True

    def begin(self) -> None:
        """Let the rows of all members be those of two stacks."""
        members, users, device = self.members, range(len(self.passes.users)), self.passes.like.device
        peers_of = ([other for other in users if other != place] for place in self._places)
        self._columns = [torch.tensor(others, device=device) for others in peers_of]
        self._own = self.passes.own([member.points.parts for member in members], list(self._places))
        self._alone, alone = join([member.alone for member in members])
        self._peers, peers = join([member.peers for member in members])
        for member, mine, theirs in zip(members, alone, peers, strict=True):
            member.alone, member.peers = mine, theirs
        self._sums: WeightedSums | None = None
        self._alike = len({(member.n_folds, member.n_trunks) for member in members}) == 1
        self._unheard = torch.cat([member.unheard for member in members])
        for member, unheard in zip(members, torch.split(self._unheard, 1), strict=True):
            member.unheard = unheard

    def leave(self, loop: TrainingLoop) -> None:
        """Go on without a member."""
        self._places = {place: member for place, member in self._places.items() if member is not loop.learner}
        self.members = list(self._places.values())
        if self.members:
            self.begin()

    def answer(self) -> None:
        """Compute own gradients at all copies, and the peers' sums unless every peer is judged by itself."""
        members, step = self.members, self.members[0].step
        wanted = [member.own_points() for member in members]
        gradients, losses = self._own.gradients(torch.cat(wanted), step)
        sums: list[Sums | None] = [None] * len(members)
        if not members[0].judges:
            weighted = self._weighted().at(self._peers.x, step)
            sizes = [len(member.peers.x) for member in members]
            pairs = zip(torch.split(weighted, sizes), torch.split(self._answered, sizes), strict=True)
            sums = [Sums(some, answered) for some, answered in pairs]
        groups = [len(points) for points in wanted]
        own = zip(torch.split(gradients, groups), torch.split(losses, groups), strict=True)
        for member, (mine, loss), theirs in zip(members, own, sums, strict=True):
            rows = mine.transpose(0, 1).reshape(-1, mine.shape[2])  # all parts of the first copies, then the next
            member.points.answer = step, Own(rows, loss[0, 0], rows[:, :0]), theirs

    def _weighted(self) -> WeightedSums:
        """Return what gives the peers' sums at all points, by weights over all users, 0 for oneself."""
        if self._sums is not None:
            return self._sums
        rows = []
        for member, columns in zip(self.members, self._columns, strict=True):
            weights = member.weights()
            if weights is None:
                raise AssertionError("members judge at the same steps")
            row = weights.new_zeros(len(weights), len(self.passes.users))
            rows.append(row.index_copy_(1, columns, weights))
        whole = torch.cat(rows)
        self._answered = whole.sum(1)
        self._longest = torch.cat([member.longest_sums() for member in self.members])
        self._sums = self.passes.sums(whole)
        return self._sums

    def step(self) -> None:
        """Let all copies step, and members look and fork where it is time."""
        self._alone.step()
        self._peers.step()
        changed = self.members[0].judges
        self._go_on(1)
        if changed:
            self._sums = None

    def _go_on(self, n: int) -> None:
        for member in self.members:
            member.go_on(n)
        if self.members[0].step == self.members[0].half:
            self.begin()

    def repeat(self, most: int, stop: Callable[[], bool]) -> list[list[float]]:
        """Take the steps of all copies between two Gram matrices, looks or forks; see `Program`."""
        step, losses = self.members[0].step, list[list[float]]()
        most = min(most, *(member.until_other_work() for member in self.members)) if self._alike else 0
        while len(losses) < most and (own_losses := self._direct(step + len(losses))) is not None:
            self._alone.step()
            self._peers.step()
            losses.append(own_losses.tolist())
            if stop():
                break
        if losses:
            self._go_on(len(losses))
        return losses

    def _direct(self, step: int) -> Tensor | None:
        """Write the directions of all copies, and return everybody's own loss.

        None where a gradient is not finite: that is looked into member by member.
        """
        first, (alone, theirs) = self.members[0], (self._by_member(each.x) for each in (self._alone, self._peers))
        branch, copies = step >= first.half, alone.shape[1]
        points = [alone, theirs[:, :copies]] if branch else [alone]
        gradients, losses = self._own.gradients(torch.stack(points, dim=2).flatten(0, 1), step)
        sums = self._weighted().at(self._peers.x, step)
        if not (is_finite(gradients) and is_finite(sums)):
            return None
        own, asked = self._by_member(gradients), Sums(self._by_member(sums), self._by_member(self._answered))
        longest, out = self._by_member(self._longest), self._by_member(self._peers.direction)
        self._by_member(self._alone.direction).copy_(own[:, :, 0])
        if branch:
            self._unheard += ~mixed(own[:, :, 1], asked, longest, first.schedule.alpha(step), out)[:, 0]
        else:
            followed(asked, longest, out)
        return self._by_member(losses)[:, 0, 0]

    def _by_member(self, rows: Tensor) -> Tensor:
        """Return the rows of all members, who have as many each, as (members, rows, …)."""
        members = len(self.members)
        return rows.view(members, len(rows) // members, *rows.shape[1:])


class LearnersTogether:
    """Members who follow a formula, each with its guard's shadow where it has one."""

    def __init__(self, passes: SharedPasses, members: Mapping[int, TrainingLoop]) -> None:
        places, self.loops = list(members), list(members.values())
        self.passes, loops = passes, self.loops
        self.copies = 1 if loops[0].guard is None else 2
        learners = [learner for loop in loops for learner in _learners(loop)]
        self._whole = _joined(loops[0].spec, learners)
        self._engines = [_answered(learner) for learner in learners]
        everything = [torch.ones(1, len(passes.users[place]), dtype=torch.bool) for place in places]
        self._own = passes.own(everything, places)
        self._ours = torch.arange(0, len(learners), self.copies, device=self._whole.x.device)
        weights = self._whole.x.new_zeros(len(loops), len(passes.users))
        names = [user.name for user in passes.users]
        for row, loop in zip(weights, loops, strict=True):
            for name, weight in loop.learner.rule.weights(loop.learner.engine.names).items():
                row[names.index(name)] = weight
        self._sums = passes.sums(weights) if weights.any() else None

    def begin(self) -> None:
        """Let the schedules of step sizes go on where those of the members are."""
        learner = self.loops[0].learner
        if learner.scheduler is not None:
            rates = [group["lr"] for group in learner.optimizer.param_groups]
            self._whole.load_schedules([{"lr": rates, "scheduler": learner.scheduler.state_dict()}])

    def leave(self, loop: TrainingLoop) -> None:
        """Let the rows of a member that has ended be; nobody reads them."""

    def answer(self) -> None:
        """Compute own gradients of all learners and shadows, and the peers' sums at the learners' points."""
        step, x = max(loop.learner.step for loop in self.loops), self._whole.x
        gradients, losses = self._own.gradients(x.view(len(self.loops), self.copies, -1), step)
        sums = None if self._sums is None else self._sums.at(x.index_select(0, self._ours), step)
        pairs = zip(gradients.flatten(0, 1), losses.flatten(), strict=True)
        for row, (engine, (own, loss)) in enumerate(zip(self._engines, pairs, strict=True)):
            user, copy = divmod(row, self.copies)
            peers = None if copy or sums is None else sums[user]
            engine.answer = step, Gradients(own, peers, x=x[row], own_loss=loss)

    def step(self) -> None:
        """Let all rows step."""
        self._whole.step()

    def repeat(self, most: int, stop: Callable[[], bool]) -> list[list[float]]:
        """Take no steps: each rule makes its own of what it is given."""
        return []


class EvaluatedTogether:
    """The validation sets of all members: models and guards' shadows pass over them together."""

    def __init__(self, passes: SharedPasses, loops: Mapping[int, TrainingLoop]) -> None:
        self._loops = loops
        self._rows = [(place, learner) for place, loop in loops.items() for learner in _learners(loop)]
        loss, users = passes.copies.passes.per_example, [loops[place].spec.me for place, _ in self._rows]
        self._loss = None if loss is None else cast("PerExample", on_device(loss, HOST))
        self._held_out = HeldOut(passes.copies, users, self._points())

    def _points(self) -> Tensor:
        return torch.stack([learner.x for _, learner in self._rows])

    def outputs(self) -> dict[int, tuple[Tree, Tree]]:
        """Return outputs and targets of every member's model, by place, and leave losses with its guard."""
        by_place = {}
        outputs = self._held_out.outputs(self._points())
        for row, (place, learner) in enumerate(self._rows):
            if row in outputs:
                loop = self._loops[place]
                if loop.guard is not None and self._loss is not None:
                    loop.guard.known[learner.model] = self._loss.by_example(*outputs[row]).double()
                if learner is loop.learner:
                    by_place[place] = outputs[row]
        return by_place


def _learners(loop: TrainingLoop) -> list[Learner]:
    return [loop.learner] if loop.guard is None else [loop.learner, loop.guard.shadow]


def _answered(learner: Learner) -> AnsweredEngine:
    learner.engine = AnsweredEngine(learner.engine)
    return learner.engine


def _joined(spec: RunSpec, learners: Sequence[Learner]) -> Stack:
    """Let the parameters of all learners be rows of one stack."""
    whole = Stack.of(spec, torch.stack([learner.x for learner in learners]))
    for row, learner in enumerate(learners):
        own = RowOptimizer(whole, row, learner.optimizer, learner.parameters)
        learner.x = learner.parameters.share(whole.x[row])
        learner.optimizer = cast("Optimizer", own)
    return whole
