"""`coterie reproduce`: the paper's figures, exactly."""

from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(metavar="[FIGURE]...", help="Figures to make; all when none is named.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures, results.json and index.html.")] = Path(
        "coterie-reproduction"
    ),
    seed: Annotated[int, typer.Option(help="What the sampled runs depend on.")] = 0,
) -> None:
    """Reproduce the paper's figures: exact curves, 100 sampled runs as bands, a page that explains them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from coterie import paper

    names = figures or list(paper.STUDIES)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(names[0], total=len(names))
        for done, name in enumerate(paper.reproduce(names, out, seed=seed), start=1):
            typer.echo(f"{name}: {out / name}.png, .pdf")
            bar.update(task, completed=done, description=names[done] if done < len(names) else "page")
    typer.echo(f"page: {out / 'index.html'}; numbers: {out / 'results.json'}")
