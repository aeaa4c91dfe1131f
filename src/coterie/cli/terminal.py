"""What commands share.

Tables and progress in the terminal, and the record of a run that is named.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.errors import DataError
from coterie.recording.progress import rich_bar
from coterie.recording.record import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Made = TypeVar("Made")


def console(*, errors: bool = False) -> "Console":
    """Return what prints to the terminal as it is: names may hold brackets, which are no markup."""
    from rich.console import Console

    return Console(stderr=errors, markup=False)


def rich_table(
    title: str | None, rows: Sequence[Mapping[str, Any]], caption: str | None = None
) -> "Table":
    """Return rows as a table.

    The first column and columns of words to the left, the others to the right.

    What is too wide for the terminal is folded, never cut: names must be told apart.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, column in enumerate(rows[0]):
        cells = [cell for row in rows if (cell := str(row[column]))]
        words = bool(cells) and all(cell[0].isalpha() for cell in cells)
        table.add_column(
            str(column), justify="left" if words or not i else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    return table


def record_of(run: Path) -> Record:
    """Return the record of a run that is named by its folder or by its record."""
    path = run / "record.jsonl" if run.is_dir() else run
    if not path.exists() and (several := sorted(run.glob("*/record.jsonl"))):
        raise DataError(
            f"{run} holds a run for each user; name one of them, such as {several[0].parent}"
        )
    if not path.exists():
        raise DataError(
            f"{run} holds no run: there is no {path}; name the folder that `coterie train --out`"
            " wrote"
        )
    return Record.load(path)


def to_apply(folder: Path, model: str) -> str:
    """Return the command that applies the model of a folder, which names it where it is code of one's own.

    Example:
        >>> to_apply(Path("my run"), "nets:small")
        "coterie predict 'my run' FILE --model nets:small"
    """
    return f"coterie predict {quote(str(folder))} FILE" + (
        f" --model {quote(model)}" if ":" in model else ""
    )


def quietly(make: Callable[..., Made], **arguments: Any) -> Made:
    """Return what a function makes, without its warnings: what is told of a table is told once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**arguments)


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Give a function of what is done, and of how many more of `total` that makes (1).

    Shown in a terminal.
    """
    with rich_bar(description, total) as update:
        yield lambda what, n=1: update(advance=n, description=what)
