"""Run the cells that are not there yet, in this process or in several."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch

from coterie.benchmark.cells import Cell, Store
from coterie.benchmark.methods import METHODS
from coterie.benchmark.models import MODELS
from coterie.benchmark.sets import SETS, load, task_of
from coterie.benchmark.tuning import Tuning
from coterie.errors import KnobError
from coterie.users.sampling import seeded


def run(
    cells: Sequence[Cell], store: Store, data: Path | None, *, jobs: int = 1
) -> Generator[list[Cell], None, None]:
    """Measure the cells that are not in the store, and yield those of one task when they are.

    Every cell is in the store as soon as it is finished. What is measured does not depend on `jobs`.

    Args:
        cells: the cells asked for, those of one task together.
        store: where they are kept.
        data: the folder of all data.
        jobs: how many processes to use; 1 is this one.
    """
    if jobs < 1:
        raise KnobError(f"`jobs` must be at least 1, got {jobs}")
    left = [cell for cell in cells if cell not in store]
    tasks = [list(of_task) for _, of_task in groupby(left, key=lambda cell: replace(cell, method=""))]
    if jobs == 1:
        for of_task in tasks:
            measure(of_task, store, data)
            yield of_task
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks) or 1), context, initializer=_prepare_process)
    try:
        futures = {pool.submit(measure, of_task, store, data): of_task for of_task in tasks}
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


def measure(cells: Sequence[Cell], store: Store, data: Path | None) -> None:
    """Measure the cells of one task, all settings that can be trained at once together, and keep each."""
    first = cells[0]
    user_set = SETS[first.set]
    task = task_of(
        load(first.set, data),
        first.user,
        own_examples=user_set.own_examples,
        most_peers=user_set.most_peers,
        condition=first.condition,
        seed=first.seed,
    )
    with seeded(first.seed, "model", 0):
        model = MODELS[first.model](task.n_inputs, task.n_outputs)
    tuning = Tuning(task, model, steps=store.steps, batch_size=user_set.batch_size, seed=first.seed)
    tuning.prepare([way for cell in cells for way in METHODS[cell.method]])
    counts = {"own_examples": len(task.me), "peers": len(task.peers)}
    for cell in cells:
        store.add(cell, counts | asdict(tuning.outcome(METHODS[cell.method])))


def _prepare_process() -> None:
    """Use one thread, and leave Ctrl-C to the first process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
