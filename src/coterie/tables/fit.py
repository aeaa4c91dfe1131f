"""From a table to a personal model in a folder."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.arguments import SEED
from coterie.choosing import Chooser, MakesLearner
from coterie.data import Preparation, TableTask
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.errors import FileError
from coterie.evaluation.metrics import METRICS, Metric, accuracy, rmse
from coterie.recording.claim import claimed
from coterie.rules import Rule
from coterie.tables import models
from coterie.tables.model_files import save_model
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
        metrics: names in `METRICS` to report beside accuracy, or the root mean squared error.
        seed: what the initial weights and the batches depend on.
        engine: where the peers are.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, …
    """
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
            run.report(out / "index.html")
        except FileError as error:
            raise FileError(f"{error}. The model is trained: `--resume` will write it then", run) from error
    return run


def metrics_of(preparation: Preparation, names: Sequence[str]) -> dict[str, Metric]:
    """Return the usual metric and the named ones, in regression in the target's units."""
    if preparation.kind == "classification":
        return {"accuracy": accuracy} | {name: METRICS[name] for name in names}
    usual: dict[str, Metric] = {"rmse": functools.partial(_scaled_rmse, preparation.scale)}
    in_units = functools.partial(_in_units, preparation.centre, preparation.scale)
    return usual | {name: functools.partial(in_units, METRICS[name]) for name in names if name not in usual}


def _scaled_rmse(scale: float, outputs: Tensor, targets: Tensor) -> float:
    return scale * rmse(outputs, targets)


def _in_units(centre: float, scale: float, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    return metric(centre + scale * outputs, centre + scale * targets)
