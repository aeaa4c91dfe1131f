"""A table whose users are in processes of their own: each reads its own rows, and nothing of them travels.

What all must agree on is left as notes: from user 0 the name of the target, how rows become inputs (statistics of
its training rows) and the model; from each peer its name, its number of rows and, in classification, its classes.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coterie.data import Preparation, TableTask, from_table
from coterie.data.checking import check_users, distinct_targets
from coterie.data.reading import read_rows, users_in
from coterie.engines.torch_distributed.engine import serve
from coterie.engines.torch_distributed.group import Group
from coterie.errors import CoterieError, DataError, KnobError, PeerLost, printable
from coterie.tables import models
from coterie.users.user import User

if TYPE_CHECKING:
    import pandas as pd


def lead(
    group: Group,
    data: str,
    *,
    user_column: str,
    target: str,
    me: str,
    model: str,
    kind: str,
    leave_out: Sequence[str] = (),
    sep: str = ",",
    decimal: str = ".",
    **settings: Any,
) -> tuple[TableTask, dict[str, int]]:
    """Read user 0's rows, agree with the peers, and return user 0's task and how many rows each peer has.

    In the name of the file `{rank}` becomes 0. The settings are passed on to `coterie.data.from_table`.
    """
    path = data.format(rank=0)
    if path == data:
        check_users(users_in(path, user_column, sep=sep, decimal=decimal), user_column, me, leave_out)
    group.leave_note("table", {"target": target, "kind": kind})
    offers = []
    for rank in group.others:
        offer = group.read_note(f"part/{rank}", f"rank {rank}", refused=str | None)
        if offer["refused"]:
            raise DataError(f"rank {rank} cannot take part: {printable(offer['refused'], 1000)}")
        offers.append(group.read_note(f"part/{rank}", f"rank {rank}", name=str, rows=int, targets=list | None))
    if any(offer["targets"] is None for offer in offers) and kind == "auto":
        kind = "regression"
    elsewhere = [value for offer in offers for value in offer["targets"] or ()]
    rows = read_rows(path, user_column, me, sep=sep, decimal=decimal)
    settings |= {"user_column": user_column, "target": target, "me": me, "kind": kind, "elsewhere": elsewhere}
    task = from_table(rows, **settings)
    group.leave_note("agreed", {"preparation": task.preparation.to_plain(), "model": model})
    return task, {offer["name"]: offer["rows"] for offer in offers}


def follow(
    group: Group, rows: Callable[[], tuple[str, "pd.DataFrame"]], model: str | None, device: str, **settings: Any
) -> int:
    """Answer user 0's requests with gradients of this peer's rows, until the run ends; return how many.

    Without a model of its own a peer takes "linear" and "mlp" as user 0 says. The settings go to `serve`.
    """
    table = group.read_note("table", "user 0", target=str, kind=str)
    part = f"part/{group.rank}"
    try:
        name, frame = rows()
        if table["target"] not in frame.columns:
            raise DataError(f"the rows of {name!r} have no column {table['target']!r}")
        targets = distinct_targets(frame[table["target"]], table["kind"])
    except CoterieError as error:
        group.leave_note(part, {"refused": str(error)})
        raise
    group.leave_note(part, {"refused": None, "name": name, "rows": len(frame), "targets": targets})
    agreed = group.read_note("agreed", "user 0", preparation=dict, model=str)
    if model is None and ":" in agreed["model"]:
        raise KnobError(f"user 0 uses the model {agreed['model']!r}, which is code: allow it by `--model` here")
    try:
        preparation = Preparation.from_plain(agreed["preparation"])
    except CoterieError:
        raise
    except Exception as error:  # what a stranger's note may make it raise is not known
        raise PeerLost(f"user 0's preparation cannot be read: {printable(error)}") from error
    user = User(name, *preparation.examples(frame, table["target"]))
    made = models.build(model or agreed["model"], preparation.n_inputs, preparation.n_outputs)
    return serve(made.to(here(device)), models.loss_of(preparation), user, group=group, **settings)


def here(device: str) -> str:
    """Return this process's own GPU where torchrun started several on one machine, and `device` elsewhere."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


def part_of(
    group: Group, data: str, user_column: str, me: str, leave_out: Sequence[str], **form: Any
) -> tuple[str, "pd.DataFrame"]:
    """Return whose rows this peer's are, and the rows.

    With `{rank}` in the name of the file, every rank has a file of its own, of one user. Otherwise the users of the
    table but `me` are the ranks from 1 on, in the table's order. `form` is `sep` and `decimal` of `read_table`.
    """
    path = data.format(rank=group.rank)
    names = [name for name in users_in(path, user_column, **form) if name not in leave_out]
    if path != data:
        if len(names) != 1:
            raise DataError(f"{path} must hold the rows of one user, but it has {', '.join(names) or 'none'}")
        return names[0], read_rows(path, user_column, names[0], **form)
    peers = [name for name in names if name != me]
    if len(peers) != len(group.others):
        raise DataError(
            f"the table has {len(peers)} peers of {me!r} ({', '.join(peers)}), but there are {len(group.others)} "
            f"processes for them; start {len(peers) + 1} in all, or leave users out"
        )
    name = peers[group.rank - 1]
    return name, read_rows(path, user_column, name, **form)
