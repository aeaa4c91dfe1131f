"""A table whose columns and rows are what they should be; users whose rows are not are left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from coterie.arguments import instance, listed, one_of, optional
from coterie.data.columns import (
    AS_DATES,
    MAX_CLASSES,
    check_features,
    check_numbers,
    check_target,
    parts_of_dates,
    weights_in,
    with_dates,
    with_numbers,
)
from coterie.data.preparation import Kind, Preparation
from coterie.data.reading import FileForm, no_column, read_table
from coterie.errors import DataError, did_you_mean, few_of

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
    dates: tuple[str, ...] = ()  # whose parts are among the features

    @property
    def carried(self) -> dict[str, Any]:
        """What a preparation is told of them."""
        return {"ids": self.ids, "weights": self.weights, "dates": self.dates}


def roles_in(
    frame: pd.DataFrame,
    *,
    user_column: str,
    target: str,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    dates: Sequence[str] = (),
    ids: str | None = None,
    weights: str | None = None,
) -> Roles:
    """Return what the columns of a table are for.

    Names that are not there, or have no effect, are refused.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame(columns=["ward", "patient", "age", "seen", "ill"])
        >>> roles_in(table, user_column="ward", target="ill", drop=["seen"], ids="patient").features
        ('age',)
    """
    wanted, dropped = optional(_NAMES)("features", features), _NAMES("drop", drop)
    categories, with_parts = _NAMES("categorical", categorical), _NAMES("dates", dates)
    other = {"user_column": user_column, "target": target, "ids": ids, "weights": weights}
    taken = {column: role for role, column in other.items() if column is not None}
    for column in (*taken, *(wanted or ()), *dropped, *categories, *with_parts):
        if column not in frame.columns:
            raise no_column(column, frame.columns)
    if len(taken) < sum(column is not None for column in other.values()):
        twice = next(
            c for c in taken if sum(c == other_column for other_column in other.values()) > 1
        )
        roles = " and ".join(f"`{role}`" for role, column in other.items() if column == twice)
        raise DataError(f"{roles} name the same column, {twice!r}; name two")
    for option, columns in (
        ("features", wanted or ()),
        ("drop", dropped),
        ("categorical", categories),
        ("dates", with_parts),
    ):
        for column in columns:
            if column in taken:
                raise DataError(
                    f"`{option}` names {column!r}, which is the `{taken[column]}`; leave it out"
                    " there"
                )
    if wanted is not None and (lost := [column for column in dropped if column not in wanted]):
        raise DataError(
            f"`drop` names {lost[0]!r}, which is not among `features`; it has no effect"
        )
    if wanted is not None and (both := [column for column in dropped if column in wanted]):
        raise DataError(f"`features` and `drop` both name {both[0]!r}; leave it out of one")
    if ids is not None and (ids == "prediction" or ids.startswith("probability_")):
        raise DataError(
            f"`ids` names {ids!r}, which is the name of a column of the predictions; rename it"
        )
    kept = tuple(c for c in wanted or frame.columns if c not in taken and c not in dropped)
    if not kept:
        raise DataError(
            "no column is left to predict from; name some in `features`, or fewer in `drop`"
        )
    others = tuple(column for column in kept if column not in with_parts)
    for option, columns, there in (
        ("categorical", categories, others),
        ("dates", with_parts, kept),
    ):
        if lost := [column for column in columns if column not in there]:
            raise DataError(f"`{option}` names {lost[0]!r}, which is no feature; it has no effect")
    kept = others + parts_of_dates(with_parts)
    return Roles(user_column, target, kept, categories, ids, weights, with_parts)


@dataclass(frozen=True)
class CheckedTable:
    """A table whose columns are what they should be."""

    # of each user who is not left out, by name, in the table's order
    rows: Mapping[str, pd.DataFrame]
    left_out: Mapping[str, str]  # whose rows cannot be used, and why
    roles: Roles
    targets: pd.Series[Any]  # everybody's
    kind: Kind

    @property
    def every(self) -> pd.DataFrame:
        """The rows of everybody who is not left out."""
        return pd.concat(list(self.rows.values()))


def checked_table(
    data: pd.DataFrame | Path | str,
    *,
    form: FileForm | None = None,
    kind: Kind | Literal["auto"] = "auto",
    me: str | None = None,
    leave_out: Sequence[object] = (),
    elsewhere: Sequence[Any] = (),
    prepared: bool = False,
    **columns: Any,
) -> CheckedTable:
    """Read a table and check its columns.

    See `from_table`. `form`: how the file is written. `prepared`: the features were checked before.

    What is wrong with the rows of `me` is an error; others are left out for it.
    """
    one_of("auto", "classification", "regression")("kind", kind)
    user = columns.get("user_column")
    # what else it may be is refused below
    of_user: dict[str, Any] = {"user_column": user} if isinstance(user, str) else {}
    frame = read_table(data, **of_user, **(form.form if form else {}))
    roles = roles_in(frame, **columns)
    rows = _by_user(frame, roles, me, [str(name) for name in leave_out], is_file=data is not frame)
    numeric = _has_numbers(rows if me is None else {me: rows[me]}, roles.target)
    usable, left_out = {}, {}
    for name, own_rows in rows.items():
        try:
            own_rows = with_dates(own_rows, roles.dates)  # noqa: PLW2901  # with more columns
            _check_complete(own_rows, roles.target, "drop the rows without a target")
            if roles.weights is not None:
                # one of weight 0 is not there
                own_rows = own_rows[weights_in(own_rows, roles.weights) > 0]  # noqa: PLW2901
            if numeric and name != me:
                check_numbers(own_rows[roles.target])
            if not prepared and me in (None, name):
                check_features(own_rows, roles.features, roles.categorical)
        except DataError as error:
            if name == me:
                raise
            left_out[name] = str(error)
        else:
            usable[name] = own_rows
    if not usable:
        raise DataError(f"nobody's rows can be used; {reasons(left_out)}")
    targets = pd.concat([each[roles.target] for each in usable.values()])
    if not prepared:
        check_target(targets, kind)
    targets = pd.concat([targets, pd.Series(elsewhere)]) if elsewhere else targets
    return CheckedTable(
        usable, left_out, roles, targets, _kind_of(targets) if kind == "auto" else kind
    )


def reasons(left_out: Mapping[str, str], most: int = 3) -> str:
    """Say of some users why they are left out, and how many others are.

    Example:
        >>> reasons({"a": "no target", "b": "no target"}, most=1)
        "'a': no target; and so on, for 1 more"
    """
    reported = [f"{name!r}: {why}" for name, why in left_out.items()]
    return "; ".join(
        reported[:most]
        + ([f"and so on, for {len(reported) - most} more"] if len(reported) > most else [])
    )


def _by_user(
    frame: pd.DataFrame, roles: Roles, me: str | None, leave_out: Sequence[str], *, is_file: bool
) -> dict[str, pd.DataFrame]:
    """Return the rows of everybody who is not left out, in the table's order, typed by their own values."""
    _check_complete(frame, roles.user, "say whose each row is")
    names = frame[roles.user].astype(str)
    check_users(names, roles.user, me, leave_out)
    columns = [each for each in (*roles.features, roles.target) if each in frame.columns]
    by_user = {}
    for name, rows in frame[~names.isin(leave_out)].groupby(names, sort=False):
        # a text in another user's row makes the whole column of a file text
        by_user[str(name)] = with_numbers(rows, columns) if is_file else rows.infer_objects()
    return by_user


def _has_numbers(rows: Mapping[str, pd.DataFrame], target: str) -> bool:
    """Say whether most users' targets are numbers."""
    return sum(types.is_numeric_dtype(each[target]) for each in rows.values()) > len(rows) / 2


def check_users(
    there: Iterable[str], user_column: str, me: str | None, leave_out: Sequence[str]
) -> None:
    """Refuse names that no row has, and a user 0 who is left out."""
    there = set(there)
    for option, name in (("me", me), *(("leave_out", name) for name in leave_out)):
        if name is not None and name not in there:
            users, hint = few_of(sorted(there)), did_you_mean(name, there)
            raise DataError(
                f"`{option}` names no user: column {user_column!r} has {users}, got {name!r}{hint}"
            )
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

    if types.is_bool_dtype(target) or not types.is_numeric_dtype(target):
        return "classification"
    values = np.unique(target.to_numpy(dtype=float))
    if len(values) <= MAX_CLASSES and np.all(values == values.round()):
        return "classification"
    return "regression"


LEAST_COPIES, MORE = 3, 5
"""From so many common rows on, and so many times as many pairs as by chance, they are copies."""
LEAST_ROWS = 20
"""With fewer rows values may all differ, or tell the target, by chance."""
CROWDED = 5
"""Whole numbers that all differ look like ids where so many times as many would fill their range."""
NEARLY_ALL = 0.98
"""The share of the rows whose target a column must tell by itself to look like the target."""
MOST_ROWS = 2000
"""On so many rows at most a column is tried as the only feature."""


def warn_of_suspicious(
    frame: pd.DataFrame, training: pd.DataFrame, target: str, preparation: Preparation
) -> None:
    """Warn of features that look like ids or dates, or like the target.

    The last is tried on user 0's training rows, and on all rows: where nearly all of user 0's are
    of one class a column that tells it stands out elsewhere only.
    """
    features = [*preparation.numeric, *preparation.categorical]
    for column in features:
        looks = looks_like_an_id(frame[column]) or looks_like_a_date(frame[column])
        if looks:
            remedy = f"if it is, leave it out: {_dropping(column)}, or " + (
                f"carry it along: `ids={column!r}` (`--id {quote(column)}`)"
                if "id" in looks.split()
                else f"predict from its parts: {AS_DATES.format(column, quote(column))}"
            )
            warnings.warn(f"column {column!r} looks like {looks}; {remedy}", stacklevel=3)
    own = dict(leaking(training, target, preparation))
    for column, share in (dict(leaking(frame, target, preparation)) | own).items():
        where = "the training" if column in own else "the table's"
        warnings.warn(
            f"column {column!r} alone tells {target!r} in {share:.0%} of {where} rows; if it"
            f" is known afterwards only, leave it out: {_dropping(column)}",
            stacklevel=3,
        )


def copies_among(rows: pd.DataFrame, own: pd.DataFrame) -> NDArray[np.bool_]:
    """Say which of a user's rows are another's too, by their features; none where that may be chance.

    How often rows are alike by chance is told by those of one user: with features of few values
    many are. Pairs that both have count where there are more than `MORE` times as many.

    Example:
        >>> import pandas as pd
        >>> own = pd.DataFrame({"age": np.arange(40.0)})
        >>> copies_among(pd.DataFrame({"age": np.arange(30.0, 70.0)}), own).sum()
        np.int64(10)
        >>> copies_among(own.round(-1), own.round(-1)).sum()
        np.int64(0)
    """
    both = [pd.util.hash_pandas_object(each, index=False) for each in (rows, own)]
    counts = [hashes.value_counts() for hashes in both]
    pairs = float(counts[0].mul(counts[1], fill_value=0).sum())
    alike = sum(float((each * (each - 1)).sum()) / 2 for each in counts)
    possible = sum(len(hashes) * (len(hashes) - 1) / 2 for hashes in both)
    by_chance = len(rows) * len(own) * (alike + 1) / max(possible, 1.0)
    there = both[0].isin(both[1]).to_numpy()
    return there if there.sum() >= LEAST_COPIES and pairs > MORE * by_chance else there & False


def without_copies(
    rows: pd.DataFrame, own: pd.DataFrame, target: str, preparation: Preparation
) -> tuple[pd.DataFrame, str]:
    """Return a peer's rows without those that are user 0's, and what is said of these, "" of none."""
    copies = copies_among(preparation.tidied(rows), preparation.tidied(own))
    if not copies.any():
        return rows, ""
    with_target = copies_among(
        *(preparation.tidied(each).assign(t=each[target].astype(str)) for each in (rows, own))
    )
    said = f"{copies.sum()} of its {len(rows)} rows are user 0's"
    same = int(with_target.sum())
    return rows[~copies], said + ("" if same == copies.sum() else f", {same} with the same target")


def warn_of_common_rows(rows: Mapping[str, pd.DataFrame], preparation: Preparation) -> None:
    """Warn of users who have rows in common: each is trained with what the other is tested on."""
    tidied: dict[Any, Any] = {name: preparation.tidied(each) for name, each in rows.items()}
    hashes = pd.concat(
        pd.DataFrame({"user": name, "row": pd.util.hash_pandas_object(each, index=False)})
        for name, each in tidied.items()
    ).drop_duplicates()
    pairs = hashes.merge(hashes, on="row").query("user_x < user_y")
    for (one, other), common in pairs.groupby(["user_x", "user_y"]):
        if len(common) >= LEAST_COPIES and copies_among(tidied[one], tidied[other]).any():
            warnings.warn(
                f"the users {one!r} and {other!r} have {len(common)} rows in common, so that one is"
                " tested on rows that the other trains with: what is said of both is too good;"
                f" leave one out: `leave_out=[{other!r}]` (`--leave-out {quote(str(other))}`)",
                stacklevel=3,
            )


def _dropping(column: str) -> str:
    return f"`drop=[{column!r}]` (`--drop {quote(column)}`)"


def looks_like_an_id(values: pd.Series[Any]) -> str:
    """Say that a column looks like an id, "" where it does not.

    No value twice, in text or in crowded numbers.

    Example:
        >>> import pandas as pd
        >>> looks_like_an_id(pd.Series(range(1000, 1100)))
        'an id (100 different values in 100 rows)'
        >>> looks_like_an_id(pd.Series(range(100)) / 7)
        ''
    """
    there = values.dropna()
    count, different = len(there), there.nunique()
    if count < LEAST_ROWS or types.is_bool_dtype(there):
        return ""
    if types.is_numeric_dtype(there):
        crowded = (
            bool((there % 1 == 0).all()) and float(there.max() - there.min()) < CROWDED * count
        )
        suspicious = different == count and crowded
    else:
        suspicious = different > count / 2
    return f"an id ({different} different values in {count} rows)" if suspicious else ""


def looks_like_a_date(values: pd.Series[Any]) -> str:
    """Say that a column of numbers looks like dates, as 20240131 or as seconds since 1970.

    "" where it does not.

    Example:
        >>> import pandas as pd
        >>> looks_like_a_date(pd.Series([20240131, 20231224, 20231101]))
        'dates (20240131)'
    """
    there = values.dropna()
    if (
        not len(there)
        or not types.is_numeric_dtype(there)
        or types.is_bool_dtype(there)
        or (there % 1 != 0).any()
    ):
        return ""
    days = there.between(19000101, 21001231)
    as_days = (
        days.all()
        and pd.to_datetime(there.astype("int64").astype(str), errors="coerce").notna().all()
    )
    seconds = there.between(5e8, 4e9).all() or there.between(5e11, 4e12).all()  # or milliseconds
    return f"dates ({there.iloc[0]:.0f})" if as_days or (seconds and there.nunique() > 1) else ""


def leaking(
    rows: pd.DataFrame, target: str, preparation: Preparation
) -> Iterator[tuple[str, float]]:
    """Yield the columns that tell the target by themselves, with the share of the rows in which they do.

    A small tree sees one column of the other rows, in five folds. Of numbers the share is that of
    their variance.
    """
    from sklearn.model_selection import cross_val_predict
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = rows.sample(min(len(rows), MOST_ROWS), random_state=0)
    truth = preparation.targets(rows[target]).numpy().ravel()
    classes = preparation.kind == "classification"
    counts = np.unique(truth, return_counts=True)[1]
    if len(rows) < LEAST_ROWS or len(counts) < 2 or (classes and counts.min() < 5):
        return
    tree = (DecisionTreeClassifier if classes else DecisionTreeRegressor)(
        min_samples_leaf=2, random_state=0
    )
    base = counts.max() / len(truth) if classes else 0.0
    for column in (*preparation.numeric, *preparation.categorical):
        codes = rows[[column]]
        if column in preparation.categorical:
            codes = codes.astype(str).apply(lambda values: values.astype("category").cat.codes)
        predicted = cross_val_predict(tree, codes.to_numpy(dtype=float), truth, cv=5)
        share = (
            np.mean(predicted == truth)
            if classes
            else 1 - np.mean((predicted - truth) ** 2) / np.var(truth)
        )
        if share >= NEARLY_ALL and 1 - share < (1 - base) / 4:
            yield column, float(share)
