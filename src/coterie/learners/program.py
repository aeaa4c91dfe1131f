"""Many runs as one program.

A pass over the own batches of all, one over the peers', then the rules of all.
"""

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.stacked_sums import ExamplePool, StackedSums
from coterie.gradients.norm_bound import NormBound
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps
from coterie.learners.stacked_rules import Call, StackedRules
from coterie.rules import State
from coterie.users.sampling import BatchStream


class Program:
    """Many runs of one model and loss, all taking a step at a time.

    The runs are prepared, each with its rule; those of one setting of the optimizer come one after
    the other. The stack holds their parameters in that order.
    """

    def __init__(self, copies: Copies, specs: Sequence[RunSpec], stack: Stack) -> None:
        self.copies, self.stack, self.step = copies, stack, 0
        device, needs = stack.x.device, list[dict[BatchStream, float]]()
        pool = ExamplePool((user for spec in specs for user in (spec.me, *spec.peers)), device)
        asking = []
        for run, spec in enumerate(specs):
            needs.insert(run, {pool.stream(spec.me, spec.batch_size, spec.seed): 1.0})
            tau = spec.rule.weights([peer.name for peer in spec.peers])
            asked = [user for user in spec.peers if user.name in tau]
            if asked:
                asking.append(run)
                needs.append(
                    {pool.stream(u, spec.batch_size, spec.seed): tau[u.name] for u in asked}
                )
        columns = {
            stream: column
            for column, stream in enumerate(dict.fromkeys(s for need in needs for s in need))
        }
        self._stacked = StackedSums(copies, pool, list(columns))
        self._weights = stack.x.new_zeros(len(needs), len(columns))
        for row, need in zip(self._weights, needs, strict=True):
            row[[columns[stream] for stream in need]] = row.new_tensor(list(need.values()))
        self._origins = torch.tensor([*range(len(specs)), *asking], device=device)
        self._asking = torch.tensor(asking, device=device) if asking else None
        rules = {run: specs[run].rule for run in asking}
        self._rules = StackedRules(rules, stack.x[asking])
        self._asks = set(asking)
        factors = [specs[run].norm_bound or torch.inf for run in asking]
        self._bound = NormBound(stack.x.new_tensor(factors), stack.x[asking])
        self.own_loss = stack.x.new_zeros(len(specs), dtype=torch.float64)  # in the last step
        # added up; whoever reads them sets them to zero
        self.losses = torch.zeros_like(self.own_loss)
        self._sums = stack.x.new_zeros(len(specs))
        self.stacks, self._steps = (stack,), Steps()

    def advance(self) -> None:
        """Take one step in every run."""
        self.own_loss = self._directions(self._stacked.drawn(self.step), self._rules)
        self.losses += self.own_loss
        self._steps.take(self.stacks)
        self.step += 1

    def _directions(self, drawn: Tensor, rules: Call) -> Tensor:
        """Write the direction of every run, and return the own losses."""
        direction, runs = self.stack.direction, len(self.stack.x)
        sums, losses = self._stacked.sums(self.stack.x, self._weights, drawn, origins=self._origins)
        direction.copy_(sums[:runs])
        if self._asking is not None:
            own, theirs = direction.index_select(0, self._asking), sums[runs:]
            direction.index_copy_(0, self._asking, rules(own, theirs))
            too_long = self._bound.long_sums(own, theirs)
            self._sums.index_add_(
                0, self._asking, torch.zeros_like(own[:, 0]).masked_fill_(too_long, torch.nan)
            )
        self._sums += direction.sum(1)
        return losses[:runs].double()

    @property
    def held(self) -> list[Tensor]:
        """What a step reads and changes beside the parameters; see `learners.blocks`."""
        return [self._sums, self._bound.longest, *self._rules.memory]

    drawn_for = ()

    def repeats(self) -> int:
        """Return how many of the next steps are the same work.

        All, once the optimizers have their state.
        """
        return sys.maxsize if self.step and self._rules.repeats() else 0

    def drawn(self, step: int) -> list[Tensor]:
        """Return the examples that are drawn in this step and some after it."""
        return [self._stacked.block(step)]

    def numbers(self, step: int) -> list[float]:
        """Return the knobs of all runs at a step."""
        return self._rules.numbers_at(step)

    def directions(self, drawn: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
        """Write the direction of every run by what is drawn; return the own losses."""
        return self._directions(drawn[0], partial(self._rules.repeat, numbers=numbers))

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps of a block."""
        self.own_loss = losses[-1].to(self.own_loss)
        self.losses += losses.sum(0).to(self.losses)
        self._rules.taken(n)
        self.step += n

    def failed(self) -> list[bool]:
        """Say of each run whether a gradient was not finite, or too long, so that its parameters are of no use."""
        # A finite sum has finite terms, and no knob hides what is not finite: 0 · ∞ is not a
        # number.
        return (~self._sums.isfinite()).tolist()

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        return self._rules.weight(run) if run in self._asks else 0.0

    def state(self, run: int) -> State:
        """Return the state of a run's rule after the last step."""
        return self._rules.state(run) if run in self._asks else {"step": self.step, "weight": 0.0}
