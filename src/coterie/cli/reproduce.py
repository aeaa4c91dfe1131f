"""`coterie reproduce`: the paper's figures, exactly."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from coterie.cli.options.groups import grouped
from coterie.cli.terminal import bar


@grouped
def reproduce(
    figures: Annotated[list[str] | None, Argument(metavar="[FIGURE]...")] = None,
    out: Path = Path("coterie-reproduction"),
    seed: int = 0,
) -> None:
    """Reproduce the paper's figures: exact curves, 100 sampled runs as bands, a page that explains them.

    Example: coterie reproduce comparison drift --out figures

    Args:
        figures: Figures to make, of comparison, bias_on_bc, bias_on_wga, peers_on_bc,
            alone_steps, gain_factor, bias_growth, mean_estimation, tuned_comparison, drift; all
            when none is named.
        out: Folder for the figures, results.json and index.html.
        seed: What the sampled runs depend on.
    """
    from coterie import paper

    names = figures or list(paper.STUDIES)
    with bar(names[0], len(names)) as advance:
        for done, name in enumerate(paper.reproduce(names, out, seed=seed), start=1):
            typer.echo(f"{name}: {out / name}.png, .pdf")
            advance(names[done] if done < len(names) else "page")
    typer.echo(f"page: {out / 'index.html'}; numbers: {out / 'results.json'}")
