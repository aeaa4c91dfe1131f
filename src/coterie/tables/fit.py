"""From a table to a personal model in a folder, or to one for each of its users, in a folder each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.arguments import SEED
from coterie.choosing.measuring import before_training
from coterie.choosing.mixture import with_columns
from coterie.data import Preparation, TableTask, TableUsers, from_table
from coterie.errors import DataError, FileError, KnobError
from coterie.everyone.everyone_page import write_everyone_page
from coterie.everyone.folders import POOLED, folder_names
from coterie.everyone.runs import Runs, gifts
from coterie.everyone.train import train_everyone
from coterie.learners.spec import RunSpec
from coterie.recording import files
from coterie.recording.claim import claimed
from coterie.registry import RunSizes
from coterie.reporting.page import Section
from coterie.tables import models
from coterie.tables.calibration import save_calibration, save_pooled_calibration
from coterie.tables.models import save_model
from coterie.tables.predict import FILE, SERVED_BY, is_everyone
from coterie.tables.report import (
    class_shares,
    contributed,
    left_out_section,
    metrics_of,
    warn_of_imbalance,
    write_report,
)
from coterie.tables.splits import FOLDER, Split, judge_over_splits
from coterie.theory.estimates import Estimates
from coterie.training.algorithm import Followed
from coterie.training.run import Run, Stopped
from coterie.training.train import train
from coterie.users.sampling import one_thread

AGAIN: dict[str, Any] = {"trackers": (), "measure": False}
"""How splits after the first are trained."""


def fit(
    task: TableTask,
    rule: Followed,
    model: str,
    out: Path,
    *,
    again: Sequence[Callable[[], tuple[TableTask, Followed]]] = (),
    metrics: Sequence[str] = (),
    contributions: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Run | None:
    """Train by a rule, and write model, preparation, record and a page; None after Ctrl-C.

    A model trained alone is kept beside it (the guard), so that the run can be compared with it on
    the test rows.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        again: make the same users with user 0's rows split in another way, and the rule for them.
            The verdict is then on the mean of all splits; what is served is the model of the first.
        metrics: names in `METRICS`; the verdict is made by the first, and by the loss. Accuracy, or
            the root mean squared error, comes last, and first where nothing is named.
        contributions: write what each peer adds to contributions.json, and on the page.
        seed: what the initial weights and the batches depend on; in the k-th other split, seed + k.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, engine, …
    """
    if is_everyone(out):
        raise FileError(f"{out} holds models of several users (`--me all`); name another folder")
    warn_of_imbalance(class_shares([task.me], task.preparation), task.preparation)
    everything: dict[str, Any] = {"model": model, "metrics": metrics, "seed": seed, **settings}
    with claimed(out):
        run = _train(task, rule, out, **everything)
        if run.stopped is Stopped.CTRL_C:
            return None
        try:
            task.preparation.save(out)
            save_model(out, run.model, model, task.n_inputs, task.n_outputs)
            save_calibration(out, run, task.preparation)
            splits = [Split.of(run)] if again else []
            for k, make in enumerate(again, 1):
                others = everything | AGAIN | {"seed": seed + k}
                other = _train(*make(), _folder_of_split(out, k), **others)
                if other.stopped is Stopped.CTRL_C:
                    return None
                splits.append(Split.of(other))
            more = [left_out_section(task.left_out)] if task.left_out else []
            more += [judge_over_splits(run, splits)] if splits else []
            if contributions:
                more.append(contributed(run.contributions(), out))
            shares = class_shares([task.me], task.preparation)
            about = task.preparation, task.target, task.test_rows
            write_report(out, run, *about, shares=shares, more=more)
        except FileError as error:
            raise FileError(
                f"{error}. The model is trained: `--resume` will write it then", run
            ) from error
    return run


def _train(
    task: TableTask,
    rule: Followed,
    out: Path,
    *,
    model: str,
    metrics: Sequence[str],
    seed: int,
    **settings: Any,
) -> Run:
    reported = metrics_of(task.preparation, metrics, class_shares([task.me], task.preparation))
    made, loss = _built(model, task.preparation, seed), models.loss_of(task.preparation)
    rule = with_columns(rule, task.preparation.numeric)
    return train(
        made, loss, task.me, task.peers, rule, out=out, seed=seed, metrics=reported, **settings
    )


def _built(model: str, preparation: Preparation, seed: int) -> nn.Module:
    """Return a model with the initial parameters of a seed; nobody else's draws are changed."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED("seed", seed))
        return models.build(model, preparation.n_inputs, preparation.n_outputs)


def _folder_of_split(out: Path, k: int) -> Path:
    """Return the folder of the k-th split after the first."""
    return out / FOLDER / f"{k + 1:02d}"


def fit_everyone(
    table: TableUsers,
    rule: Callable[[RunSizes], Followed],
    model: str,
    out: Path,
    *,
    user_column: str,
    again: Sequence[Callable[[], TableUsers]] = (),
    contributions: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Runs | None:
    """Train a model for each user and a pooled one, and write them with a page for each and one for all.

    None after Ctrl-C.

    Args:
        table: the users, from `coterie.data.users_from_table`.
        rule: makes everybody's rule of what is known of its run.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write; every user has one in it.
        user_column: the column with the name of each row's user, by which `predict` finds a row's
            model.
        again: make the same users with everybody's rows split in another way. Each user's verdict
            is then on the mean of all splits.
        contributions: write what others add to contributions.json in everybody's folder, and on
            the pages.
        seed: what the initial weights and the batches depend on; in the k-th other split, seed + k.
        settings: `metrics`, names of metrics to report; the others are passed on to
            `coterie.train_everyone`: steps, lr, batch_size, device, resume, …
    """
    if table.preparation.ids == SERVED_BY:
        raise DataError(
            f"`ids` names {SERVED_BY!r}, the column that says whose model made a prediction;"
            " rename it"
        )
    warn_of_imbalance(class_shares(table.users, table.preparation), table.preparation)
    with claimed(out):
        runs = _train_all(table, rule, model, out, seed=seed, **settings)
        if runs.stopped is Stopped.CTRL_C:
            return None
        splits = {name: [Split.of(run)] for name, run in runs.runs.items()} if again else {}
        for k, make in enumerate(again, 1):
            others = {**settings, **AGAIN, "seed": seed + k}
            other = _train_all(make(), rule, model, _folder_of_split(out, k), **others)
            if other.stopped is Stopped.CTRL_C:
                return None
            for name in splits.keys() & other.runs.keys():
                splits[name].append(Split.of(other.runs[name]))
        left_out = {name: f"left out: {why}" for name, why in table.left_out.items()}
        runs = replace(runs, not_trained={**left_out, **runs.not_trained})
        folders = folder_names(list(runs.runs))
        try:
            contributions_of = {
                name: run.contributions() for name, run in runs.runs.items() if contributions
            }
            more = {
                name: [
                    *(
                        [judge_over_splits(run, splits[name])]
                        if len(splits.get(name, "")) > 1
                        else []
                    ),
                    *(
                        [contributed(contributions_of[name], out / folders[name])]
                        if contributions_of
                        else []
                    ),
                ]
                for name, run in runs.runs.items()
            }
            _write(out, runs, table, model=model, folders=folders, more=more)
            pages = {name: f"{place}/index.html" for name, place in folders.items()}
            write_everyone_page(
                out / "index.html",
                runs,
                pages,
                gifts(contributions_of) if contributions_of else None,
            )
            files.write_json(out / FILE, {"user_column": user_column, "folders": folders})
        except FileError as error:
            raise FileError(
                f"{error}. The models are trained: `--resume` will write them then", runs
            ) from error
    return runs


def _train_all(
    table: TableUsers,
    rule: Callable[[RunSizes], Followed],
    model: str,
    out: Path,
    *,
    metrics: Sequence[str] = (),
    seed: int,
    steps: int,
    **settings: Any,
) -> Runs:
    sizes = {user.name: len(user) for user in table.users}
    rules = {
        name: with_columns(
            rule(RunSizes(own, {other: n for other, n in sizes.items() if other != name}, steps)),
            table.preparation.numeric,
        )
        for name, own in sizes.items()
    }
    shares = class_shares(table.users, table.preparation)
    settings |= {"seed": seed, "steps": steps, "out": out}
    settings |= {"metrics": metrics_of(table.preparation, metrics, shares)}
    made, loss = _built(model, table.preparation, seed), models.loss_of(table.preparation)
    return train_everyone(made, loss, table.users, rules, **settings)


def _write(
    out: Path,
    runs: Runs,
    table: TableUsers,
    *,
    model: str,
    folders: Mapping[str, str],
    more: Mapping[str, Sequence[Section]],
) -> None:
    """Write everybody's model, preparation and page."""
    preparation, users = table.preparation, {user.name: user for user in table.users}

    def write(folder: Path, run: Run) -> None:
        preparation.save(folder)
        save_model(folder, run.model, model, preparation.n_inputs, preparation.n_outputs)

    for name, run in runs.runs.items():
        write(out / folders[name], run)
        save_calibration(out / folders[name], run, preparation)
        about = preparation, table.target, table.test_rows[name]
        shares = class_shares([users[name]], preparation)
        others = {other: one for other, one in runs.models.items() if other != name}
        write_report(
            out / folders[name], run, *about, shares=shares, more=more[name], others=others
        )
    if runs.pooled is not None:
        write(out / POOLED, runs.pooled)
        save_pooled_calibration(out / POOLED, runs.pooled.model, table.users, preparation)


def measured(
    data: Path, *, user_column: str, target: str, me: str, model: str, steps: int, **table: Any
) -> Estimates:
    """Return noise, bias and curvature of a table's users, as a run would measure them before its first step.

    `table` is what else `from_table` takes.
    """
    named = {"--user-column": user_column, "--target": target, "--me": me}
    if missing := [name for name, value in named.items() if not value]:
        raise KnobError(f"`--data` needs `{missing[0]}` too")
    task = from_table(data, user_column=user_column, target=target, me=me, **table)
    made = _built(model, task.preparation, seed=0)
    spec = RunSpec(
        made, models.loss_of(task.preparation), task.me, task.peers, steps=steps
    ).prepared()
    return before_training(spec.in_process(), spec)
