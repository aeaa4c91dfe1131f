"""Commands of a few lines: predict, explore, reproduce and list."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.aggregators import AGGREGATORS
from coterie.benchmark.sets import SETS
from coterie.cli.terminal import bar, record_of
from coterie.data import read_table
from coterie.errors import KnobError
from coterie.evaluation import METRICS
from coterie.methods import METHODS
from coterie.registry import Registry
from coterie.rules import RULES
from coterie.tables.predict import columns_of_names
from coterie.tables.predict import predict as predictions
from coterie.training.trackers import TRACKERS

STANDARD_INPUT = Path("/dev/stdin")
"""What `-` stands for."""


def predict(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder that `coterie train` wrote.")],
    file: Annotated[
        Path, Argument(metavar="FILE", help="A CSV or Parquet file with the same columns; - for standard input.")
    ],
    out: Annotated[Path | None, Option(help="Where to write the CSV; standard output when not given.")] = None,
    sep: Annotated[str, Option(help="Column separator of a CSV file (`tab` for a tab).")] = ",",
    decimal: Annotated[str, Option(help="Decimal mark of a CSV file.")] = ".",
    model: Annotated[
        str | None, Option(metavar="MODULE:FACTORY", help="The run's model, where it is code of your own.")
    ] = None,
) -> None:
    """Predict the target for every row of a table, in order, with the personal model of a run.

    Writes a CSV with the columns `prediction` and, in classification, `probability_CLASS` for each class. The
    column that `coterie train --id` named comes first.

    Example: coterie predict run new_visits.csv --out predictions.csv
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise KnobError(f"`--out` lies in {out.absolute().parent}, which is no folder; make it, or name another")
    source, names = STANDARD_INPUT if str(file) == "-" else file, columns_of_names(folder)
    rows = read_table(source, sep=sep, decimal=decimal, as_written=names)
    predictions(folder, rows, model).to_csv(sys.stdout if out is None else out, index=False)
    if out is not None:
        typer.echo(f"predictions: {out}", err=True)


def explore(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders that `coterie train` wrote, or records.")],
    out: Annotated[Path, Option(help="Where to write the page.")] = Path("coterie-explore.html"),
) -> None:
    """Compare runs on one page: each one's verdict, numbers, cost and weights, and their curves together.

    Example: coterie explore run other-run --out runs.html
    """
    from coterie.reporting.explore_page import write_explore_page

    typer.echo(f"page: {write_explore_page(out, {str(run): record_of(run) for run in runs})}")


def reproduce(
    figures: Annotated[
        list[str] | None,
        Argument(
            metavar="[FIGURE]...",
            help="Figures to make, of comparison, bias_on_bc, bias_on_wga, peers_on_bc, alone_steps, gain_factor, "
            "bias_growth, mean_estimation, tuned_comparison, drift; all when none is named.",
        ),
    ] = None,
    out: Annotated[Path, Option(help="Folder for the figures, results.json and index.html.")] = Path(
        "coterie-reproduction"
    ),
    seed: Annotated[int, Option(help="What the sampled runs depend on.")] = 0,
) -> None:
    """Reproduce the paper's figures: exact curves, 100 sampled runs as bands, a page that explains them.

    Example: coterie reproduce comparison drift --out figures
    """
    from coterie import paper

    names = figures or list(paper.STUDIES)
    with bar(names[0], len(names)) as advance:
        for done, name in enumerate(paper.reproduce(names, out, seed=seed), start=1):
            typer.echo(f"{name}: {out / name}.png, .pdf")
            advance(names[done] if done < len(names) else "page")
    typer.echo(f"page: {out / 'index.html'}; numbers: {out / 'results.json'}")


Kind = StrEnum("Kind", ["rules", "methods", "aggregators", "sets", "metrics", "trackers"])


def list_(
    kinds: Annotated[list[Kind] | None, Argument(help="Which kinds; all when none is named.")] = None,
) -> None:
    """List rules, methods, aggregators, data sets, metrics and trackers by name, your own among them.

    Example: coterie --import own.py list rules
    """
    all_registries: list[Registry[Any]] = [RULES, METHODS, AGGREGATORS, SETS, METRICS, TRACKERS]
    registries = dict(zip(Kind, all_registries, strict=True))
    for kind in kinds or list(Kind):
        typer.echo(f"{kind.value}:")
        for name in registries[kind]:
            typer.echo(f"  {name:<20} {registries[kind].entry(name).description}")
