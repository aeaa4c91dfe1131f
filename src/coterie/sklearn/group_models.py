"""The models of all groups, and the way of each row to its group's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from coterie.choosing import Mixture
from coterie.choosing.mixture import with_columns
from coterie.data import Preparation
from coterie.data.columns import check_names
from coterie.data.preparation import Kind
from coterie.data.table import users_from_table
from coterie.errors import DataError, KnobError, few_of
from coterie.evaluation.evaluate import evaluation_mode
from coterie.everyone.runs import Runs
from coterie.everyone.train import train_everyone
from coterie.reporting.whom import listened_to
from coterie.rules import Alone
from coterie.tables import models
from coterie.tables.models import loss_of
from coterie.training.run import Run
from coterie.training.train import train
from coterie.users.sampling import one_thread

Array: TypeAlias = np.ndarray[Any, Any]
Column: TypeAlias = str | int
"""A column of X: its name, or its position, from the end where it is negative."""


def table(frame: Any, checked: Array, fitted: Mapping[str, bool] | None = None) -> pd.DataFrame:
    """Return X as a table; the columns of an array are called by their positions.

    A column of an array of objects or texts holds numbers where each of its values is one; after
    `fit`, where it did so then, so that a category or a group called "2" is the same in any rows.

    Args:
        frame: X as it was given.
        checked: the same as an array.
        fitted: the columns that `fit` saw, and whether they were numbers; None in `fit`.

    Example:
        >>> rows = np.array([["Bern", 1.5], ["Basel", None]], dtype=object)
        >>> table(rows, rows).dtypes.astype(str).tolist()[1]
        'float64'
    """
    if isinstance(frame, pd.DataFrame):
        check_names(frame.columns)
        return frame.set_axis(list(fitted or map(str, frame.columns)), axis=1).reset_index(
            drop=True
        )
    names = list(fitted or map(str, range(checked.shape[1])))
    if checked.dtype.kind not in "OSU":
        return pd.DataFrame(checked, columns=names)
    columns = zip(names, checked.T, strict=True)
    numbers = fitted or dict.fromkeys(names, True)
    return pd.DataFrame(
        {name: _numbers_if_all_are(column) if numbers[name] else column for name, column in columns}
    )


def _numbers_if_all_are(values: Array) -> Array:
    try:
        return values.astype(float)
    except (
        ValueError
    ):  # there is text; of what is neither text nor number nothing can be made: a TypeError
        return values.astype(object)


def name_of(argument: str, column: Column, frame: Any, rows: pd.DataFrame) -> str:
    """Return what a column of X is called in the table.

    Example:
        >>> X = np.zeros((3, 2))
        >>> name_of("group", -1, X, table(X, X))
        '1'
    """
    if isinstance(column, str):
        if not isinstance(frame, pd.DataFrame):
            raise KnobError(
                f"`{argument}` is {column!r}, but the columns of X have no names; give a position,"
                ' or let the step before keep names: `set_output(transform="pandas")`'
            )
        if column not in rows.columns:
            raise DataError(
                f"`{argument}` is {column!r}, which X does not have; its columns are"
                f" {few_of(rows.columns)}"
            )
        return column
    try:
        return str(rows.columns[column])
    except (IndexError, TypeError):
        raise KnobError(
            f"`{argument}` must be the name or the position of one of {rows.shape[1]} columns of X,"
            f" got {column!r}"
        ) from None


def unused(name: str, rows: pd.DataFrame) -> str:
    """Return a name that no column has."""
    while name in rows.columns:
        name += "_"
    return name


def groups_in(values: "pd.Series[Any]") -> list[Any]:
    """Return the group of each row; where one is missing, nobody knows whose the row is.

    Example:
        >>> groups_in(pd.Series(["Bern", None], name="hospital"))
        Traceback (most recent call last):
        ...
        coterie.errors.DataError: column 'hospital' is empty in 1 of 2 rows, first row 1 (counting
        from 0); ...
    """
    if (missing := values.isna().to_numpy()).any():
        where = (
            f"{missing.sum()} of {len(values)} rows, first row {int(missing.argmax())} (counting"
            " from 0)"
        )
        raise DataError(
            f"column {values.name!r} is empty in {where}; say of which group each row is"
        )
    return list(values.tolist())


def named(groups: list[Any]) -> tuple[Array, list[str]]:
    """Return the different groups, in the order of the rows, and the name of each row's.

    Example:
        >>> named(["Bern", "Basel", "Bern"])
        (array(['Bern', 'Basel'], dtype='<U5'), ['Bern', 'Basel', 'Bern'])
    """
    different = list(dict.fromkeys(groups))
    names = [str(group) for group in different]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"two groups are both written {name!r}, one as text and one as a number; rename one"
            )
    mixed = len(set(map(type, different))) > 1
    return np.array(different, dtype=object if mixed else None), [str(group) for group in groups]


Module: TypeAlias = str | models.Factory
"""A model by its name, as on the command line, or a function of the numbers of inputs and outputs."""


@dataclass
class GroupModels:
    """What `fit` leaves.

    Args:
        module: what builds a model.
        preparation: how rows become inputs, the same for all groups.
        models: the model of each group, by name.
        pooled: the model of all rows alike, for rows of any other group.
        weights: who listens to whom: in a group's row the shares of the others.
        said: of each group the `verdict`, `whom` its model listens to, and the `leaderboard`.
    """

    module: Module
    preparation: Preparation
    models: Mapping[str, nn.Module]
    pooled: nn.Module
    weights: pd.DataFrame
    said: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def outputs(self, rows: pd.DataFrame, groups: Sequence[str | None]) -> Tensor:
        """Return for each row the outputs of its group's model, in double precision.

        None is no group.
        """
        inputs, names = self.preparation.inputs(rows), np.asarray(groups, dtype=object)
        outputs = torch.empty(len(rows), self.preparation.n_outputs, dtype=torch.double)
        for name in dict.fromkeys(groups):
            model = self.pooled if name is None else self.models.get(name, self.pooled)
            places = torch.from_numpy(names == name)
            with torch.no_grad(), evaluation_mode(model):
                outputs[places] = model(inputs[places]).double()
        return outputs

    def __getstate__(self) -> dict[str, Any]:
        """Return plain data and arrays.

        Pickle and skops get nothing of torch, and load no code of it.
        """
        return {
            "module": self.module,
            "preparation": self.preparation.to_plain(),
            "models": {name: self._plain(model) for name, model in self.models.items()},
            "pooled": self._plain(self.pooled),
            "weights": self.weights.to_dict(),
            "said": self.said,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Build the models anew, and give them their parameters."""
        self.module = state["module"]
        self.preparation = Preparation.from_plain(state["preparation"])
        self.models = {name: self._model(arrays) for name, arrays in state["models"].items()}
        self.pooled = self._model(state["pooled"])
        self.weights = pd.DataFrame(state["weights"])
        self.said = state.get("said", {})

    def _plain(self, model: nn.Module) -> dict[str, Any]:
        about = asdict(models.about_of(model, "", *self._sizes()))
        return {"about": about, "arrays": _arrays(model)}

    def _model(self, plain: Mapping[str, Any]) -> nn.Module:
        about = models.About(**{**plain["about"], "mixes": tuple(plain["about"]["mixes"])})
        made = about.made(about.model or self.module)
        made.load_state_dict(
            {name: torch.from_numpy(np.array(array)) for name, array in plain["arrays"].items()}
        )
        return made

    def _sizes(self) -> tuple[int, int]:
        return self.preparation.n_inputs, self.preparation.n_outputs


def built(module: Module, preparation: Preparation, seed: int) -> nn.Module:
    """Return a model with the initial parameters of a seed; nobody else's draws are changed."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.build(module, preparation.n_inputs, preparation.n_outputs)


def _said_of(run: Run) -> dict[str, Any]:
    """Return what a run says of itself, as plain data."""
    record = run.record
    board = record.end.account.get("leaderboard", {})
    return {
        "verdict": run.verdict.sentence,
        "whom": listened_to(record.configuration, record.end),
        "leaderboard": {name: float(one["loss"]) for name, one in board.items()},
    }


def _arrays(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


def fit_groups(
    rows: pd.DataFrame,
    *,
    group: str,
    target: str,
    kind: Kind,
    rule: Any,
    module: Module,
    me: str | None,
    categorical: Sequence[str],
    validation: float,
    seed: int,
    weights: str | None = None,
    **settings: Any,
) -> GroupModels:
    """Train a model for every group of a table, each with the others as its peers, and one for all rows alike.

    Args:
        rows: the table.
        group: the column with the name of each row's group.
        target: the column to predict.
        kind: "classification" or "regression".
        rule: how gradients become a direction; adaptive averaging when None.
        module: what builds a model.
        me: the group to train for; every group when None.
        categorical: columns of numbers to treat as categories.
        validation: the share of each group's rows held out to choose its best model.
        seed: what splits, initial parameters and batches depend on.
        weights: the column that says how much a row counts.
        settings: passed on to `train_everyone`: steps, lr, batch_size.
    """
    columns: dict[str, Any] = {
        "user_column": group,
        "target": target,
        "kind": kind,
        "categorical": categorical,
        "weights": weights,
    }
    table = users_from_table(
        rows, **columns, validation=validation, test=0.0, seed=seed, suspect=False
    )
    start, loss = built(module, table.preparation, seed), loss_of(table.preparation)
    rule = with_columns(rule, table.preparation.numeric)
    settings |= {"seed": seed, "measure": False, "progress": False}
    if len(table.users) == 1:
        alone = train(
            start,
            loss,
            table.users[0],
            (),
            rule if isinstance(rule, Mixture) or rule == "mixture" else Alone(),
            **settings,
        )
        runs = Runs({table.users[0].name: alone}, alone)
    else:
        rules = {user.name: rule if me in (None, user.name) else Alone() for user in table.users}
        runs = train_everyone(start, loss, table.users, rules, **settings)
    said = {name: _said_of(run) for name, run in runs.runs.items()}
    pooled = cast("Run", runs.pooled).model
    return GroupModels(module, table.preparation, runs.models, pooled, runs.weights, said)
