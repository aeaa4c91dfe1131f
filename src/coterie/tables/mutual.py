"""A table whose users are in processes of their own, each of which trains: each reads its own rows.

What all must agree on are notes: the different targets, and sums and counts of everybody's training
rows, by which all prepare their rows alike, as `coterie.data.users_from_table` does in one process.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coterie.data import TableTask
from coterie.data.checking import (
    CheckedTable,
    checked_table,
    distinct_targets,
    roles_in,
    warn_of_suspicious,
)
from coterie.data.columns import with_numbers
from coterie.data.preparation import Preparation, classes_of
from coterie.data.reading import rank_file, read_rows, users_in
from coterie.data.statistics import Statistics
from coterie.data.table import TableSettings, split_at_most, user_of
from coterie.engines.mutual.meeting import Meeting
from coterie.engines.torch_distributed.place import Place
from coterie.errors import CoterieError, DataError, KnobError, PeerLost
from coterie.everyone.folders import folder_names
from coterie.tables.cluster import check_target

if TYPE_CHECKING:
    import pandas as pd


def meet(
    meeting: Meeting, settings: Mapping[str, Any], *, seed: int
) -> tuple[TableTask, dict[str, int], str]:
    """Read this process's rows, agree with the others, and return its task, their sizes, and its folder's name.

    The size of another user is its number of training rows. In the name of the file `{rank}`
    becomes this process's rank. The settings are those of `coterie.data.users_from_table`.
    """
    asked = TableSettings(**{name: v for name, v in settings.items() if name != "me"})
    target, kind, columns = asked.target, asked.kind, asked.columns
    name, rows = rows_of(meeting.place, asked)
    check_target(rows, name, target)
    used = *roles_in(rows, **columns).features, target
    rows = with_numbers(rows, [column for column in used if column in rows])
    mine = {"name": name, "targets": distinct_targets(rows[target], kind)}
    others = meeting.exchange("targets", mine, name=str, targets=list | None)
    told = [note["targets"] for note in (mine, *others.values())]
    table = checked_table(
        rows,
        kind="regression" if kind == "auto" and None in told else kind,
        me=name,
        elsewhere=[value for some in told[1:] for value in some or ()],
        **columns,
    )
    how: dict[str, Any] = {"seed": seed, "name": name, "weights": table.roles.weights}
    parts = split_at_most(
        table.rows[name], target, table.kind, asked.shares, asked.own_examples, **how
    )
    preparation, examples = _prepared(meeting, table, parts[0])
    warn_of_suspicious(table.rows[name], parts[0], target, preparation)
    names = {rank: note["name"] for rank, note in others.items()}
    sizes = preparation.n_inputs, preparation.n_outputs
    task = TableTask(
        user_of(name, parts, target, preparation),
        (),
        *sizes,
        preparation,
        target,
        test_rows=parts[2],
    )
    in_order = [whose for _, whose in sorted((names | {meeting.place.rank: name}).items())]
    return task, {names[rank]: n for rank, n in examples.items()}, folder_names(in_order)[name]


def _prepared(
    meeting: Meeting, table: CheckedTable, training: "pd.DataFrame"
) -> tuple[Preparation, dict[int, int]]:
    """Return how all prepare their rows, by everybody's statistics, and how many training rows each other has."""
    roles = table.roles
    own = Statistics.of(
        training[list(roles.features)], training[roles.target], table.kind, roles.categorical
    )
    mine = {"examples": len(training), "statistics": own.to_plain()}
    others = meeting.exchange("statistics", mine, examples=int, statistics=dict)
    everybodys = [
        note["statistics"] for _, note in sorted((others | {meeting.place.rank: mine}).items())
    ]
    classes = classes_of(table.targets) if table.kind == "classification" else ()
    preparation = replace(_added_up(everybodys).preparation(classes), **roles.carried)
    return preparation, {rank: note["examples"] for rank, note in others.items()}


def rows_of(place: Place, asked: TableSettings) -> tuple[str, "pd.DataFrame"]:
    """Return whose rows this process's are, and the rows.

    With `{rank}` in the name of the file every rank has a file of its own, of one user. Otherwise
    the ranks are the users of the table, in its order.
    """
    path, user_column = rank_file(asked.data, place.rank), asked.user_column
    left_out = list(map(str, asked.leave_out))
    names = [name for name in users_in(path, user_column, asked) if name not in left_out]
    if path != str(asked.data):
        if len(names) != 1:
            raise DataError(
                f"{path} must hold the rows of one user, but it has {', '.join(names) or 'none'}"
            )
        return names[0], read_rows(path, user_column, names[0], asked)
    if len(names) != place.size:
        raise KnobError(
            f"the table has {len(names)} users ({', '.join(names)}), but there are {place.size}"
            " processes; start one for each, or leave users out"
        )
    return names[place.rank], read_rows(path, user_column, names[place.rank], asked)


def _added_up(everybodys: Sequence[dict[str, Any]]) -> Statistics:
    """Return the statistics of all rows, of those that each process told."""
    try:
        return functools.reduce(operator.add, map(Statistics.from_plain, everybodys))
    except CoterieError:
        raise
    except Exception as error:  # what a stranger's note may make it raise is not known
        raise PeerLost(f"another process's statistics cannot be read: {error!r}") from error
