"""From a table to a personal model in a folder."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from coterie.arguments import SEED
from coterie.choosing import Chooser, MakesLearner
from coterie.data import TableTask
from coterie.errors import FileError
from coterie.methods import rounds
from coterie.methods.rounds import Method
from coterie.recording.claim import claimed
from coterie.rules import Rule
from coterie.tables import models
from coterie.tables.everyone import is_everyone
from coterie.tables.metrics import metrics_of
from coterie.tables.model_files import save_model
from coterie.tables.report import left_out_section, write_report
from coterie.tables.splits import FOLDER, Split, judge_over_splits
from coterie.training.run import Run, Stopped
from coterie.training.train import train
from coterie.users.sampling import one_thread

Followed: TypeAlias = Rule | Chooser | MakesLearner | Method
"""What makes a direction of gradients, or takes rounds of its own."""

LR = 0.01
"""Adam's step size on tables, where none is given."""


def step_size(rule: Followed, lr: float | None) -> float:
    """Return the step size that is given, else Adam's for a rule, and that of plain steps for a method.

    Example:
        >>> from coterie.methods import FedAvg
        >>> from coterie.rules import Alone
        >>> step_size(Alone(), None), step_size(FedAvg(), None), step_size(FedAvg(), 0.3)
        (0.01, 0.1, 0.3)
    """
    if lr is not None:
        return lr
    return rounds.LR if isinstance(rule, Method) else LR


def fit(
    task: TableTask,
    rule: Followed,
    model: str,
    out: Path,
    *,
    again: Sequence[Callable[[], tuple[TableTask, Followed]]] = (),
    metrics: Sequence[str] = (),
    seed: int = 0,
    **settings: Any,
) -> Run | None:
    """Train by a rule, and write model, preparation, record and a page; None after Ctrl-C.

    A model trained alone is kept beside it (the guard), so that the run can be compared with it on the test rows.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        again: make the same users with user 0's rows split in another way, and the rule for them. The verdict is
            then on the mean of all splits; what is served is the model of the first.
        metrics: names in `METRICS`; the verdict is made by the first, and by the loss. Accuracy, or the root mean
            squared error, comes last, and first where nothing is named.
        seed: what the initial weights and the batches depend on; in the k-th other split, seed + k.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, engine, …
    """
    if is_everyone(out):
        raise FileError(f"{out} holds models of several users (`--me all`); name another folder")
    how: dict[str, Any] = {"model": model, "metrics": metrics, "seed": seed, **settings}
    with claimed(out):
        run = _train(task, rule, out, **how)
        if run.stopped is Stopped.CTRL_C:
            return None
        try:
            task.preparation.save(out)
            save_model(out, run.model, model, task.n_inputs, task.n_outputs)
            splits = [Split.of(run)] if again else []
            for other in _others(again, out, **how):
                if other.stopped is Stopped.CTRL_C:
                    return None
                splits.append(Split.of(other))
            more = [left_out_section(task.left_out)] if task.left_out else []
            more += [judge_over_splits(run, splits)] if splits else []
            write_report(out, run, task.preparation, task.target, task.test_rows, more=more)
        except FileError as error:
            raise FileError(f"{error}. The model is trained: `--resume` will write it then", run) from error
    return run


def _others(
    again: Sequence[Callable[[], tuple[TableTask, Followed]]], out: Path, *, seed: int, **how: Any
) -> Iterator[Run]:
    """Yield the runs of the other splits, each in a folder of its own."""
    how |= {"trackers": (), "measure": False}
    for k, make in enumerate(again, 1):
        yield _train(*make(), out / FOLDER / f"{k + 1:02d}", seed=seed + k, **how)


def _train(
    task: TableTask, rule: Followed, out: Path, *, model: str, metrics: Sequence[str], seed: int, **settings: Any
) -> Run:
    reported = metrics_of(task.preparation, metrics)
    with one_thread(), torch.random.fork_rng(devices=[]):  # nobody else's draws are changed
        torch.manual_seed(SEED("seed", seed))
        made = models.build(model, task.n_inputs, task.n_outputs)
    loss = models.loss_of(task.preparation)
    return train(made, loss, task.me, task.peers, rule, out=out, seed=seed, metrics=reported, **settings)
