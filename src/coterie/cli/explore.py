"""`coterie explore`: several runs compared on one page."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from coterie.cli.terminal import record_of


def explore(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Folders that `coterie train` wrote, or records."),
    ],
    out: Annotated[Path, Option(help="Where to write the page.")] = Path("coterie-explore.html"),
) -> None:
    """Compare runs on one page: each one's verdict, numbers, cost and weights, and their curves together.

    Example: coterie explore run other-run --out runs.html
    """
    from coterie.reporting.explore_page import write_explore_page

    typer.echo(f"page: {write_explore_page(out, {str(run): record_of(run) for run in runs})}")
