"""What commands show in the terminal: tables and the progress of many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def rich_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a table, the first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(rows[0]):
        table.add_column(str(column), justify="right" if i else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    return table


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that says that one more of `total` is done, and what; shown in a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda what: progress.update(task, advance=1, description=what)
