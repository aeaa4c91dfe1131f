"""`coterie explore`: several runs compared on one page."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from coterie.cli.options.groups import grouped
from coterie.cli.terminal import record_of


@grouped
def explore(
    runs: Annotated[list[Path], Argument(metavar="RUN...")],
    out: Path = Path("coterie-explore.html"),
) -> None:
    """Compare runs on one page: each one's verdict, numbers, cost and weights, and their curves together.

    Example: coterie explore run other-run --out runs.html

    Args:
        runs: Folders that `coterie train` wrote, folders of several of them, or records.
        out: Where to write the page.
    """
    from coterie.reporting.explore_page import write_explore_page

    named = [one for run in runs for one in _runs_in(run)]
    typer.echo(f"page: {write_explore_page(out, {str(run): record_of(run) for run in named})}")


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs that a folder holds, or itself where it is one, or holds none."""
    inside = [] if (folder / "record.jsonl").exists() else sorted(folder.glob("*/record.jsonl"))
    return [record.parent for record in inside] or [folder]
