"""`coterie train --me all`: a model for each user of a table."""

import typer

from coterie.cli import terminal
from coterie.cli.options.training import EngineOptions, FitOptions, RuleOptions, TableOptions
from coterie.cli.terminal import rich_table
from coterie.data import users_from_table
from coterie.data.reading import users_in
from coterie.engines.torch_distributed.place import Place
from coterie.errors import KnobError
from coterie.everyone.runs import Runs
from coterie.reporting.run_page import HEADLINES
from coterie.reporting.whom import listened_to

ALL = "all"
"""What `--me` says for everybody."""


def for_everyone(table: TableOptions, how: FitOptions, where: EngineOptions) -> bool:
    """Say whether a model for each user is asked for: one who is called "all" is meant where there is one."""
    if table.me != ALL:
        return False
    data = table.data if where.engine == "in-process" else str(table.data).format(rank=Place.told().rank)
    found = ALL not in users_in(data, table.user_column, sep=table.sep, decimal=table.decimal)
    if found and where.gather:
        raise KnobError("`--gather` is for one user 0; leave it out, or name one user in `--me`")
    if found and how.repeats > 1:
        raise KnobError("`--repeats` is for one user; leave it out, or name one in `--me`")
    return found


def train_all(table: TableOptions, rule: RuleOptions, how: FitOptions) -> None:
    """Train a model for each user of the table, and say who gains."""
    from coterie.tables.everyone import fit_everyone

    columns = {name: value for name, value in table.settings().items() if name != "me"}
    users, console = users_from_table(table.data, seed=how.seed, **columns), terminal.console()
    try:
        runs = fit_everyone(users, rule.build, user_column=table.user_column, **how.settings())
    except KeyboardInterrupt:  # pressed twice
        runs = None
    if runs is None:
        console.print(f"stopped; everything is saved in {how.out}, and the same command with --resume goes on")
        raise typer.Exit(130)
    console.print(runs.summary().splitlines()[0], highlight=False)
    for line in map(str, runs.overall):
        console.print(line, highlight=False)
    console.print(rich_table(f"{table.target}, {users.preparation.kind}", _rows(runs)))
    console.print(f"Models, records and pages, the first of them index.html: {how.out}")
    console.print(f"To apply them: coterie predict {how.out} FILE")


def _rows(runs: Runs) -> list[dict[str, str]]:
    """Return a row for each user: the verdict, and the numbers that it rests on."""
    measures = [one.measure for one in runs.overall]
    rows = []
    for gain in runs.gains:
        record = runs.runs[gain.name].record
        told = gain.told()
        rows.append(
            {"user": gain.name, "verdict": HEADLINES[gain.verdict.finding]}
            | {f"{name}, against alone": told.get(name, "") for name in measures}
            | {"listens to": listened_to(record.configuration, record.end)}
        )
    return rows
