"""Run the benchmark: measure the cells that are not there yet, in this process or in several."""

import multiprocessing
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import pandas as pd
import torch

from coterie.benchmark.cells import Cell, Selection, Store
from coterie.benchmark.contenders import Contender
from coterie.benchmark.methods import DEFAULT
from coterie.benchmark.results import write_results
from coterie.benchmark.sets import UserSet, load
from coterie.benchmark.tasks import CONDITIONS, task_of
from coterie.benchmark.tools import Tool
from coterie.benchmark.tuning import Tuning
from coterie.errors import KnobError
from coterie.recording.claim import claimed
from coterie.registry import import_from_environment
from coterie.users.sampling import seeded


def run(
    out: Path | str,
    *,
    sets: Sequence[str | UserSet] = ("digits",),
    methods: Sequence[str | Contender | Tool] = DEFAULT,
    conditions: Sequence[str] = tuple(CONDITIONS),
    models: Sequence[str] | None = None,
    users: int = 3,
    seeds: int = 1,
    steps: int = 60,
    data: Path | str | None = None,
    jobs: int = 1,
) -> "pd.DataFrame":
    """Compare methods on the users of data sets.

    Write cells, results and a page, and return a row for each cell.

    What is in `out` already is not measured again. With several processes, sets and methods of
    one's own must be
    importable: defined in a module, not in a notebook.

    Args:
        out: the folder to write.
        sets: names in `SETS`, or a `UserSet` of one's own.
        methods: names as for `coterie bench --methods`, or a `Contender` or `Tool` of one's own.
        conditions: what is done to the data; see `CONDITIONS`.
        models: each for the sets that it fits; None takes the first of each set.
        users: how many users of a set are user 0 in turn.
        seeds: how often each is repeated, with other examples and peers.
        steps: of each run.
        data: the folder of all data, with a folder for each set.
        jobs: how many processes to use; 1 is this one.

    Example:
        >>> import tempfile, coterie
        >>> mine = Contender.of("mine", coterie.WeightedAveraging(0.2))
        >>> with tempfile.TemporaryDirectory() as out:
        ...     rows = run(out, methods=[mine], conditions=["honest"], users=1, steps=2)
        >>> rows["method"].tolist()
        ['alone', 'sklearn-alone', 'mine']
    """
    selection = Selection(sets, methods, conditions, models, users, seeds)
    folder = None if data is None else Path(data)
    with claimed(Path(out)):
        store = Store(Path(out), steps)
        for _ in measure_cells(list(selection.cells(folder)), selection, store, folder, jobs=jobs):
            pass
        return write_results(store, Path(out))


def measure_cells(
    cells: Sequence[Cell], selection: Selection, store: Store, data: Path | None, *, jobs: int = 1
) -> Generator[list[Cell], None, None]:
    """Measure the cells that are not in the store, and yield those of one task when they are.

    The cells of one task stand together. Each is in the store as soon as it is finished. What is
    measured does not depend on `jobs`, how many processes to use; 1 is this one.
    """
    if jobs < 1:
        raise KnobError(f"`jobs` must be at least 1, got {jobs}")
    left = [cell for cell in cells if cell not in store]
    tasks = [
        list(of_task) for _, of_task in groupby(left, key=lambda cell: replace(cell, method=""))
    ]
    if jobs == 1:
        for of_task in tasks:
            measure_task(of_task, selection, store, data)
            yield of_task
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks) or 1), context, initializer=_prepare_process)
    try:
        futures = {
            pool.submit(measure_task, of_task, selection, store, data): of_task for of_task in tasks
        }
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BaseException:
        # What is under way is not waited for: a cell is on disk whole or not at all.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)  # waits for the pool's own thread, which reaps them
        raise
    pool.shutdown()


def measure_task(
    cells: Sequence[Cell], selection: Selection, store: Store, data: Path | None
) -> None:
    """Measure the cells of one task, all settings that can be trained at once together, and keep each."""
    first, user_set = cells[0], selection.user_set(cells[0].set)
    few = {"own_examples": user_set.own_examples, "most_peers": user_set.most_peers}
    task = task_of(
        load(user_set, data), first.user, **few, condition=first.condition, seed=first.seed
    )
    with seeded(first.seed, "model", 0):
        model = user_set.makers[first.model](task.n_inputs, task.n_outputs)
    tuning = Tuning(task, model, steps=store.steps, batch_size=user_set.batch_size, seed=first.seed)
    contenders = {cell: selection.contender(cell.method) for cell in cells}
    tuning.prepare(
        [s for one in contenders.values() if isinstance(one, Contender) for s in one.settings]
    )
    counts = {"own_examples": len(task.me), "peers": len(task.peers)}
    for cell, one in contenders.items():
        outcome = one.outcome(task) if isinstance(one, Tool) else tuning.outcome(one.settings)
        store.add(cell, counts | asdict(outcome))


def _prepare_process() -> None:
    """Use one thread, leave Ctrl-C to the first process, and import what the user's command names."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_from_environment()
