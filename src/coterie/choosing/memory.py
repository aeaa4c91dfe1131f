"""How a run keeps within the memory that it may take."""

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Self

from torch.optim import ASGD, SGD, Adagrad, Optimizer, RMSprop, Rprop

from coterie.arguments import bytes_of
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec

LARGE = 2**19
"""Copies of a model of more parameters follow the own examples one after the other."""
LARGE_ON_A_GPU = 2**22
"""The same on a GPU, where copies that go together are captured; 440 of them are 7 GB."""
SKETCH = 2**14
"""By so many numbers of each gradient peers of a large model are weighed."""
POINTS = 4
"""So many points of a large model are kept to be served."""
PASSES = 10
"""Copies beside these: the served model, where all begin, and what a pass over one model takes."""
BESIDE = 200_000_000
"""Bytes of activations, of sketches and of what the allocator keeps."""


@dataclass(frozen=True)
class MemoryPlan:
    """What is held at once, and what is given up for it.

    Args:
        folds: F, into how many parts the own examples are split.
        points: how many points are kept to be served; all that may win when None.
        one_by_one: whether copies that follow the own examples are trained one after the other,
            and peers weighed by sketches of their gradients.
        whole: whether trunks go together, and each peer's gradients at all of them are held, as
            they come from elsewhere.

    Example:
        >>> plan = MemoryPlan(4, 4, one_by_one=True)
        >>> plan.copies(state=2, settings=2, peers=10)
        30
    """

    folds: int
    points: int | None = None
    one_by_one: bool = False
    whole: bool = False

    @classmethod
    def of(cls, spec: RunSpec, folds: int, settings: int, *, whole: bool = False) -> Self:
        """Return what gives up the least; refuse a budget that nothing keeps."""
        parameters, large = Parameters(spec.model), cls(folds, POINTS, one_by_one=True, whole=whole)
        d, size = parameters.size, parameters.dtype.itemsize
        is_large = d > (LARGE_ON_A_GPU if parameters.device.type == "cuda" else LARGE)
        if spec.memory is None:
            return large if is_large else cls(folds)
        together = [] if is_large else [cls(folds, 3 * POINTS)]
        fewer = [
            cls(each, POINTS // 2, one_by_one=True, whole=whole) for each in range(folds, 1, -1)
        ]
        state, needed = state_of(spec.made_optimizer), 0
        for plan in [*together, large, *fewer]:
            needed = plan.copies(state, settings, len(spec.peers)) * d * size + BESIDE
            if needed <= bytes_of(spec.memory):
                return plan
        raise KnobError(
            f"`memory` of {spec.memory} cannot be kept: a model of {d:,} parameters needs at least"
            f" {needed / 1e9:.3g} GB by adaptive averaging, in {fewer[-1].folds} folds; give as"
            " much, an optimizer that remembers less (`torch.optim.SGD`), or a rule such as"
            " `WeightedAveraging()`"
        )

    def copies(self, state: int, settings: int, peers: int) -> int:
        """Return how many copies of the parameters are held at most.

        Args:
            state: of them an optimizer remembers for one.
            settings: how many there are of Alone, and of the branch.
            peers: how many there are.
        """
        each, trunks = 2 + state, self.folds + 1
        points = 15 * (2 * settings + 1) if self.points is None else self.points
        if self.one_by_one:  # pooled, a trunk and an own copy; the trunks' ends, for the branch
            first = 3 * each + self.folds + points
            if self.whole:
                first = (trunks + 1) * each + 2 * trunks * peers + points
            second = 2 * each + trunks + 1 + points
            return max(first, second) + PASSES
        own = settings * trunks
        first = (own + trunks) * (each + 2) + 2 * self.folds * peers + points
        second = (2 * own + 1) * (each + 2) + own + 2 * points
        return max(first, second) + PASSES

    def account(self, spec: RunSpec, folds: int) -> dict[str, str]:
        """Return what is told of it: what is not as it would be with more memory."""
        parts = []
        if self.one_by_one:
            parts += ["copies follow the own examples one after the other"]
        if self.one_by_one and not self.whole:
            parts += ["peers are weighed by sketches of their gradients"]
        if self.folds < folds:
            parts += [f"{self.folds} folds in place of {folds}"]
        if self.points is not None:
            parts += [f"{self.points} points are kept"]
        if not parts:
            return {}
        budget = "a large model" if spec.memory is None else f"memory of {spec.memory}"
        return {"memory": f"{budget}: {'; '.join(parts)}"}


def state_of(optimizer: Optimizer) -> int:
    """Return how many numbers an optimizer remembers for each parameter.

    Example:
        >>> import torch
        >>> state_of(torch.optim.Adam([torch.zeros(1)])), state_of(torch.optim.SGD([torch.zeros(1)]))
        (2, 0)
    """
    groups = optimizer.param_groups
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in groups))
    if isinstance(optimizer, RMSprop):
        return 1 + max(bool(g["momentum"]) + bool(g["centered"]) for g in groups)
    if isinstance(optimizer, Adagrad | ASGD):
        return 1
    return 2 + int(isinstance(optimizer, Rprop) or any(g.get("amsgrad") for g in groups))


def give_back() -> None:
    """Return to the system what is free between copies that are held, where the C library can."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


OF_A_RULE = 14
"""Copies of a model that a run by a rule holds, beside gradients that it needs one by one."""


def check_memory(spec: RunSpec, needed: float) -> None:
    """Refuse a budget of less than so many bytes beside activations."""
    if spec.memory is not None and needed + BESIDE > bytes_of(spec.memory):
        raise KnobError(
            f"`memory` of {spec.memory} cannot be kept: this run needs about"
            f" {(needed + BESIDE) / 1e9:.3g} GB; give as much, or leave it out"
        )


def check_rule_memory(spec: RunSpec, *, rows: bool) -> None:
    """Refuse a budget that a rule or a method does not keep; some need each peer's gradient."""
    if spec.memory is not None:
        parameters = Parameters(spec.model)
        copies = OF_A_RULE + rows * len(spec.peers)
        check_memory(spec, copies * parameters.size * parameters.dtype.itemsize)
