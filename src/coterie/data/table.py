"""Users from a table with a user column: user 0's rows are split, and all rows prepared by its statistics."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from coterie.arguments import COUNT, SEED, instance, listed, one_of, optional, real
from coterie.data.columns import MAX_CLASSES, check_features, check_target, with_numbers
from coterie.data.preparation import Kind, Preparation
from coterie.data.reading import read_table, some
from coterie.data.task import Task
from coterie.errors import DataError
from coterie.users.sampling import random_key
from coterie.users.user import User

if TYPE_CHECKING:
    import pandas as pd

_NAMES = listed(instance(str, ""), "a list of columns", {str: 'write `["age"]`'})


@dataclass(frozen=True)
class TableTask(Task):
    """A `Task` from a table, and the `preparation` that turns rows into tensors and outputs into predictions."""

    preparation: Preparation


def from_table(
    data: pd.DataFrame | Path | str,
    *,
    user_column: str,
    target: str,
    me: object,
    features: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    kind: Kind | Literal["auto"] = "auto",
    leave_out: Sequence[object] = (),
    own_examples: int | None = None,
    validation: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
    elsewhere: Sequence[Any] = (),
    preparation: Preparation | None = None,
) -> TableTask:
    """Return user 0 and its peers from a table with one row an example.

    User 0's rows are split into training, validation and test. Medians, means, spreads and categories are those of
    user 0's training rows only, since a user may see no others; a column without a value there is dropped. Only the
    list of classes comes from the whole table.

    Args:
        data: a DataFrame, or the path of a CSV or Parquet file.
        user_column: the column with the name of each row's user.
        target: the column to predict.
        me: which user is user 0.
        features: the columns to predict from; all others when None.
        categorical: columns of numbers to treat as categories; text always is one.
        kind: "classification" or "regression"; "auto" decides by the target: text, booleans and up to 20 distinct
            whole numbers are classes.
        leave_out: users to ignore.
        own_examples: how many rows user 0 trains on, at most; all that are not held out when None.
        validation: the share of user 0's rows held out to choose the best model.
        test: the share held out to report on.
        seed: which rows those are.
        elsewhere: different targets of users whose rows are not in this table, for the list of classes.
        preparation: one fitted before, which others hold too; fitted to user 0's training rows when None.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"ward": list("aab" * 20), "age": range(60), "ill": [0, 1, 1, 0] * 15})
        >>> task = from_table(table, user_column="ward", target="ill", me="a")
        >>> task.me, task.peers, task.preparation.kind
        (User('a', 24 examples), (User('b', 20 examples),), 'classification')
    """
    SEED("seed", seed)
    columns: dict[str, Any] = {"user_column": user_column, "target": target, "features": features}
    columns |= {"categorical": categorical, "kind": kind, "elsewhere": elsewhere}
    table = checked_table(data, **columns, me=str(me), leave_out=leave_out, prepared=preparation is not None)
    own = table.rows[str(me)]
    parts = split_rows(own, target, table.kind, (validation, test), own_examples=own_examples, seed=seed)
    prepare = preparation or Preparation.fit(
        parts[0][table.columns], parts[0][target], table.targets, table.kind, table.categorical
    )

    def examples(rows: pd.DataFrame) -> tuple[Tensor, Tensor]:
        return prepare.inputs(rows), prepare.targets(rows[target])

    training, held_out, tested = (examples(part) for part in parts)
    mine = User(str(me), *training, validation=held_out, test=tested)
    peers = []
    for name, rows in table.rows.items():
        if name == str(me):
            continue
        try:
            _check_classes(rows[target], table.kind)
            peers.append(User(name, *examples(rows)))
        except DataError as error:
            warnings.warn(f"the peer {name!r} is left out: {error}", stacklevel=2)
    return TableTask(mine, tuple(peers), prepare.n_inputs, prepare.n_outputs, prepare)


@dataclass(frozen=True)
class CheckedTable:
    """A table whose columns are what they should be."""

    rows: dict[str, pd.DataFrame]  # of each user who is not left out, by name, in the table's order
    columns: list[str]  # to predict from
    categorical: Sequence[str]  # columns of numbers to treat as categories
    targets: pd.Series[Any]  # everybody's
    kind: Kind


def checked_table(
    data: pd.DataFrame | Path | str,
    *,
    user_column: str,
    target: str,
    features: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    kind: Kind | Literal["auto"] = "auto",
    me: str | None = None,
    leave_out: Sequence[object] = (),
    elsewhere: Sequence[Any] = (),
    prepared: bool = False,
) -> CheckedTable:
    """Read a table and check its columns; see `from_table`. `prepared`: the columns were checked before."""
    import pandas as pd

    one_of("auto", "classification", "regression")("kind", kind)
    frame = read_table(data)
    features, categorical = optional(_NAMES)("features", features), _NAMES("categorical", categorical)
    for column in (user_column, target, *(features or ()), *categorical):
        if column not in frame.columns:
            raise DataError(f"the table has no column {column!r}; it has {some(frame.columns)}")
    _check_complete(frame, user_column, target)
    names, left_out = frame[user_column].astype(str), [str(name) for name in leave_out]
    check_users(names, user_column, me, left_out)
    frame = frame[~names.isin(left_out)]
    columns = [c for c in (features or frame.columns) if c not in (user_column, target)]
    if not prepared:
        if not isinstance(data, pd.DataFrame):
            frame = with_numbers(frame, [*columns, target])
        check_features(frame, columns, categorical)
        check_target(frame[target], kind)
    targets = pd.concat([frame[target], pd.Series(elsewhere)]) if elsewhere else frame[target]
    rows = {str(name): some for name, some in frame.groupby(frame[user_column].astype(str), sort=False)}
    return CheckedTable(rows, columns, categorical, targets, _kind_of(targets) if kind == "auto" else kind)


def check_users(there: Iterable[str], user_column: str, me: str | None, leave_out: Sequence[str]) -> None:
    """Refuse names that no row has, and a user 0 who is left out."""
    there = set(there)
    for option, name in (("me", me), *(("leave_out", name) for name in leave_out)):
        if name is not None and name not in there:
            users = some(sorted(there))
            raise DataError(f"`{option}` names no user: column {user_column!r} has {users}, got {name!r}")
    if me in leave_out:
        raise DataError(f"`leave_out` names {me!r}, who is user 0; name others")


def _check_classes(targets: pd.Series[Any], kind: Kind) -> None:
    if kind == "classification" and targets.nunique() == 1:
        raise DataError(f"its rows are of one class only ({targets.tolist()[0]!r})")


def distinct_targets(targets: pd.Series[Any], kind: str) -> list[Any] | None:
    """Return the different targets where they are classes, and None where they are numbers."""
    kind = _kind_of(targets) if kind == "auto" else kind
    return sorted(targets.unique().tolist(), key=str) if kind == "classification" else None


def _check_complete(frame: pd.DataFrame, user_column: str, target: str) -> None:
    for column, remedy in ((user_column, "say whose each row is"), (target, "drop the rows without a target")):
        missing = frame[column].isna().to_numpy()
        if missing.any():
            rows = f"{missing.sum()} of {len(frame)} rows, first row {int(missing.argmax())} (counting from 0)"
            raise DataError(f"column {column!r} is NaN or empty in {rows}; {remedy}")


def _kind_of(target: pd.Series[Any]) -> Kind:
    from pandas.api import types

    if types.is_bool_dtype(target) or not types.is_numeric_dtype(target):
        return "classification"
    values = np.unique(target.to_numpy(dtype=float))
    return "classification" if len(values) <= MAX_CLASSES and np.all(values == values.round()) else "regression"


def split_rows(
    own: pd.DataFrame,
    target: str,
    kind: Kind,
    shares: tuple[float, float],
    *,
    own_examples: int | None,
    seed: int,
    whose: str = "user 0",
) -> list[pd.DataFrame]:
    """Return a user's training, validation and test rows, stratified by class where possible."""
    from sklearn.model_selection import train_test_split

    between = replace(real("lie between 0 and 1", lambda share: 0 < share < 1), error=DataError)
    shares = between("validation", shares[0]), between("test", shares[1])
    own_examples = optional(COUNT)("own_examples", own_examples)
    sizes = [max(1, round(share * len(own))) for share in shares]
    left = len(own) - sum(sizes)
    wanted = left if own_examples is None else own_examples
    if not 2 <= wanted <= left:
        raise DataError(
            f"{whose} has {len(own)} rows, of which {sum(sizes)} are held out; {wanted} cannot be for training: "
            f"ask for 2 to {max(2, left)}, or hold out less"
        )

    state = seed if 0 <= seed < 2**32 else random_key(seed, "split") % 2**32  # as scikit-learn takes it

    def cut(rows: pd.DataFrame, n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        classes = rows[target] if kind == "classification" else None
        counts = None if classes is None else classes.value_counts()
        even = counts is not None and counts.min() >= 2 and len(counts) <= min(n, len(rows) - n)
        a, b = train_test_split(rows, train_size=n, stratify=classes if even else None, random_state=state)
        return a, b

    tested, rest = cut(own, sizes[1])
    held_out, rest = cut(rest, sizes[0])
    training = rest if wanted == len(rest) else cut(rest, wanted)[0]
    if kind == "classification" and training[target].nunique() < 2:
        raise DataError(
            f"{whose}'s training rows have one class only ({training[target].iloc[0]!r}); "
            "take more of its rows, or another user"
        )
    return [training, held_out, tested]
