"""Which runs share batches, and how they go through the model together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from coterie.engines.in_process.copies import Copies
from coterie.learners.tables import ExamplePool, Table
from coterie.users.sampling import BatchStream
from coterie.users.trees import Tree

T = TypeVar("T")
Needs: TypeAlias = dict[int, dict[BatchStream, float]]
"""For each run, the batches that it needs, and what the mean loss over each weighs."""

MAX_EXTRA_EXAMPLES = 1.25
"""Runs share a group where that passes at most this many times the examples that a run needs; the rest weigh 0."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Runs that go through the model together, in G groups of M that share their batches."""

    runs: Tensor  # which they are, of shape (G M,)
    table: Table  # the batches of each group
    shares: Tensor  # of shape (G, M, R), what each example weighs for each run

    def gradients(self, copies: Copies, x: Tensor, batches: tuple[Tree, Tree]) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weighted losses, of shape (G M, d), and those losses, of shape (G M,)."""
        inputs, targets = batches
        counts = copies.counts(targets)
        shares = self.shares if counts is None else self.table.counted(self.shares, counts)
        gradients, losses = copies.gradients(self._rows(x), shares, inputs, targets)
        return gradients.flatten(0, 1), losses.flatten()

    def outputs(self, copies: Copies, x: Tensor) -> tuple[Tree, Tree]:
        """Return the outputs on batches that are all there is, of shape (G, M, R, …), and their targets."""
        inputs, targets = self.table.at(0)
        return copies.outputs(self._rows(x), inputs), targets

    def _rows(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.runs).view(*self.shares.shape[:2], -1)


def passes(copies: Copies, pool: ExamplePool, needs: Needs, x: Tensor) -> list[Pass]:
    """Return passes that give every run what it needs.

    Runs that need nearly the same share a group; groups of one size go together, as many as memory allows.
    """
    cut: list[tuple[list[int], list[BatchStream]]] = []
    for runs, streams in _groups(needs):
        most = copies.max_copies(pool.examples.inputs, _rows(streams))
        cut += [(list(some), streams) for some in _evenly(runs, most)]
    cut.sort(key=lambda group: (len(group[0]), _rows(group[1])))
    together = []
    for size, same in groupby(cut, key=lambda group: len(group[0])):
        alike = list(same)
        most = copies.max_copies(pool.examples.inputs, _rows(alike[-1][1]))
        for some in _evenly(alike, max(1, most // size)):
            table = Table(pool.examples, [streams for _, streams in some])
            shares = table.shares([[needs[run] for run in runs] for runs, _ in some])
            order = torch.tensor([run for runs, _ in some for run in runs], device=x.device)
            together.append(Pass(order, table, shares.to(x)))
    return together


def _groups(needs: Needs) -> list[tuple[list[int], list[BatchStream]]]:
    """Return runs that need nearly the same, and all that they need."""
    groups: list[tuple[list[int], dict[BatchStream, None], int]] = []
    known: dict[frozenset[BatchStream], int] = {}
    for run, need in needs.items():
        wanted, rows = frozenset(need), _rows(need)
        if wanted not in known:
            for place, (_, there, least) in enumerate(groups):
                union = _rows(there.keys() | wanted)
                if union <= MAX_EXTRA_EXAMPLES * min(rows, least):
                    groups[place] = (groups[place][0], there | dict.fromkeys(need), min(rows, least))
                    known[wanted] = place
                    break
            else:
                known[wanted] = len(groups)
                groups.append(([], dict.fromkeys(need), rows))
        groups[known[wanted]][0].append(run)
    return [(runs, list(there)) for runs, there, _ in groups]


def _rows(streams: Iterable[BatchStream]) -> int:
    return sum(each.size for each in streams)


def _evenly(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return values in parts of about one size, which is at most that."""
    parts = -(-len(values) // most)
    ends = [len(values) * part // parts for part in range(parts + 1)]
    return [values[first:last] for first, last in pairwise(ends)]
