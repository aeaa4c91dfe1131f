"""A table whose users are in processes of their own: each reads its own rows.

What all must agree on they tell each other. Where user 0 trains, these are the different targets
and user 0's preparation; where everybody trains, the targets, and sums and counts of everybody's
training rows, by which all prepare their rows as `coterie.data.users_from_table` does.
"""

import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from coterie.data import TableTask, from_table
from coterie.data.checking import (
    check_classes,
    check_users,
    checked_table,
    distinct_targets,
    roles_in,
    warn_of_suspicious,
)
from coterie.data.columns import with_numbers
from coterie.data.preparation import Preparation, classes_of
from coterie.data.reading import FileForm, rank_file, read_rows, users_in
from coterie.data.statistics import Statistics
from coterie.data.table import OneUserSettings, TableSettings, split_rows, user_of
from coterie.engines.processes.engine import serve
from coterie.engines.processes.processes import Processes
from coterie.errors import CoterieError, DataError, KnobError, PeerLost, printable
from coterie.everyone.folders import folder_names
from coterie.tables import models
from coterie.users.user import User

_OFFER: dict[str, Any] = {"name": str, "rows": int, "targets": list | None}


def lead(
    others: Processes, settings: Mapping[str, Any], *, model: str
) -> tuple[TableTask, dict[str, int]]:
    """Read user 0's rows, agree with the peers, and return user 0's task and each peer's rows.

    A peer whose rows cannot be used is left out with a warning.

    The settings are those of `coterie.data.from_table`; in the name of the file `{rank}` becomes 0.
    """
    table = OneUserSettings(**settings)
    target, me, kind = table.target, str(table.me), table.kind
    path = rank_file(table.data, 0)
    if path == str(table.data):
        there = users_in(path, table.user_column, table)
        check_users(there, table.user_column, me, list(map(str, table.leave_out)))
    others.say("table", {"target": target, "kind": kind})
    refused: dict[int, str] = {}
    offers = {
        rank: others.hear(rank, "part", **_OFFER)
        for rank in others.others
        if _takes_part(others, "part", rank, refused)
    }
    if any(offer["targets"] is None for offer in offers.values()) and kind == "auto":
        kind = "regression"
    elsewhere = [value for offer in offers.values() for value in offer["targets"] or ()]
    rows = read_rows(path, table.user_column, me, table)
    own: dict[str, Any] = {"data": rows, "kind": kind, "elsewhere": elsewhere}
    task = from_table(**{**settings, **own, **FileForm().form, "leave_out": ()})
    others.say("agreed", {"preparation": task.preparation.to_plain(), "model": model})
    peers = {
        rank: offer for rank, offer in offers.items() if _takes_part(others, "ready", rank, refused)
    }
    if not peers:
        raise DataError("no peer can take part: " + "; ".join(refused.values()))
    for rank, why in refused.items():
        warnings.warn(f"rank {rank} is left out: {why}", stacklevel=2)
    others.are({rank: offer["name"] for rank, offer in peers.items()})
    return task, {offer["name"]: offer["rows"] for offer in peers.values()}


def _takes_part(others: Processes, subject: str, rank: int, refused: dict[int, str]) -> bool:
    """Say by what it says whether a peer takes part.

    One that does not is added to those left out, or ends the run.
    """
    note = others.hear(rank, subject, refused=str | None, ends=bool)
    if note["refused"]:
        refused[rank] = printable(note["refused"], 1000)
    if note["ends"]:
        raise DataError(f"rank {rank} cannot take part: {refused[rank]}")
    return rank not in refused


def follow(
    others: Processes,
    rows: Callable[[], tuple[str, "pd.DataFrame"]],
    model: str | None,
    device: str,
    **settings: Any,
) -> int:
    """Answer user 0's requests with gradients of this peer's rows, until the run ends.

    Return how many.

    Without a model of its own a peer takes "linear" and "mlp" as user 0 says. A peer whose rows
    cannot be used is left out with a warning, and gives none. The settings go to `serve`.
    """
    if settings.get("privacy") is not None:
        raise KnobError(
            "a worker with a table tells user 0 its classes, which is not private; use `serve`"
        )
    with others:
        table = others.hear(0, "table", target=str, kind=str)
        try:
            with _or_refused(others, "part") as offer:
                name, frame = rows()
                check_target(frame, name, table["target"])
                targets = distinct_targets(frame[table["target"]], table["kind"])
                offer |= {"name": name, "rows": len(frame), "targets": targets}
            with _or_refused(others, "ready"):
                agreed = others.hear(0, "agreed", preparation=dict, model=str)
                preparation = _preparation(agreed, model)
                check_classes(frame[table["target"]], preparation.kind)
                user = User(name, *preparation.examples(frame, table["target"]))
                made = models.build(
                    model or agreed["model"], preparation.n_inputs, preparation.n_outputs
                )
        except DataError as error:
            warnings.warn(f"rank {others.rank} is left out: {error}", stacklevel=2)
            return 0
        loss = models.loss_of(preparation)
        return serve(made.to(here(device)), loss, user, processes=others, **settings)


@contextmanager
def _or_refused(others: Processes, subject: str) -> Iterator[dict[str, Any]]:
    """Say what is put into a note, or why this peer cannot take part.

    Bad rows do not end the run.
    """
    note: dict[str, Any] = {"refused": None, "ends": False}
    try:
        yield note
    except CoterieError as error:
        if not isinstance(error, PeerLost):
            others.say(subject, {"refused": str(error), "ends": not isinstance(error, DataError)})
        raise
    others.say(subject, note)


def meet(
    others: Processes, settings: Mapping[str, Any], *, seed: int
) -> tuple[TableTask, dict[str, int], str]:
    """Read the rows of one of those who all train, and agree with the others.

    Return its task, the others' numbers of training rows, and its folder's name. In the name of
    the file `{rank}` becomes this process's rank. The settings are those of
    `coterie.data.users_from_table`.
    """
    asked = TableSettings(**{name: v for name, v in settings.items() if name != "me"})
    if asked.class_weight:
        raise KnobError(
            "`class_weight` is for users in this process: others would weigh by other rows; leave"
            " it out"
        )
    target, kind, columns = asked.target, asked.kind, asked.columns
    whose = asked.user_column, None, asked.leave_out
    name, rows = part_of(others, asked.data, *whose, form=asked)
    check_target(rows, name, target)
    used = *roles_in(rows, **columns).features, target
    rows = with_numbers(rows, [column for column in used if column in rows])
    mine = {"name": name, "targets": distinct_targets(rows[target], kind)}
    targets_of = others.exchange("targets", mine, name=str, targets=list | None)
    targets = [note["targets"] for note in targets_of.values()]
    table = checked_table(
        rows,
        kind="regression" if kind == "auto" and None in [*targets, mine["targets"]] else kind,
        me=name,
        elsewhere=[value for each in targets for value in each or ()],
        **columns,
    )
    own_rows, most = table.rows[name], asked.own_examples
    splitting: dict[str, Any] = {"own_examples": most, "at_most": True, "seed": seed}
    parts = split_rows(own_rows, target, table.kind, asked.shares, whose=repr(name), **splitting)
    own = Statistics.of(
        parts[0][list(table.roles.features)], parts[0][target], table.kind, table.roles.categorical
    )
    counted = {"examples": len(parts[0]), "statistics": own.to_plain()}
    statistics_of = others.exchange("statistics", counted, examples=int, statistics=dict)
    everybodys = [
        note["statistics"] for _, note in sorted((statistics_of | {others.rank: counted}).items())
    ]
    classes = classes_of(table.targets) if table.kind == "classification" else ()
    preparation = replace(_added_up(everybodys).preparation(classes), **table.roles.carried)
    warn_of_suspicious(table.rows[name], parts[0], target, preparation)
    task = TableTask(
        user_of(name, parts, target, preparation),
        (),
        preparation.n_inputs,
        preparation.n_outputs,
        preparation,
        target,
        test_rows=parts[2],
    )
    names = {rank: note["name"] for rank, note in targets_of.items()}
    in_order = [whose for _, whose in sorted((names | {others.rank: name}).items())]
    sizes = {names[rank]: note["examples"] for rank, note in statistics_of.items()}
    return task, sizes, folder_names(in_order)[name]


def _added_up(everybodys: Sequence[dict[str, Any]]) -> Statistics:
    """Return the statistics of all rows, of those that each process told."""
    try:
        return functools.reduce(operator.add, map(Statistics.from_plain, everybodys))
    except CoterieError:
        raise
    except Exception as error:  # what a stranger's note may make it raise is not known
        raise PeerLost(f"another process's statistics cannot be read: {error!r}") from error


def check_target(rows: "pd.DataFrame", name: str, target: str) -> None:
    """Refuse rows without a target."""
    if target not in rows.columns:
        raise DataError(f"the rows of {name!r} have no column {target!r}")
    if rows[target].isna().any():
        raise DataError(
            f"column {target!r} of {name!r} is NaN or empty in a row; drop the rows without a"
            " target"
        )


def _preparation(agreed: Mapping[str, Any], model: str | None) -> Preparation:
    if model is None and ":" in agreed["model"]:
        raise KnobError(
            f"user 0 uses the model {agreed['model']!r}, which is code: allow it by `--model` here"
        )
    try:
        return Preparation.from_plain(agreed["preparation"])
    except CoterieError:
        raise
    except Exception as error:  # what a stranger's note may make it raise is not known
        raise PeerLost(f"user 0's preparation cannot be read: {printable(error)}") from error


def here(device: str) -> str:
    """Return this process's own GPU where torchrun started several on one machine, and `device` elsewhere."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return device


def part_of(
    others: Processes,
    data: Path | str,
    user_column: str,
    me: str | None,
    leave_out: Sequence[object],
    *,
    form: FileForm,
) -> tuple[str, "pd.DataFrame"]:
    """Return whose rows this process's are, and the rows.

    With `{rank}` in the name of the file, every rank has a file of its own, of one user. Otherwise
    the users of the table are the ranks, in the table's order, user 0 before the others where one
    is named.
    """
    path, left_out = rank_file(data, others.rank), list(map(str, leave_out))
    names = [name for name in users_in(path, user_column, form) if name not in left_out]
    if path != str(data):
        if len(names) != 1:
            raise DataError(
                f"{path} must hold the rows of one user, but it has {', '.join(names) or 'none'}"
            )
        return names[0], read_rows(path, user_column, names[0], form)
    peers = [name for name in names if name != me]
    in_order = peers if me is None else [me, *peers]
    if len(in_order) != others.size:
        who = "users" if me is None else f"peers of {me!r}"
        started = others.size - (me is not None)
        raise KnobError(
            f"the table has {len(peers)} {who} ({', '.join(peers)}), but there are {started}"
            f" processes for them; start {len(in_order)} in all, or leave users out"
        )
    name = in_order[others.rank]
    return name, read_rows(path, user_column, name, form)
