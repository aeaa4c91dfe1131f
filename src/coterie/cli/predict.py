"""`coterie predict`: apply a trained model to a table."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from coterie.cli.options.groups import grouped
from coterie.data import read_table
from coterie.data.reading import FileForm
from coterie.errors import KnobError
from coterie.tables.predict import columns_of_names, harmless
from coterie.tables.predict import predict as predictions

STANDARD_INPUT = Path("/dev/stdin")
"""What `-` stands for."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(FileForm):
    """What is predicted, and from what.

    Args:
        folder: The folder that `coterie train` wrote.
        file: A CSV or Parquet file with the same columns; - for standard input.
        out: Where to write the CSV; standard output when not given.
        coverage: Also give intervals, or sets of classes, that hold the truth in this share of
            the rows: 0.9.
        model: The run's model, where it is code of your own.
        raw: Write texts as they are, also those that a spreadsheet would run (=1+1).
    """

    folder: Annotated[Path, Argument(metavar="DIR")]
    file: Annotated[Path, Argument(metavar="FILE")]
    out: Path | None = None
    coverage: float | None = None
    model: Annotated[str | None, Option(metavar="MODULE:FACTORY")] = None
    raw: bool = False


@grouped
def predict(asked: PredictOptions) -> None:
    """Predict the target for every row of a table, in order, with the personal model of a run.

    Writes a CSV with the columns `prediction` and, in classification, `probability_CLASS` for each
    class. The column that `coterie train --id` named comes first. With --coverage also `lower` and
    `upper`, or `set`. An apostrophe stands before texts that a spreadsheet would run as a formula,
    unless `--raw` is given.

    Example: coterie predict run new_visits.csv --coverage 0.9 --out predictions.csv
    """
    out, folder = asked.out, asked.folder
    if out is not None and not out.absolute().parent.is_dir():
        raise KnobError(
            f"`--out` lies in {out.absolute().parent}, which is no folder; make it, or name another"
        )
    source = STANDARD_INPUT if str(asked.file) == "-" else asked.file
    rows = read_table(source, as_written=columns_of_names(folder), **asked.form)
    table = predictions(folder, rows, asked.model, asked.coverage)
    (table if asked.raw else harmless(table)).to_csv(
        sys.stdout if out is None else out, index=False
    )
    if out is not None:
        typer.echo(f"predictions: {out}", err=True)
