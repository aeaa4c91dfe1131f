"""How many CPU threads a run takes.

One where passes are so small that threads would only wait for each other.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coterie.engines.in_process.passes import Passes
from coterie.users.sampling import one_thread
from coterie.users.trees import Tree, n_rows

MAX_OPERATIONS_OF_ONE = 1e8
"""Up to so many operations in a pass over everybody's batches, forward, a run takes one thread."""


@runtime_checkable
class CountsOperations(Protocol):
    """An engine that knows how large its passes are."""

    def operations(self) -> float:
        """Return about how many operations a forward pass over everybody's batches takes."""


def operations(passes: Passes, x: Tensor, inputs: Tree) -> float:
    """Return about how many operations a forward pass takes.

    Those that torch counts, or two for each parameter.
    """
    counter = FlopCounterMode(display=False)
    with contextlib.suppress(Exception), torch.no_grad(), counter:  # not every model can be counted
        passes.output(x, inputs, passes.buffers())
    return max(float(counter.get_total_flops()), 2.0 * x.numel() * n_rows(inputs))


def threads_for(wanted: int | None, engine: object) -> int:
    """Return how many threads to take.

    As many as wanted, or one for small passes, or as many as torch has.
    """
    there = torch.get_num_threads()
    if wanted is not None or there == 1 or not isinstance(engine, CountsOperations):
        return wanted or there
    return 1 if engine.operations() <= MAX_OPERATIONS_OF_ONE else there


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch, and what NumPy and SciPy multiply matrices by, use so many threads inside.

    Afterwards they use as many as before. A thread of Python that begins while another's run goes
    on has that run's number; it is given the one before.
    """
    with one_thread():
        began_within = bool(_Taken.runs) and not _Taken.here.__dict__.get("runs")
        before = _Taken.before if began_within else torch.get_num_threads()
        _Taken.before = _Taken.before if _Taken.runs else before
        if not _Taken.runs:
            found = ThreadpoolController().lib_controllers
            _Taken.blas = {each: each.num_threads for each in found if each.user_api == "blas"}
        for each in _Taken.blas:
            each.set_num_threads(count)
        _Taken.runs += 1
        _Taken.here.runs = _Taken.here.__dict__.get("runs", 0) + 1
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with one_thread():
            _Taken.runs -= 1
            _Taken.here.runs -= 1
            torch.set_num_threads(before)
            for each, many in _Taken.blas.items() if not _Taken.runs else ():
                each.set_num_threads(many)


class _Taken:
    """The runs that set a number of threads, also by thread, and how many there were before the first of them."""

    runs: ClassVar[int] = 0
    before: ClassVar[int] = 1
    blas: ClassVar[dict[Any, int]] = {}  # libraries, and how many threads each had
    here: ClassVar[threading.local] = threading.local()
