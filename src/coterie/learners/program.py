"""Many runs as one program: a pass over the own batches of all, one over the peers', then the rules of all."""

import copy
import sys
from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.gradients.norm_bound import NormBound
from coterie.learners.sharing import Needs, Pass, passes
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack
from coterie.learners.stacked_rules import Call, StackedRules
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
        self._held_out = HeldOut(copies, [spec.me for spec in specs], stack.x)
        self._heard = torch.cat([each.runs for each in self._peers]) if peers else None
        heard = [] if self._heard is None else self._heard.tolist()
        rules = {run: specs[run].rule for run in heard}
        self._rules = StackedRules(rules, stack.x[heard])
        self._listening = set(heard)
        factors = [specs[run].norm_bound or torch.inf for run in heard]
        self._bound = NormBound(stack.x.new_tensor(factors), stack.x[heard])
        self.own_loss = stack.x.new_zeros(len(specs), dtype=torch.float64)  # in the last step
        self.losses = torch.zeros_like(self.own_loss)  # added up; whoever reads them sets them to zero
        self._sums = stack.x.new_zeros(len(specs))
        self.stacks = (stack,)

    def advance(self) -> None:
        """Take one step in every run."""
        batches = [each.table.at(self.step) for each in (*self._own, *self._peers)]
        self.own_loss = self._directions(batches, self._rules)
        self.losses += self.own_loss
        self.stack.step()
        self.step += 1

    def _directions(self, batches: Sequence[tuple[Tree, Tree]], rules: Call) -> Tensor:
        """Write the direction of every run, and return the own losses."""
        x, direction, own_loss = self.stack.x, self.stack.direction, torch.empty_like(self.own_loss)
        own_batches, peers_batches = batches[: len(self._own)], batches[len(self._own) :]
        for each, batch in zip(self._own, own_batches, strict=True):
            gradients, losses = each.gradients(self.copies, x, batch)
            direction.index_copy_(0, each.runs, gradients)
            own_loss.index_copy_(0, each.runs, losses.double())
        if self._heard is not None:
            pairs = zip(self._peers, peers_batches, strict=True)
            peers = [each.gradients(self.copies, x, batch)[0] for each, batch in pairs]
            own = direction.index_select(0, self._heard)
            theirs = peers[0] if len(peers) == 1 else torch.cat(peers)
            direction.index_copy_(0, self._heard, rules(own, theirs))
            too_long = self._bound.long_sums(own, theirs)
            self._sums.index_add_(0, self._heard, torch.zeros_like(own[:, 0]).masked_fill_(too_long, torch.nan))
        self._sums += direction.sum(1)
        return own_loss

    @property
    def held(self) -> list[Tensor]:
        """What a step reads and changes beside the parameters; see `learners.blocks`."""
        return [self._sums, self._bound.longest, *self._rules.memory]

    def repeats(self) -> int:
        """Return how many of the next steps are the same work: all, once the optimizers have their state."""
        return sys.maxsize if self.step and self._rules.repeats() else 0

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples that each pass draws in this step and some after it."""
        return [each.table.block(step) for each in (*self._own, *self._peers)]

    def numbers(self, step: int) -> list[float]:
        """Return the knobs of all runs at a step."""
        return self._rules.numbers_at(step)

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the direction of every run by what is drawn; return the own losses."""
        batches = [each.table.of(row) for each, row in zip((*self._own, *self._peers), drawn, strict=True)]
        return self._directions(batches, partial(self._rules.repeat, numbers=numbers))

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps of a block."""
        self.own_loss = losses[-1].to(self.own_loss)
        self.losses += losses.sum(0).to(self.losses)
        self._rules.taken(n)
        self.step += n

    def failed(self) -> list[bool]:
        """Say of each run whether a gradient was not finite, or too long, so that its parameters are of no use."""
        # A finite sum has finite terms, and no knob hides what is not finite: 0 · ∞ is not a number.
        return (~self._sums.isfinite()).tolist()

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        return self._rules.weight(run) if run in self._listening else 0.0

    def state(self, run: int) -> State:
        """Return the state of a run's rule after the last step."""
        return self._rules.state(run) if run in self._listening else {"step": self.step, "weight": 0.0}

    def held_out(self) -> dict[int, tuple[Tree, Tree]]:
        """Return the outputs and targets on the validation set of each run that has one in memory, on the host."""
        return self._held_out.outputs(self.stack.x)


HOST = torch.device("cpu")
"""Where outputs on validation sets are scored."""


class HeldOut:
    """The validation sets of many runs, whose models pass over them together; of `users`, one for each row of x."""

    def __init__(self, copies: Copies, users: Sequence[User], x: Tensor) -> None:
        self.copies, self._passes = copies, _validation(copies, users, x)

    def outputs(self, x: Tensor) -> dict[int, tuple[Tree, Tree]]:
        """Return the outputs and targets of each row of x whose validation set is in memory, on the host."""
        by_run = {}
        for each in self._passes:
            passed = each.outputs(self.copies, x)
            outputs, targets = (mapped(Tensor.cpu, tree) for tree in passed)
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
