"""A table whose users are in processes of their own.

Each reads its own rows, and nothing of them travels.

What all must agree on is left as notes: from user 0 the name of the target, how rows become inputs
(statistics of its training rows) and the model; from each peer its name, its number of rows and, in
classification, its classes.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.data import Preparation, TableTask, from_table
from coterie.data.checking import check_classes, check_users, distinct_targets
from coterie.data.reading import FileForm, rank_file, read_rows, users_in
from coterie.data.table import OneUserSettings
from coterie.engines.torch_distributed.engine import serve
from coterie.engines.torch_distributed.group import Group
from coterie.errors import CoterieError, DataError, KnobError, PeerLost, printable
from coterie.tables import models
from coterie.users.user import User

if TYPE_CHECKING:
    import pandas as pd


def lead(
    group: Group, settings: Mapping[str, Any], *, model: str
) -> tuple[Group, TableTask, dict[str, int]]:
    """Read user 0's rows, agree with the peers, and return who takes part, user 0's task and each peer's rows.

    A peer whose rows cannot be used is left out with a warning.

    The settings are those of `coterie.data.from_table`; in the name of the file `{rank}` becomes 0.
    """
    table = OneUserSettings(**settings)
    target, me, kind = table.target, str(table.me), table.kind
    path = rank_file(table.data, 0)
    if path == str(table.data):
        there = users_in(path, table.user_column, table)
        check_users(there, table.user_column, me, list(map(str, table.leave_out)))
    group.leave_note("table", {"target": target, "kind": kind})
    kinds: dict[str, Any] = {"name": str, "rows": int, "targets": list | None}
    refused: dict[int, str] = {}
    offers = {
        rank: group.read_note(f"part/{rank}", f"rank {rank}", **kinds)
        for rank in group.others
        if _takes_part(group, f"part/{rank}", rank, refused)
    }
    if any(offer["targets"] is None for offer in offers.values()) and kind == "auto":
        kind = "regression"
    elsewhere = [value for offer in offers.values() for value in offer["targets"] or ()]
    rows = read_rows(path, table.user_column, me, table)
    own: dict[str, Any] = {"data": rows, "kind": kind, "elsewhere": elsewhere}
    task = from_table(**{**settings, **own, **FileForm().form, "leave_out": ()})
    group.leave_note("agreed", {"preparation": task.preparation.to_plain(), "model": model})
    peers = {
        rank: offer
        for rank, offer in offers.items()
        if _takes_part(group, f"ready/{rank}", rank, refused)
    }
    if not peers:
        raise DataError("no peer can take part: " + "; ".join(refused.values()))
    group.leave_note("ranks", [0, *peers])
    for rank, why in refused.items():
        warnings.warn(f"rank {rank} is left out: {why}", stacklevel=2)
    sizes = {offer["name"]: offer["rows"] for offer in peers.values()}
    return replace(group, size=1 + len(peers)), task, sizes


def _takes_part(group: Group, key: str, rank: int, refused: dict[int, str]) -> bool:
    """Say by its note whether a peer takes part.

    One that does not is added to those left out, or ends the run.
    """
    note = group.read_note(key, f"rank {rank}", refused=str | None, ends=bool)
    if note["refused"]:
        refused[rank] = printable(note["refused"], 1000)
    if note["ends"]:
        raise DataError(f"rank {rank} cannot take part: {refused[rank]}")
    return rank not in refused


def follow(
    group: Group,
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
    table = group.read_note("table", "user 0", target=str, kind=str)
    try:
        with _or_refused(group, f"part/{group.rank}") as offer:
            name, frame = rows()
            check_target(frame, name, table["target"])
            targets = distinct_targets(frame[table["target"]], table["kind"])
            offer |= {"name": name, "rows": len(frame), "targets": targets}
        with _or_refused(group, f"ready/{group.rank}"):
            agreed = group.read_note("agreed", "user 0", preparation=dict, model=str)
            preparation = _preparation(agreed, model)
            check_classes(frame[table["target"]], preparation.kind)
            user = User(name, *preparation.examples(frame, table["target"]))
            made = models.build(
                model or agreed["model"], preparation.n_inputs, preparation.n_outputs
            )
    except DataError as error:
        warnings.warn(f"rank {group.rank} is left out: {error}", stacklevel=2)
        return 0
    ranks = group.read_note("ranks", "user 0", list)
    group = replace(group, rank=ranks.index(group.rank), size=len(ranks))
    return serve(made.to(here(device)), models.loss_of(preparation), user, group=group, **settings)


@contextmanager
def _or_refused(group: Group, key: str) -> Iterator[dict[str, Any]]:
    """Leave a note of what is put into it, or of why this peer cannot take part.

    Bad rows do not end the run.
    """
    note: dict[str, Any] = {"refused": None, "ends": False}
    try:
        yield note
    except CoterieError as error:
        if not isinstance(error, PeerLost):
            group.leave_note(key, {"refused": str(error), "ends": not isinstance(error, DataError)})
        raise
    group.leave_note(key, note)


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
    return (
        f"cuda:{os.environ['LOCAL_RANK']}"
        if device == "cuda" and "LOCAL_RANK" in os.environ
        else device
    )


def part_of(
    group: Group,
    data: Path | str,
    user_column: str,
    me: str,
    leave_out: Sequence[object],
    *,
    form: FileForm,
) -> tuple[str, "pd.DataFrame"]:
    """Return whose rows this peer's are, and the rows.

    With `{rank}` in the name of the file, every rank has a file of its own, of one user. Otherwise
    the users of the table but `me` are the ranks from 1 on, in the table's order.
    """
    path = rank_file(data, group.rank)
    names = [name for name in users_in(path, user_column, form) if name not in leave_out]
    if path != str(data):
        if len(names) != 1:
            raise DataError(
                f"{path} must hold the rows of one user, but it has {', '.join(names) or 'none'}"
            )
        return names[0], read_rows(path, user_column, names[0], form)
    peers = [name for name in names if name != me]
    if len(peers) != len(group.others):
        raise KnobError(
            f"the table has {len(peers)} peers of {me!r} ({', '.join(peers)}), but there are"
            f" {len(group.others)} processes for them; start {len(peers) + 1} in all, or leave"
            " users out"
        )
    name = peers[group.rank - 1]
    return name, read_rows(path, user_column, name, form)
