"""All users of a table, each with its own splits, prepared alike by sums and counts that all of them share."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coterie.arguments import SEED
from coterie.data.checking import CheckedTable, checked_table, reasons, warn_of_suspicious
from coterie.data.preparation import Kind, Preparation, classes_of
from coterie.data.statistics import Statistics
from coterie.data.table import SHARE, split_rows
from coterie.errors import DataError
from coterie.users.user import User

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TableUsers:
    """All users of a table, and the one `preparation` that turns everybody's rows into tensors."""

    users: tuple[User, ...]
    preparation: Preparation
    left_out: Mapping[str, str]  # who cannot learn from its rows, and why
    target: str  # the column to predict
    test_rows: Mapping[str, pd.DataFrame] = field(repr=False, compare=False)  # everybody's, with all columns

    @property
    def n_inputs(self) -> int:
        """The number of inputs that every user's model gets."""
        return self.preparation.n_inputs

    @property
    def n_outputs(self) -> int:
        """The number of outputs that every user's model needs."""
        return self.preparation.n_outputs


def users_from_table(
    data: pd.DataFrame | Path | str,
    *,
    user_column: str,
    target: str,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    ids: str | None = None,
    weights: str | None = None,
    kind: Kind | Literal["auto"] = "auto",
    leave_out: Sequence[object] = (),
    own_examples: int | None = None,
    validation: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
    sep: str = ",",
    decimal: str = ".",
    suspect: bool = True,
) -> TableUsers:
    """Return all users of a table, each with training, validation and test rows of its own.

    Everybody's rows are split as `from_table` splits user 0's, and all are prepared in one way, which is stated to
    all: by sums, sums of squares about the mean and counts of the users' training rows, which is all that they tell
    each other of them. Missing numbers become the mean of all. A user who has too few rows, or rows of one class,
    is left out with a warning.

    Args:
        data: a DataFrame, or the path of a CSV or Parquet file.
        user_column: the column with the name of each row's user.
        target: the column to predict.
        features: the columns to predict from; all others when None.
        drop: columns not to predict from.
        categorical: columns of numbers to treat as categories; text always is one.
        ids: as in `from_table`, and so are the next two.
        weights: a column that says how much a row counts.
        kind: what the target is.
        leave_out: users to ignore.
        own_examples: how many rows each user trains on, at most; all that are not held out when None.
        validation: the share of each user's rows held out to choose its best model.
        test: the share held out to report on; none where it is 0.
        seed: which rows those are.
        sep: what is between the columns of a CSV file, "tab" for a tab.
        decimal: the decimal mark of a CSV file.
        suspect: warn of columns that look like ids, dates or the target itself.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"ward": list("aab" * 20), "age": [31, 58, 40] * 20, "ill": [0, 1, 1, 0] * 15})
        >>> both = users_from_table(table, user_column="ward", target="ill")
        >>> both.users, both.n_inputs
        ((User('a', 24 examples), User('b', 12 examples)), 1)
    """
    import pandas as pd

    SEED("seed", seed)
    shares = SHARE("validation", validation), SHARE("test", test) if test else 0.0
    columns: dict[str, Any] = {"user_column": user_column, "target": target, "features": features, "drop": drop}
    columns |= {"categorical": categorical, "ids": ids, "weights": weights}
    table = checked_table(data, kind=kind, leave_out=leave_out, sep=sep, decimal=decimal, **columns)
    parts, left_out = _split(table, shares, own_examples, seed)
    if not parts:
        raise DataError(f"nobody can learn from this table; {reasons(left_out)}")
    for name, reason in left_out.items():
        warnings.warn(f"the user {name!r} is left out: {reason}", stacklevel=2)
    trainings = [training for training, *_ in parts.values()]
    prepare = replace(_prepared_alike(table, trainings), ids=ids, weights=weights)
    if suspect:
        warn_of_suspicious(table.every, pd.concat(trainings), target, prepare)
    users = tuple(user_of(name, some, target, prepare) for name, some in parts.items())
    tested_rows = {name: some[2] for name, some in parts.items()}
    return TableUsers(users, prepare, left_out, target, tested_rows)


def _split(
    table: CheckedTable, shares: tuple[float, float], own_examples: int | None, seed: int
) -> tuple[dict[str, list[pd.DataFrame]], dict[str, str]]:
    """Return everybody's training, validation and test rows, and who is left out, with why."""
    parts, left_out = {}, dict(table.left_out)
    how = table.roles.target, table.kind, shares, own_examples
    for name, own in table.rows.items():
        try:
            parts[name] = split_at_most(own, *how, seed=seed, name=name, weights=table.roles.weights)
        except DataError as error:
            left_out[name] = str(error)
    return parts, left_out


def _prepared_alike(table: CheckedTable, trainings: Sequence[pd.DataFrame]) -> Preparation:
    """Return the preparation that follows from what users tell of their training rows."""
    roles, kind = table.roles, table.kind
    told = [
        Statistics.of(rows[list(roles.features)], rows[roles.target], kind, roles.categorical) for rows in trainings
    ]
    classes = classes_of(table.targets) if kind == "classification" else ()
    return functools.reduce(operator.add, told).preparation(classes)


def split_at_most(
    own: pd.DataFrame,
    target: str,
    kind: Kind,
    shares: tuple[float, float],
    own_examples: int | None,
    *,
    seed: int,
    name: str,
    weights: str | None,
) -> list[pd.DataFrame]:
    """Return a user's training, validation and test rows; of the first at most so many."""
    how: dict[str, Any] = {"seed": seed, "whose": repr(name), "weights": weights}
    parts = split_rows(own, target, kind, shares, own_examples=None, **how)
    if own_examples is None or own_examples >= len(parts[0]):
        return parts
    return split_rows(own, target, kind, shares, own_examples=own_examples, **how)


def user_of(name: str, parts: Sequence[pd.DataFrame], target: str, preparation: Preparation) -> User:
    """Return a user with its training, validation and test rows; without test examples where there are no rows."""
    training, held_out = (preparation.examples(part, target) for part in parts[:2])
    tested = preparation.examples(parts[2], target) if len(parts[2]) else None
    return User(name, *training, validation=held_out, test=tested)
