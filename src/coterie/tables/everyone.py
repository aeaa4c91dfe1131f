"""From a table to a model for each of its users, in a folder each, and a pooled one for users who come later."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coterie.arguments import SEED
from coterie.data import TableUsers
from coterie.errors import DataError, FileError, did_you_mean, few_of
from coterie.everyone.everyone_page import write_everyone_page
from coterie.everyone.folders import POOLED, folder_names
from coterie.everyone.runs import Runs, gifts
from coterie.everyone.train import train_everyone
from coterie.recording import files
from coterie.recording.claim import claimed
from coterie.registry import RunFacts
from coterie.tables import models
from coterie.tables.calibration import save_calibration, save_pooled_calibration
from coterie.tables.models import save_model
from coterie.tables.report import (
    class_shares,
    contributed,
    metrics_of,
    warn_of_imbalance,
    write_report,
)
from coterie.training.algorithm import Followed
from coterie.training.run import Run, Stopped
from coterie.users.sampling import one_thread

if TYPE_CHECKING:
    import pandas as pd

FILE = "everyone.json"
"""Says whose model is in which folder."""
SERVED_BY = "model"
"""The column of predictions that says whose model made them."""
ALL_USERS = "pooled (all users)"
"""What it says of the pooled model where a user is called "pooled"."""


def fit_everyone(
    table: TableUsers,
    rule: Callable[[RunFacts], Followed],
    model: str,
    out: Path,
    *,
    user_column: str,
    metrics: Sequence[str] = (),
    contributions: bool = False,
    seed: int = 0,
    steps: int,
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
        metrics: names of metrics to report.
        contributions: write what others add to contributions.json in everybody's folder, and on
            the pages.
        seed: what the initial weights and the batches depend on.
        steps: how many everybody takes.
        settings: passed on to `coterie.train_everyone`: lr, batch_size, device, resume, …
    """
    if table.preparation.ids == SERVED_BY:
        raise DataError(
            f"`ids` names {SERVED_BY!r}, the column that says whose model made a prediction;"
            " rename it"
        )
    with one_thread(), torch.random.fork_rng(devices=[]):  # nobody else's draws are changed
        torch.manual_seed(SEED("seed", seed))
        made = models.build(model, table.n_inputs, table.n_outputs)
    sizes = {user.name: len(user) for user in table.users}
    rules = {
        name: rule(RunFacts(own, {other: n for other, n in sizes.items() if other != name}, steps))
        for name, own in sizes.items()
    }
    shares = class_shares(table.users, table.preparation)
    warn_of_imbalance(shares, table.preparation)
    settings |= {
        "seed": seed,
        "steps": steps,
        "metrics": metrics_of(table.preparation, metrics, shares),
        "out": out,
    }
    with claimed(out):
        runs = train_everyone(
            made, models.loss_of(table.preparation), table.users, rules, **settings
        )
        if runs.stopped is Stopped.CTRL_C:
            return None
        left_out = {name: f"left out: {why}" for name, why in table.left_out.items()}
        runs = replace(runs, not_trained={**left_out, **runs.not_trained})
        try:
            _write(out, runs, table, model, user_column, contributions=contributions)
        except FileError as error:
            raise FileError(
                f"{error}. The models are trained: `--resume` will write them then", runs
            ) from error
    return runs


def _write(
    out: Path,
    runs: Runs,
    table: TableUsers,
    model: str,
    user_column: str,
    *,
    contributions: bool = False,
) -> None:
    """Write everybody's model, preparation and page, then the page of all, and last which folder is whose."""
    preparation = table.preparation

    def write(folder: Path, run: Run) -> None:
        preparation.save(folder)
        save_model(folder, run.model, model, preparation.n_inputs, preparation.n_outputs)

    folders, users = folder_names(list(runs.runs)), {user.name: user for user in table.users}
    given = {name: run.contributions() for name, run in runs.runs.items() if contributions}
    for name, run in runs.runs.items():
        write(out / folders[name], run)
        save_calibration(out / folders[name], run, preparation)
        about = preparation, table.target, table.test_rows[name]
        shares = class_shares([users[name]], preparation)
        more = [contributed(given[name], out / folders[name])] if given else []
        write_report(out / folders[name], run, *about, shares=shares, more=more)
    if runs.pooled is not None:
        write(out / POOLED, runs.pooled)
        save_pooled_calibration(out / POOLED, runs.pooled.model, table.users, preparation)
    pages = {name: f"{place}/index.html" for name, place in folders.items()}
    write_everyone_page(out / "index.html", runs, pages, gifts(given) if given else None)
    files.write_json(out / FILE, {"user_column": user_column, "folders": folders})


def is_everyone(folder: Path) -> bool:
    """Say whether a folder holds models of several users."""
    return (folder / FILE).exists()


def whose_folders(folder: Path) -> tuple[str, Mapping[str, str]]:
    """Return the column with the users of rows, and by user the name of the folder of its model."""
    remedy = "train again: `coterie train --me all` with `--resume` writes it anew"
    about = files.read_json(folder / FILE, remedy, ("user_column", "folders"))
    return str(about["user_column"]), _checked_folders(about["folders"], folder / FILE, remedy)


def routed(
    folder: Path, rows: "pd.DataFrame", predict: Callable[[Path, "pd.DataFrame"], "pd.DataFrame"]
) -> "pd.DataFrame":
    """Return everybody's predictions in the order of the rows.

    Each row goes to the model of its user.

    Rows of users who have none, and rows without a user, go to the pooled model; a warning says how
    many. The column `model` says whose model it was.
    """
    import pandas as pd

    column, folders = whose_folders(folder)
    if column not in rows.columns:
        raise DataError(
            f"the table has no column {column!r}, which says whose model each row goes to; add it"
            f"{did_you_mean(column, rows.columns)}"
        )
    rows = rows.reset_index(drop=True)
    names = rows[column].astype(str).where(rows[column].notna(), "")
    # of numbers beside an empty field
    names = names.where(names.isin(list(folders)), names.str.removesuffix(".0"))
    places = names.map(folders).fillna(POOLED)
    if (pooled := names[places == POOLED]).size:
        warnings.warn(_pooled(pooled, column), stacklevel=3)
    parts = []
    for place, own in rows.groupby(places, sort=False):
        predictions = predict(folder / str(place), own.reset_index(drop=True)).set_axis(own.index)
        whose = (
            (ALL_USERS if POOLED in folders else POOLED) if place == POOLED else names[own.index]
        )
        parts.append(predictions.assign(**{SERVED_BY: whose}))
    return pd.concat(parts).sort_index()


def _pooled(names: "pd.Series[str]", column: str) -> str:
    """Say which rows go to the pooled model, by the names of their users."""
    strangers = names[names.str.strip() != ""]
    known = (
        [f"{len(strangers)} of users without a model ({few_of(strangers.unique())})"]
        if len(strangers)
        else []
    )
    empty = len(names) - len(strangers)
    known += [f"{empty} whose {column!r} is empty"] if empty else []
    return f"{len(names)} of the rows go to the pooled model: {', '.join(known)}"


def _checked_folders(folders: Any, path: Path, remedy: str) -> Mapping[str, str]:
    """Return whose model is in which folder; a name that leads elsewhere is refused."""
    if not isinstance(folders, dict) or any(
        not isinstance(place, str) or place in ("", ".", "..") or "/" in place or "\\" in place
        for place in folders.values()
    ):
        raise FileError(f"{path} does not say which folders are whose; {remedy}")
    return folders
