"""Users from a table with a user column.

User 0's rows are split, and all rows prepared by its statistics.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote
from typing import Annotated, Any, Literal

import pandas as pd

from coterie.arguments import COUNT, SEED, optional, real, takes_fields_of
from coterie.data.checking import (
    CheckedTable,
    check_classes,
    checked_table,
    reasons,
    warn_of_common_rows,
    warn_of_suspicious,
    without_copies,
)
from coterie.data.preparation import Kind, Preparation, classes_of
from coterie.data.reading import FileForm
from coterie.data.statistics import Statistics
from coterie.errors import DataError
from coterie.users.sampling import random_key
from coterie.users.user import User


@dataclass(frozen=True)
class Task:
    """User 0, with examples held out for validation and test, and its peers.

    Args:
        me: user 0.
        peers: the others.
        n_inputs: the number of features of an example.
        n_outputs: the number of classes, or 1 for regression.
    """

    me: User
    peers: tuple[User, ...]
    n_inputs: int
    n_outputs: int


PART = replace(real("be above 0 and below 1", lambda share: 0 <= share < 1), error=DataError)
"""A share of a user's rows."""


@dataclass(frozen=True)
class TableTask(Task):
    """A `Task` from a table, with how rows become tensors, and the rows that user 0 is tested on.

    Args:
        preparation: turns rows into tensors and outputs into predictions.
        target: the column to predict.
        test_rows: user 0's test rows, with all columns.
        left_out: peers whose rows cannot be used, and why.
    """

    preparation: Preparation
    target: str
    test_rows: pd.DataFrame = field(repr=False, compare=False)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(FileForm):
    """What the columns of a table of one user are for.

    Args:
        data: A CSV or Parquet file or, in Python, a DataFrame; {user} in its name for a file
            each.
        target: The column to predict.
        drop: Columns not to predict from, such as what is known afterwards only.
        categorical: Columns of numbers to treat as categories; text always is one.
        dates: Columns of dates, which become four: year, month, weekday, and days since 1970.
        ids: The column that tells rows apart: not predicted from, and written beside every
            prediction.
        kind: What the target is; auto tells by its values: text, booleans and up to 20
            different whole numbers are classes.
        own_examples: Train on at most so many rows of a user's own; all if left out.
    """

    data: Any = field(kw_only=False)
    target: str
    drop: Sequence[str] = ()
    categorical: Sequence[str] = ()
    dates: Sequence[str] = ()
    ids: str | None = None
    kind: Kind | Literal["auto"] = "auto"
    own_examples: Annotated[int | None, optional(COUNT)] = None


@dataclass(frozen=True, kw_only=True)
class TableSettings(ColumnSettings):
    """What users are made of: a table, and what its columns are for.

    Args:
        user_column: The column that says whose row it is.
        features: Columns to predict from; all others if left out.
        weights: The column that says how much a row counts in the loss, of training, validation
            and test.
        class_weight: balanced: all classes count alike in the loss, however rare; the
            probabilities are then those of classes that are equally frequent.
        leave_out: Users to take no notice of.
        validation: Share of the own rows held out to choose the best model; 0, or None, for
            none.
        test: Share held out for the final report.
    """

    user_column: str
    features: Sequence[str] | None = None
    weights: str | None = None
    class_weight: Literal["balanced"] | None = None
    leave_out: Sequence[object] = ()
    validation: Annotated[float | None, optional(PART)] = 0.2
    test: Annotated[float, PART] = 0.2

    @property
    def shares(self) -> tuple[float, float]:
        """Which shares of a user's rows are held out, for validation and for test."""
        return self.validation or 0.0, self.test

    @property
    def columns(self) -> dict[str, Any]:
        """What the columns are for, as `roles_in` takes it."""
        names = ("user_column", "target", "features", "drop", "categorical", "dates")
        return {name: getattr(self, name) for name in (*names, "ids", "weights")}

    def checked(self, **about: Any) -> CheckedTable:
        """Return the table, whose columns are checked."""
        return checked_table(
            self.data, form=self, kind=self.kind, leave_out=self.leave_out, **about, **self.columns
        )


@dataclass(frozen=True, kw_only=True)
class OneUserSettings(TableSettings):
    """What user 0 and its peers are made of.

    Args:
        me: Which user is user 0.
        elsewhere: Different targets of users who are not in the table, for the list of classes.
        preparation: One fitted before, which others hold too; fitted to user 0's training rows
            if left out.
        seed: Which rows are held out.
    """

    me: object
    elsewhere: Sequence[Any] = ()
    preparation: Preparation | None = None
    seed: Annotated[int, SEED] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.test:
            raise DataError(f"`test` must {PART.words}, got {self.test}")


@takes_fields_of(OneUserSettings)
def from_table(settings: OneUserSettings) -> TableTask:
    """Return user 0 and its peers from a table with one row an example.

    User 0's rows are split into training, validation and test. Medians, means, spreads and
    categories are those of user 0's training rows only, since a user may see no others; a column
    without a value there is dropped. Only the list of classes comes from the whole table. A peer
    whose rows cannot be used is left out with a warning, and so are a peer's copies of user 0's
    rows; others warn of columns that look like ids, dates or the target itself.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"ward": list("aab" * 20), "age": [31, 58, 40] * 20, "ill": [0, 1, 1, 0] * 15})
        >>> task = from_table(table, user_column="ward", target="ill", me="a")
        >>> task.me, task.peers, task.preparation.kind
        (User('a', 24 examples), (User('b', 20 examples),), 'classification')
    """
    me, target, preparation = str(settings.me), settings.target, settings.preparation
    table = settings.checked(me=me, elsewhere=settings.elsewhere, prepared=preparation is not None)
    own = table.rows[me]
    parts = split_rows(
        own,
        target,
        table.kind,
        settings.shares,
        own_examples=settings.own_examples,
        seed=settings.seed,
    )
    if preparation is None:
        features_of, targets = parts[0][list(table.roles.features)], parts[0][target]
        preparation = Preparation.fit(
            features_of, targets, table.targets, table.kind, table.roles.categorical
        )
        preparation = replace(preparation, **table.roles.carried)
        if settings.class_weight:
            preparation = preparation.balanced(targets)
    mine = user_of(me, parts, target, preparation)
    peers, left_out, copies = _peers(table, own, preparation)
    if settings.preparation is None:
        there = pd.concat([own, *(table.rows[peer.name] for peer in peers)])
        warn_of_suspicious(there, parts[0], target, preparation)
    for name, why in left_out.items():
        warnings.warn(f"the peer {name!r} is left out: {why}", stacklevel=2)
    for name, said in copies.items():
        warnings.warn(
            f"of the peer {name!r}, {said}: these are left out; if it is a copy, leave out the peer"
            f" (`--leave-out {quote(name)}`)",
            stacklevel=2,
        )
    sizes = preparation.n_inputs, preparation.n_outputs
    reported = left_out | {name: f"in part: {said}" for name, said in copies.items()}
    return TableTask(mine, peers, *sizes, preparation, target, parts[2], reported)


def _peers(
    table: CheckedTable, own: pd.DataFrame, preparation: Preparation
) -> tuple[tuple[User, ...], dict[str, str], dict[str, str]]:
    """Return everybody else with all rows that are no copies of user 0's.

    And who is left out because its rows cannot be used, and what is said of copies.
    """
    target, peers, left_out = table.roles.target, [], dict(table.left_out)
    copies: dict[str, str] = {}
    for name, every in table.rows.items():
        if every is own:
            continue
        try:
            rows, said = without_copies(every, own, target, preparation)
            if rows.empty:
                raise DataError(said)  # noqa: TRY301  # which is why it is left out
            check_classes(rows[target], table.kind)
            peers.append(User(name, *preparation.examples(rows, target)))
            copies |= {name: said} if said else {}
        except DataError as error:
            left_out[name] = str(error)
    return tuple(peers), left_out, copies


def split_rows(
    own: pd.DataFrame,
    target: str,
    kind: Kind,
    shares: tuple[float, float],
    *,
    own_examples: int | None,
    seed: int,
    whose: str = "user 0",
    at_most: bool = False,
) -> list[pd.DataFrame]:
    """Return a user's training, validation and test rows, stratified by class where possible.

    `at_most`: take all rows that are left where these are fewer than `own_examples`.
    """
    sizes = [max(1, round(share * len(own))) if share else 0 for share in shares]
    left = len(own) - sum(sizes)
    wanted = left if own_examples is None else own_examples
    wanted = min(wanted, left) if at_most else wanted
    if not 2 <= wanted <= left:
        has = f"{whose} has {len(own)} row{'' if len(own) == 1 else 's'}"
        if len(own) < (least := 2 + sum(map(bool, sizes))):
            raise DataError(
                f"{has}, but {least} are needed: 2 for training, the others held out; add rows, or"
                " take the pooled model of `--me all`"
            )
        remedy = (
            f"ask for 2 to {left}, or hold out less" if left >= 2 else "2 are needed, hold out less"
        )
        raise DataError(
            f"{has}, of which {sum(sizes)} are held out; {wanted} cannot be for training: {remedy}"
        )
    cut = partial(_cut, by_class=target if kind == "classification" else None, seed=seed)
    tested, rest = cut(own, sizes[1])
    held_out, rest = cut(rest, sizes[0])
    return [rest if wanted == len(rest) else cut(rest, wanted)[0], held_out, tested]


def _cut(
    rows: pd.DataFrame, n: int, *, by_class: str | None, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return n rows drawn at random, and the others.

    Where possible both have the classes in that column alike.
    """
    from sklearn.model_selection import train_test_split

    if not n:
        return rows[:0], rows
    # as scikit-learn takes it
    state = seed if 0 <= seed < 2**32 else random_key(seed, "split") % 2**32
    classes = None if by_class is None else rows[by_class]
    counts = None if classes is None else classes.value_counts()
    even = counts is not None and counts.min() >= 2 and len(counts) <= min(n, len(rows) - n)
    drawn, others = train_test_split(
        rows, train_size=n, stratify=classes if even else None, random_state=state
    )
    return drawn, others


@dataclass(frozen=True)
class TableUsers:
    """All users of a table, and the one `preparation` that turns everybody's rows into tensors."""

    users: tuple[User, ...]
    preparation: Preparation
    left_out: Mapping[str, str]  # who cannot learn from its rows, and why
    target: str  # the column to predict
    # everybody's, with all columns
    test_rows: Mapping[str, pd.DataFrame] = field(repr=False, compare=False)

    @property
    def n_inputs(self) -> int:
        """The number of inputs that every user's model gets."""
        return self.preparation.n_inputs

    @property
    def n_outputs(self) -> int:
        """The number of outputs that every user's model needs."""
        return self.preparation.n_outputs


@dataclass(frozen=True, kw_only=True)
class AllUsersSettings(TableSettings):
    """What all users of a table are made of.

    Args:
        suspect: Warn of columns that look like ids, dates or the target itself.
        seed: Which rows are held out.
    """

    suspect: bool = True
    seed: Annotated[int, SEED] = 0


@takes_fields_of(AllUsersSettings)
def users_from_table(settings: AllUsersSettings) -> TableUsers:
    """Return all users of a table, each with training, validation and test rows of its own.

    Everybody's rows are split as `from_table` splits user 0's, and all are prepared in one way,
    which follows from sums, sums of squares about the mean and counts of the users' training rows:
    all that they tell each other of them. Missing numbers become the mean of all. A user who has
    too few rows, or rows of one class, is left out with a warning.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"ward": list("aab" * 20), "age": [31, 58, 40] * 20, "ill": [0, 1, 1, 0] * 15})
        >>> both = users_from_table(table, user_column="ward", target="ill")
        >>> both.users, both.n_inputs
        ((User('a', 24 examples), User('b', 12 examples)), 1)
    """
    target, shares = settings.target, settings.shares
    table = settings.checked()
    parts, left_out = _split(table, shares, settings.own_examples, settings.seed)
    if not parts:
        raise DataError(f"nobody can learn from this table; {reasons(left_out)}")
    for name, reason in left_out.items():
        warnings.warn(f"the user {name!r} is left out: {reason}", stacklevel=2)
    trainings = [training for training, *_ in parts.values()]
    prepare = replace(_prepared_alike(table, trainings), **table.roles.carried)
    if settings.class_weight:
        prepare = prepare.balanced(pd.concat([rows[target] for rows in trainings]))
    if settings.suspect:
        warn_of_common_rows({name: table.rows[name] for name in parts}, prepare)
        warn_of_suspicious(table.every, pd.concat(trainings), target, prepare)
    users = tuple(user_of(name, rows, target, prepare) for name, rows in parts.items())
    tested_rows = {name: tested for name, (*_, tested) in parts.items()}
    return TableUsers(users, prepare, left_out, target, tested_rows)


def _split(
    table: CheckedTable, shares: tuple[float, float], own_examples: int | None, seed: int
) -> tuple[dict[str, list[pd.DataFrame]], dict[str, str]]:
    """Return everybody's training, validation and test rows, and who is left out, with why."""
    parts, left_out = {}, dict(table.left_out)
    settings = table.roles.target, table.kind, shares
    most: dict[str, Any] = {"own_examples": own_examples, "at_most": True, "seed": seed}
    for name, own in table.rows.items():
        try:
            parts[name] = split_rows(own, *settings, whose=repr(name), **most)
        except DataError as error:
            left_out[name] = str(error)
    return parts, left_out


def _prepared_alike(table: CheckedTable, trainings: Sequence[pd.DataFrame]) -> Preparation:
    """Return the preparation that follows from what users tell of their training rows."""
    roles, kind = table.roles, table.kind
    statistics = [
        Statistics.of(rows[list(roles.features)], rows[roles.target], kind, roles.categorical)
        for rows in trainings
    ]
    classes = classes_of(table.targets) if kind == "classification" else ()
    return functools.reduce(operator.add, statistics).preparation(classes)


def user_of(
    name: str, parts: Sequence[pd.DataFrame], target: str, preparation: Preparation
) -> User:
    """Return a user with its training, validation and test rows.

    Without a held-out set where it has no rows.
    """
    training, *held_out = (
        preparation.examples(part, target) if len(part) else None for part in parts
    )
    if training is None:
        raise AssertionError("there are always training rows")
    return User(name, *training, validation=held_out[0], test=held_out[1])
