"""From a table to a personal model in a folder."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.choosing import Chooser, MakesLearner
from coterie.data import Preparation, TableTask
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.evaluation.metrics import METRICS, Metric, accuracy, rmse
from coterie.reporting.figures import learning_curves
from coterie.reporting.page import Section, write_page
from coterie.reporting.run_page import sections
from coterie.rules import Alone, Rule
from coterie.tables import models
from coterie.tables.fitted import Fitted
from coterie.training.run import Stopped
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
) -> Fitted | None:
    """Train by a rule and alone, and write model, preparation, records and a page; None after Ctrl-C.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        metrics: names in `METRICS` to report beside accuracy, or the root mean squared error.
        seed: what the initial weights and the batches depend on.
        engine: where the peers are; Alone is trained in this process.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, …
    """
    reported = _metrics(task.preparation, metrics)
    torch.manual_seed(seed)
    made = models.build(model, task.n_inputs, task.n_outputs)
    loss = models.loss_of(task.preparation)
    runs, settings = [], {**settings, "seed": seed, "metrics": reported}
    for each, folder, where in ((rule, out, engine), (Alone(), out / "alone", InProcess)):  # peers need not wait
        runs.append(train(made, loss, task.me, task.peers, each, out=folder, engine=where, **settings))
        if runs[-1].stopped is Stopped.CTRL_C:
            return None
    fitted = Fitted(task, *runs)
    _save(fitted, model, out)
    return fitted


def _save(fitted: Fitted, model: str, out: Path) -> None:
    torch.save({k: v.clone().cpu() for k, v in fitted.run.model.state_dict().items()}, out / "model.pt")
    task = fitted.task
    about = {"model": model, "n_inputs": task.n_inputs, "n_outputs": task.n_outputs}
    (out / "model.json").write_text(json.dumps(about), encoding="utf-8")
    task.preparation.save(out)
    curves = {
        run.record.configuration.rule: [run.record.curve("validation_loss")] for run in (fitted.run, fitted.alone)
    }
    peers = fitted.run.record.configuration.peers
    page = [
        Section("Result", [fitted.sentence(), *fitted.run.summary().splitlines()], [fitted.table()]),
        Section("Beside Alone", ["Loss on user 0's validation rows."], figures=[learning_curves(curves, "loss")]),
        *sections(fitted.run.record),
        Section("Peers", [], [[{"peer": name, "rows": rows} for name, rows in peers.items()]]),
    ]
    write_page(out / "index.html", f"A model for {task.me.name}", page)


def _metrics(preparation: Preparation, names: Sequence[str]) -> dict[str, Metric]:
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
