"""What each column of a table is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.arguments import instance, listed, optional
from coterie.data.reading import some
from coterie.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_NAMES = listed(instance(str, ""), "a list of columns", {str: 'write `["age"]`'})


@dataclass(frozen=True)
class Roles:
    """Whose a row is, what is predicted from what, and what is carried along."""

    user: str
    target: str
    features: tuple[str, ...]
    categorical: tuple[str, ...] = ()
    ids: str | None = None
    weights: str | None = None


def roles_in(
    frame: pd.DataFrame,
    *,
    user_column: str,
    target: str,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    ids: str | None = None,
    weights: str | None = None,
) -> Roles:
    """Return what the columns of a table are for; names that are not there, or have no effect, are refused.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame(columns=["ward", "patient", "age", "seen", "ill"])
        >>> roles_in(table, user_column="ward", target="ill", drop=["seen"], ids="patient").features
        ('age',)
    """
    wanted, dropped = optional(_NAMES)("features", features), _NAMES("drop", drop)
    categories = _NAMES("categorical", categorical)
    other = {"user_column": user_column, "target": target, "ids": ids, "weights": weights}
    taken = {column: role for role, column in other.items() if column is not None}
    for column in (*taken, *(wanted or ()), *dropped, *categories):
        if column not in frame.columns:
            raise DataError(f"the table has no column {column!r}; it has {some(frame.columns)}")
    if len(taken) < sum(column is not None for column in other.values()):
        twice = next(c for c in taken if sum(c == other_column for other_column in other.values()) > 1)
        roles = " and ".join(f"`{role}`" for role, column in other.items() if column == twice)
        raise DataError(f"{roles} name the same column, {twice!r}; name two")
    for option, columns in (("features", wanted or ()), ("drop", dropped), ("categorical", categories)):
        for column in columns:
            if column in taken:
                raise DataError(f"`{option}` names {column!r}, which is the `{taken[column]}`; leave it out there")
    if wanted is not None and (lost := [column for column in dropped if column not in wanted]):
        raise DataError(f"`drop` names {lost[0]!r}, which is not among `features`; it has no effect")
    if wanted is not None and (both := [column for column in dropped if column in wanted]):
        raise DataError(f"`features` and `drop` both name {both[0]!r}; leave it out of one")
    if ids is not None and (ids == "prediction" or ids.startswith("probability_")):
        raise DataError(f"`ids` names {ids!r}, which is the name of a column of the predictions; rename it")
    kept = tuple(c for c in (wanted or frame.columns) if c not in taken and c not in dropped)
    if not kept:
        raise DataError("no column is left to predict from; name some in `features`, or fewer in `drop`")
    if lost := [column for column in categories if column not in kept]:
        raise DataError(f"`categorical` names {lost[0]!r}, which is no feature; it has no effect")
    return Roles(user_column, target, kept, categories, ids, weights)
