"""From a table to a personal model in a folder, and from that folder to predictions."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coterie.choosing import Chooser
from coterie.data import Preparation, TableTask
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.errors import DataError
from coterie.evaluation.evaluate import errors, evaluation_mode
from coterie.evaluation.metrics import Metric, accuracy, rmse
from coterie.rules import Alone, Rule
from coterie.tables import models
from coterie.training.run import Run
from coterie.training.train import train
from coterie.users.user import Loss

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Fitted:
    """A personal model and the one trained alone, on the same rows with the same settings.

    Args:
        task: the users and the preparation.
        run: by the rule asked for.
        alone: by `Alone`.
    """

    task: TableTask
    run: Run
    alone: Run

    @property
    def metric(self) -> str:
        """The name of what is reported: accuracy, or the root mean squared error in the target's units."""
        return "accuracy" if self.task.preparation.kind == "classification" else "rmse"

    def difference(self) -> tuple[float, float]:
        """Return the test metric with peers less that of Alone, and its standard error, paired by example."""
        if self.task.me.test is None:
            raise DataError("a task from a table has a test set")
        test, scale = self.task.me.test, self.task.preparation.scale
        ours, theirs = (errors(run.model, test, scale) for run in (self.run, self.alone))
        if self.metric == "accuracy":
            change = theirs - ours
        else:  # the delta method: how each example moves either root of the mean
            change = ours / (2 * ours.mean().sqrt()) - theirs / (2 * theirs.mean().sqrt())
        error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.nan
        return self.run.test[self.metric] - self.alone.test[self.metric], error

    def table(self) -> list[dict[str, Any]]:
        """Return a row for the rule and one for Alone."""
        return [
            {
                "rule": run.record.configuration.rule,
                f"test {self.metric}": f"{run.test[self.metric]:.4g}",
                "test loss": f"{run.test['loss']:.4g}",
                "best step": run.best_step,
            }
            for run in (self.run, self.alone)
        ]

    def sentence(self) -> str:
        """Say whether collaboration helped."""
        difference, error = self.difference()
        gain = difference if self.metric == "accuracy" else -difference
        n = self.run.record.configuration.me.test
        verdict = "Collaboration helped" if gain > 0 else "Collaboration hurt"
        if not abs(gain) > 2 * error:
            verdict = f"Collaboration made no difference that {n} test examples could show"
        return (
            f"{verdict}: {self.metric} {difference:+.4g} ± {error:.2g} against Alone (one standard error, paired)."
        )


def fit(
    task: TableTask,
    rule: Rule | Chooser,
    model: str,
    out: Path,
    *,
    seed: int = 0,
    resume: bool = False,
    engine: Engine | MakeEngine = InProcess,
    **settings: Any,
) -> Fitted | None:
    """Train by a rule and alone, and write model, preparation, records and a page; None after Ctrl-C.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        seed: what the initial weights and the batches depend on.
        resume: go on with the runs that are in `out`.
        engine: where the peers are; Alone is trained in this process.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, …
    """
    torch.manual_seed(seed)
    made = models.build(model, task.n_inputs, task.n_outputs)
    loss = loss_of(task.preparation)
    runs = []
    for each, folder, where in ((rule, out, engine), (Alone(), out / "alone", InProcess)):  # peers need not wait
        runs.append(
            train(
                made,
                loss,
                task.me,
                task.peers,
                each,
                seed=seed,
                out=folder,
                resume=resume,
                engine=where,
                metrics=_metrics(task.preparation),
                **settings,
            )
        )
        if runs[-1].stopped == "Ctrl-C":
            return None
    fitted = Fitted(task, *runs)
    _save(fitted, model, out)
    return fitted


def predict(folder: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions of a folder's model for the rows of a table, in order."""
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        state = torch.load(folder / "model.pt", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no finished model: there is no {error.filename}; run `coterie train`"
        ) from error
    preparation = Preparation.load(folder)
    model = models.build(about["model"], about["n_inputs"], about["n_outputs"])
    model.load_state_dict(state)
    with torch.no_grad(), evaluation_mode(model):
        return preparation.predictions(model(preparation.inputs(rows)))


def _save(fitted: Fitted, model: str, out: Path) -> None:
    from coterie.reporting.figures import learning_curves
    from coterie.reporting.page import Section, write_page
    from coterie.reporting.run_page import sections

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


def loss_of(preparation: Preparation) -> Loss:
    """Return the loss for a target of this kind.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"age": [1.0, 2.0], "ill": [0, 1]})
        >>> loss_of(Preparation.fit(rows[["age"]], rows["ill"], rows["ill"], "classification", ())).__name__
        'cross_entropy'
    """
    f = nn.functional
    return f.cross_entropy if preparation.kind == "classification" else f.mse_loss


def _metrics(preparation: Preparation) -> Mapping[str, Metric]:
    if preparation.kind == "classification":
        return {"accuracy": accuracy}
    return {"rmse": functools.partial(_scaled_rmse, preparation.scale)}


def _scaled_rmse(scale: float, outputs: Tensor, targets: Tensor) -> float:
    return scale * rmse(outputs, targets)
