"""Many runs as one program: a pass over the own batches of all, one over the peers', then the rules of all."""

import copy
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.learners.sharing import Needs, Pass, passes
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.learners.stacked_rules import StackedRules
from coterie.learners.tables import ExamplePool
from coterie.rules import State
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, mapped
from coterie.users.user import User


class Program:
    """Many runs of one model and loss, all taking a step at a time.

    The runs are prepared, each with its rule; those of one setting of the optimizer come one after the other. The
    stack holds their parameters in that order.
    """

    def __init__(self, copies: Copies, specs: Sequence[RunSpec], stack: Stack) -> None:
        self.copies, self.stack, self.step = copies, stack, 0
        device, own, peers = stack.x.device, Needs(), Needs()
        pool = ExamplePool((user for spec in specs for user in (spec.me, *spec.peers)), device)
        for run, spec in enumerate(specs):
            own[run] = {pool.stream(spec.me, spec.batch_size, spec.seed): 1.0}
            tau = spec.rule.weights([peer.name for peer in spec.peers])
            asked = [user for user in spec.peers if user.name in tau]
            if asked:
                peers[run] = {pool.stream(u, spec.batch_size, spec.seed): tau[u.name] for u in asked}
        self._own, self._peers = (passes(copies, pool, needs, stack.x) for needs in (own, peers))
        self._held_out = _validation(copies, [spec.me for spec in specs], stack.x)
        self._heard = torch.cat([each.runs for each in self._peers]) if peers else None
        heard = [] if self._heard is None else self._heard.tolist()
        rules = {run: specs[run].rule for run in heard}
        self._rules = StackedRules(rules, stack.x[heard])
        self._listening = set(heard)
        self.own_loss = stack.x.new_zeros(len(specs), dtype=torch.float64)
        self._sums = stack.x.new_zeros(len(specs))

    def advance(self) -> None:
        """Take one step in every run."""
        x, direction = self.stack.x, self.stack.direction
        for each in self._own:
            gradients, losses = each.gradients(self.copies, x, self.step)
            direction.index_copy_(0, each.runs, gradients)
            self.own_loss.index_copy_(0, each.runs, losses.double())
        if self._heard is not None:
            peers = [each.gradients(self.copies, x, self.step)[0] for each in self._peers]
            own = direction.index_select(0, self._heard)
            heard = self._rules(own, peers[0] if len(peers) == 1 else torch.cat(peers))
            direction.index_copy_(0, self._heard, heard)
        self._sums += direction.sum(1)
        self.stack.step()
        self.step += 1

    def failed(self) -> list[bool]:
        """Say of each run whether one of its gradients was not finite, so that its parameters are of no use."""
        # A finite sum has finite terms, and no knob hides what is not finite: 0 · ∞ is not a number.
        return (~self._sums.isfinite()).tolist()

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        return self._rules.weight(run) if run in self._listening else 0.0

    def state(self, run: int) -> State:
        """Return the state of a run's rule after the last step."""
        return self._rules.state(run) if run in self._listening else {"step": self.step, "weight": 0.0}

    def held_out(self) -> dict[int, tuple[Tree, Tree]]:
        """Return the outputs and targets on the validation set of each run that has one in memory."""
        by_run = {}
        for each in self._held_out:
            outputs, targets = each.outputs(self.copies, self.stack.x)
            sizes = [sum(stream.size for stream in group) for group in each.table.groups]
            for place, run in enumerate(each.runs.tolist()):
                group, copy_ = divmod(place, each.shares.shape[1])
                own, size = (group, copy_, slice(sizes[group])), (group, slice(sizes[group]))
                by_run[run] = mapped(itemgetter(own), outputs), mapped(itemgetter(size), targets)
        return by_run


def _validation(copies: Copies, users: Sequence[User], x: Tensor) -> list[Pass]:
    """Return the passes over the validation sets that are in memory."""
    held = {}
    for run, user in enumerate(users):
        if isinstance(user.validation, InMemory):
            held[run] = copy.copy(user)  # a user whose examples are the validation set
            held[run].examples = user.validation
    if not held:
        return []
    pool = ExamplePool(held.values(), x.device)
    return passes(copies, pool, {run: {pool.stream(user, len(user), 0): 1.0} for run, user in held.items()}, x)
