"""`coterie train --me all`: a model for each user of a table."""

import functools
import math

import typer

from coterie.cli import terminal
from coterie.cli.options.training import EngineOptions, FitOptions, RuleOptions, TableOptions
from coterie.cli.terminal import quietly, rich_table, to_apply
from coterie.data import users_from_table
from coterie.data.reading import rank_file, users_in
from coterie.engines.processes.rendezvous import Address
from coterie.errors import DataError, KnobError, few_of
from coterie.everyone.gains import beside_pooled
from coterie.everyone.runs import Runs
from coterie.recording.record import Record
from coterie.reporting.verdict import HEADLINES, weight_of_peers
from coterie.reporting.whom import heard, weighs
from coterie.training.run import Stopped

ALL = "all"
"""What `--me` says for everybody."""
LEAST, NAMED = 0.005, 3
"""From which share of the peers' weight on a peer is named, and how many are."""


def for_everyone(
    table: TableOptions, rule: RuleOptions, how: FitOptions, where: EngineOptions
) -> bool:
    """Say whether a model for each user is asked for.

    One who is called "all" is meant where there is one.
    """
    if table.me != ALL:
        return False
    rank = None if where.engine == "in-process" else Address.told().rank
    data = table.data if rank is None else rank_file(table.data, rank)
    everyone = ALL not in users_in(data, table.user_column, table)
    if everyone and where.attack:
        raise KnobError("`--attack` is for the peers of one user; name one in `--me`")
    if everyone and rule.is_method and where.engine != "in-process":
        raise KnobError(
            f"{rule.rule!r} is a method, which `--me all` takes in one process; leave out `--engine`"
        )
    if everyone and rule.tau:
        raise KnobError("`--tau` weighs the peers of one user; leave it out, or name one in `--me`")
    return everyone


def train_all(table: TableOptions, rule: RuleOptions, how: FitOptions) -> None:
    """Train a model for each user of the table, and say who gains."""
    from coterie.tables.fit import fit_everyone

    columns = {name: value for name, value in table.settings().items() if name != "me"}
    split = functools.partial(users_from_table, **columns)
    console, settings = terminal.console(), {**how.settings(), "user_column": table.user_column}
    settings["again"] = [
        functools.partial(quietly, split, seed=how.seed + k) for k in range(1, how.repeats)
    ]
    try:
        runs = fit_everyone(split(seed=how.seed), rule.build, **settings)
    except KeyboardInterrupt:  # pressed twice
        runs = None
    if runs is None:
        console.print(
            f"stopped; everything is saved in {how.out}, and the same command with --resume goes on"
        )
        raise typer.Exit(130)
    console.print(runs.summary().splitlines()[0], highlight=False)
    for line in filter(None, [*map(str, runs.overall), beside_pooled(runs.gains)]):
        console.print(line, highlight=False)
    console.print(rich_table(table.target, _rows(runs)))
    console.print(f"The page of all, which leads to everybody's own: {how.out / 'index.html'}")
    console.print(f"Everybody's model, preparation, record and page, in a folder each: {how.out}")
    console.print(f"To apply them: {to_apply(how.out, how.model)}", soft_wrap=True)
    _check_finite(runs)


def _check_finite(runs: Runs) -> None:
    """Refuse runs whose gradients or test losses are not finite, once everybody's is written."""
    bad = [
        name
        for name, run in runs.runs.items()
        if run.stopped is Stopped.NOT_FINITE or not math.isfinite(run.test.get("loss", 0.0))
    ]
    if bad:
        raise DataError(
            f"the gradients or the test loss of {few_of(bad)} are not finite: do not use those"
            " models; start again with a lower `--lr`, or look for extreme values in their rows"
        )


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
            | {"listens to": _heard(record)}
        )
    return rows


def _heard(record: Record) -> str:
    """Name those with most of the peers' weight, or say that there are none, or that it is not known."""
    if not weighs(record.configuration, record.end):
        return "no weights"
    peers = heard(record.configuration, record.end)
    some = [f"{peer.name} {peer.share:.0%}" for peer in peers if peer.share >= LEAST]
    told = ", ".join(some[:NAMED] or ["nobody"]) + (" …" if len(some) > NAMED else "")
    asked = weight_of_peers(record.end)
    return f"{told} of the peers' {asked:.0%}" if some and asked is not None else told
