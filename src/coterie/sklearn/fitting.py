"""From the rows of a table to a model for every group, and one of all rows alike."""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd

from coterie.data.preparation import Kind
from coterie.data.table_of_all import users_from_table
from coterie.everyone.runs import Runs
from coterie.everyone.train import train_everyone
from coterie.rules import Alone
from coterie.sklearn.group_models import GroupModels, Module, built
from coterie.tables.models import loss_of
from coterie.training.run import Run
from coterie.training.train import train


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
        settings: passed on to `train_everyone`: steps, lr, batch_size.
    """
    columns: dict[str, Any] = {"user_column": group, "target": target, "kind": kind, "categorical": categorical}
    table = users_from_table(rows, **columns, validation=validation, test=0.0, seed=seed, suspect=False)
    start, loss = built(module, table.preparation, seed), loss_of(table.preparation)
    settings |= {"seed": seed, "measure": False, "progress": False}
    if len(table.users) == 1:
        alone = train(start, loss, table.users[0], (), Alone(), **settings)
        runs = Runs({table.users[0].name: alone}, alone)
    else:
        rules = {user.name: rule if me in (None, user.name) else Alone() for user in table.users}
        runs = train_everyone(start, loss, table.users, rules, **settings)
    return GroupModels(module, table.preparation, runs.models, cast("Run", runs.pooled).model, runs.weights)
