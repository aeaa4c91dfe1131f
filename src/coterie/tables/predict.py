"""From the folder of a personal model to predictions for the rows of a table."""

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from coterie.data import Preparation
from coterie.errors import DataError, FileError, did_you_mean, few_of
from coterie.evaluation.evaluate import evaluation_mode
from coterie.everyone.folders import POOLED
from coterie.recording import files
from coterie.tables.models import check_finished, load_model

FILE = "everyone.json"
"""Says whose model is in which folder."""
SERVED_BY = "model"
"""The column of predictions that says whose model made them."""
ALL_USERS = "pooled (all users)"
"""What it says of the pooled model where a user is called "pooled"."""


def predict(
    folder: Path | str,
    rows: "pd.DataFrame",
    model: str | None = None,
    coverage: float | None = None,
) -> "pd.DataFrame":
    """Return the predictions of a folder's model for the rows of a table, in order, after their ids.

    With a `coverage` such as 0.9 they have the columns `lower` and `upper`, or in classification
    `set`, the classes joined by " | ": what holds the truth in that share of the rows; see
    `coterie.evaluation.conformal`.

    A run that was told of a column of ids (`ids`) carries it along where the rows have it. Values
    that the training rows did not have are told by warnings.

    In a folder of `coterie train --me all` each row goes to the model of its user, or to the pooled
    one. A folder may come from anybody, so the code of a model of one's own is named here, as
    `module.path:factory`, and never taken from the folder.
    """
    folder = Path(folder)
    if not len(rows):
        raise DataError("the table has no rows to predict for")
    apply = functools.partial(_applied, model=model, coverage=coverage)
    predictions = routed(folder, rows, apply) if is_everyone(folder) else apply(folder, rows)
    preparation = _preparation(folder)
    for warning in preparation.unfamiliar(rows):
        warnings.warn(warning, stacklevel=2)
    if preparation.ids not in (None, *rows.columns):
        warnings.warn(
            f"the table has no column {preparation.ids!r}, so predictions carry no ids",
            stacklevel=2,
        )
    return predictions


def harmless(table: "pd.DataFrame") -> "pd.DataFrame":
    """Return a table with an apostrophe before texts that a spreadsheet would run as a formula.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"=a": ["=1+1", "-3", "@x", "b"], "n": [-1, 2, 3, 4]})
        >>> harmless(table).to_csv(index=False).split()
        ["'=a,n", "'=1+1,-1", '-3,2', "'@x,3", 'b,4']
    """

    def quoted(value: object) -> object:
        if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
            return value
        try:
            float(value)  # a number is none
        except ValueError:
            return f"'{value}"
        return value

    return table.map(quoted).rename(columns=quoted)


def columns_of_names(folder: Path) -> list[str]:
    """Return the columns that name users and rows for a folder's model.

    They must be read as they are written.
    """
    users = [whose_folders(folder)[0]] if is_everyone(folder) else []
    ids = _preparation(folder).ids
    return users if ids is None else [*users, ids]


def _preparation(folder: Path) -> Preparation:
    """Return how rows become inputs.

    Where a folder has many models, all have the same preparation.
    """
    if is_everyone(folder):
        folder = folder / next(iter(whose_folders(folder)[1].values()))
    check_finished(folder)
    return Preparation.load(folder)


def _applied(
    folder: Path, rows: "pd.DataFrame", model: str | None, coverage: float | None
) -> "pd.DataFrame":
    """Return the predictions of one model for these rows, after their ids."""
    made, preparation = load_model(folder, model), Preparation.load(folder)
    with torch.no_grad(), evaluation_mode(made):
        predictions = preparation.predictions(made(preparation.inputs(rows)))
    if coverage is not None:
        from coterie.tables.calibration import load_calibration

        _with_sets(predictions, preparation, load_calibration(folder).threshold(coverage).score)
    if preparation.ids in rows.columns:
        predictions.insert(0, preparation.ids, rows[preparation.ids].to_numpy())
    return predictions


def _with_sets(predictions: "pd.DataFrame", preparation: Preparation, score: float) -> None:
    """Add the answers whose score is at most this: an interval, or a set of classes."""
    if preparation.kind == "regression":
        predictions.insert(1, "lower", predictions["prediction"] - score)
        predictions.insert(2, "upper", predictions["prediction"] + score)
        return
    names = [str(each) for each in preparation.classes]
    inside = 1 - predictions[[f"probability_{name}" for name in names]].to_numpy() <= score
    sets = [
        " | ".join(name for name, there in zip(names, row, strict=True) if there) for row in inside
    ]
    predictions.insert(1, "set", sets)


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
