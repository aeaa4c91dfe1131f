"""A table whose columns and rows are what they should be; users whose rows are not are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coterie.arguments import one_of
from coterie.data.columns import MAX_CLASSES, check_features, check_numbers, check_target, weights_in, with_numbers
from coterie.data.preparation import Kind
from coterie.data.reading import read_table, some
from coterie.data.roles import Roles, roles_in
from coterie.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CheckedTable:
    """A table whose columns are what they should be."""

    rows: Mapping[str, pd.DataFrame]  # of each user who is not left out, by name, in the table's order
    left_out: Mapping[str, str]  # whose rows cannot be used, and why
    roles: Roles
    targets: pd.Series[Any]  # everybody's
    kind: Kind

    @property
    def every(self) -> pd.DataFrame:
        """The rows of everybody who is not left out."""
        import pandas as pd

        return pd.concat(list(self.rows.values()))


def checked_table(
    data: pd.DataFrame | Path | str,
    *,
    kind: Kind | Literal["auto"] = "auto",
    me: str | None = None,
    leave_out: Sequence[object] = (),
    elsewhere: Sequence[Any] = (),
    sep: str = ",",
    decimal: str = ".",
    prepared: bool = False,
    **columns: Any,
) -> CheckedTable:
    """Read a table and check its columns; see `from_table`. `prepared`: the features were checked before.

    What is wrong with the rows of `me` is an error; others are left out for it.
    """
    import pandas as pd

    one_of("auto", "classification", "regression")("kind", kind)
    user = columns.get("user_column")
    names = [user] if isinstance(user, str) else []  # what else it may be is refused below
    frame = read_table(data, sep=sep, decimal=decimal, as_written=names)
    roles = roles_in(frame, **columns)
    rows = _by_user(frame, roles, me, [str(name) for name in leave_out], is_file=data is not frame)
    numeric = _has_numbers(rows if me is None else {me: rows[me]}, roles.target)
    usable, left_out = {}, {}
    for name, theirs in rows.items():
        try:
            _check_complete(theirs, roles.target, "drop the rows without a target")
            if roles.weights is not None:
                weights_in(theirs, roles.weights)
            if numeric and name != me:
                check_numbers(theirs[roles.target])
            if not prepared and me in (None, name):
                check_features(theirs, roles.features, roles.categorical)
        except DataError as error:
            if name == me:
                raise
            left_out[name] = str(error)
        else:
            usable[name] = theirs
    if not usable:
        raise DataError(f"nobody's rows can be used; {reasons(left_out)}")
    targets = pd.concat([each[roles.target] for each in usable.values()])
    if not prepared:
        check_target(targets, kind)
    targets = pd.concat([targets, pd.Series(elsewhere)]) if elsewhere else targets
    return CheckedTable(usable, left_out, roles, targets, _kind_of(targets) if kind == "auto" else kind)


def reasons(left_out: Mapping[str, str], most: int = 3) -> str:
    """Say of some users why they are left out, and how many others are.

    Example:
        >>> reasons({"a": "no target", "b": "no target"}, most=1)
        "'a': no target; and so on, for 1 more"
    """
    told = [f"{name!r}: {why}" for name, why in left_out.items()]
    return "; ".join(told[:most] + ([f"and so on, for {len(told) - most} more"] if len(told) > most else []))


def _by_user(
    frame: pd.DataFrame, roles: Roles, me: str | None, leave_out: Sequence[str], *, is_file: bool
) -> dict[str, pd.DataFrame]:
    """Return the rows of everybody who is not left out, in the table's order, typed by their own values."""
    _check_complete(frame, roles.user, "say whose each row is")
    names = frame[roles.user].astype(str)
    check_users(names, roles.user, me, leave_out)
    columns = [*roles.features, roles.target]
    by_user = {}
    for name, rows in frame[~names.isin(leave_out)].groupby(names, sort=False):
        # a text in another user's row makes the whole column of a file text
        by_user[str(name)] = with_numbers(rows, columns) if is_file else rows.infer_objects()
    return by_user


def _has_numbers(rows: Mapping[str, pd.DataFrame], target: str) -> bool:
    """Say whether most users' targets are numbers."""
    from pandas.api import types

    return sum(types.is_numeric_dtype(each[target]) for each in rows.values()) > len(rows) / 2


def check_users(there: Iterable[str], user_column: str, me: str | None, leave_out: Sequence[str]) -> None:
    """Refuse names that no row has, and a user 0 who is left out."""
    there = set(there)
    for option, name in (("me", me), *(("leave_out", name) for name in leave_out)):
        if name is not None and name not in there:
            users = some(sorted(there))
            raise DataError(f"`{option}` names no user: column {user_column!r} has {users}, got {name!r}")
    if me in leave_out:
        raise DataError(f"`leave_out` names {me!r}, who is user 0; name others")


def check_classes(targets: pd.Series[Any], kind: Kind) -> None:
    """Refuse a user's rows that are of one class only."""
    if kind == "classification" and targets.nunique() == 1:
        raise DataError(f"its rows are of one class only ({targets.tolist()[0]!r})")


def distinct_targets(targets: pd.Series[Any], kind: str) -> list[Any] | None:
    """Return the different targets where they are classes, and None where they are numbers."""
    kind = _kind_of(targets) if kind == "auto" else kind
    return sorted(targets.unique().tolist(), key=str) if kind == "classification" else None


def _check_complete(frame: pd.DataFrame, column: str, remedy: str) -> None:
    missing = frame[column].isna().to_numpy()
    if missing.any():
        first = frame.index[int(missing.argmax())]
        rows = f"{missing.sum()} of {len(frame)} rows, first row {first} (counting from 0)"
        raise DataError(f"column {column!r} is NaN or empty in {rows}; {remedy}")


def _kind_of(target: pd.Series[Any]) -> Kind:
    from pandas.api import types

    if types.is_bool_dtype(target) or not types.is_numeric_dtype(target):
        return "classification"
    values = np.unique(target.to_numpy(dtype=float))
    return "classification" if len(values) <= MAX_CLASSES and np.all(values == values.round()) else "regression"
