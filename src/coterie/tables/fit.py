"""From a table to a personal model in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coterie.arguments import SEED
from coterie.choosing import Chooser, MakesLearner
from coterie.data import TableTask
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.errors import FileError
from coterie.recording.claim import claimed
from coterie.rules import Rule
from coterie.tables import models
from coterie.tables.everyone import is_everyone
from coterie.tables.metrics import metrics_of
from coterie.tables.model_files import save_model
from coterie.tables.report import write_report
from coterie.training.run import Run, Stopped
from coterie.training.train import train


def fit(
    task: TableTask,
    rule: Rule | Chooser | MakesLearner,
    model: str,
    out: Path,
    *,
    metrics: Sequence[str] = (),
    seed: int = 0,
    engine: Engine | MakeEngine = InProcess,
    **settings: Any,
) -> Run | None:
    """Train by a rule, and write model, preparation, record and a page; None after Ctrl-C.

    A model trained alone is kept beside it (the guard), so that the run can be compared with it on the test rows.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        metrics: names in `METRICS`; the verdict is made by the first, and by the loss. Accuracy, or the root mean
            squared error, comes last, and first where nothing is named.
        seed: what the initial weights and the batches depend on.
        engine: where the peers are.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, …
    """
    if is_everyone(out):
        raise FileError(f"{out} holds models of several users (`--me all`); name another folder")
    reported = metrics_of(task.preparation, metrics)
    with torch.random.fork_rng(devices=[]):  # nobody else's draws are changed
        torch.manual_seed(SEED("seed", seed))
        made = models.build(model, task.n_inputs, task.n_outputs)
    loss = models.loss_of(task.preparation)
    settings |= {"seed": seed, "metrics": reported}
    with claimed(out):
        run = train(made, loss, task.me, task.peers, rule, out=out, engine=engine, **settings)
        if run.stopped is Stopped.CTRL_C:
            return None
        try:
            task.preparation.save(out)
            save_model(out, run.model, model, task.n_inputs, task.n_outputs)
            write_report(out, run, task.preparation, task.target, task.test_rows)
        except FileError as error:
            raise FileError(f"{error}. The model is trained: `--resume` will write it then", run) from error
    return run
