"""`coterie bench`: methods compared on real users."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from coterie import benchmark
from coterie.benchmark import SETS, Cell, Selection, Store
from coterie.benchmark.methods import DEFAULT, swept
from coterie.benchmark.methods import names as all_methods
from coterie.benchmark.population import CONDITIONS
from coterie.cli import terminal
from coterie.cli.terminal import bar, rich_table
from coterie.errors import KnobError
from coterie.recording.claim import claimed


def bench(
    out: Annotated[
        Path, Option(help="Folder for cells, results and the page; what is there is kept.")
    ],
    data: Annotated[
        Path | None, Option(help="Folder of the sets, one folder each; digits needs none.")
    ] = None,
    sets: Annotated[str, Option(help="Sets, between commas; all that are there if left out.")] = "",
    methods: Annotated[
        str,
        Option(
            help=(
                'Rules and methods (see `coterie list`), wga-AGGREGATOR, between commas; or "all".'
                " If left out: "
                f"{', '.join(DEFAULT)}."
            )
        ),
    ] = "",
    conditions: Annotated[str, Option(help="Conditions, between commas; all if left out.")] = "",
    models: Annotated[
        str, Option(help="Models, between commas; each set's first if left out.")
    ] = "",
    users: Annotated[int, Option(help="How many users of a set are user 0 in turn.")] = 3,
    seeds: Annotated[
        int, Option(help="How often each is repeated, with other examples and peers.")
    ] = 1,
    steps: Annotated[int, Option(help="Steps of each run.")] = 60,
    knob: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE,VALUE",
            help=(
                "Compare values of a knob: each method that takes it becomes one for each value;"
                " repeat it for another knob."
            ),
        ),
    ] = None,
    jobs: Annotated[
        int | None, Option(min=1, help="Processes; as many as there are cores if left out.")
    ] = None,
) -> None:
    """Compare the methods on real users: honest peers, wrong peers, users alike, a user like nobody.

    Every method chooses its settings by the user's validation examples, out of as many; the test
    examples are used once. Ctrl-C loses nothing that is finished; the same command goes on, and one
    that asks for more adds to what is there.

    Example: coterie bench --data sets --sets digits,vowels --users 5 --seeds 2 --out bench

    Your own rule or set beside them: coterie --import own.py bench --methods own --sets digits,mine
    --out bench
    """
    import torch

    torch.set_num_threads(1)
    console = terminal.console()
    chosen = _names(sets) or _sets_at_hand(data)
    compared = all_methods() if methods == "all" else _names(methods) or DEFAULT
    contenders = [each for name in compared for each in swept(name, knob or [])]
    under = _names(conditions) or tuple(CONDITIONS)
    selection = benchmark.Selection(chosen, contenders, under, _names(models), users, seeds)
    cells = list(selection.cells(data))
    if not cells:
        raise KnobError(
            f"nothing to measure: no set among {', '.join(chosen)} takes a model among {models}"
        )
    with claimed(out):
        store = benchmark.Store(out, steps)
        stopped = _measure(cells, selection, store, data, jobs or os.cpu_count() or 1)
        if any(cell in store for cell in cells):
            frame = benchmark.write_results(store, out)
            places = "Methods over all sets and conditions, compared with the best Alone"
            console.print(rich_table(places, benchmark.in_short(benchmark.overall(frame))))
            console.print(f"For a paper: tables and figures in {out}", soft_wrap=True)
            console.print(
                f"By set, condition and user: index.html, results.json, results.parquet in {out}"
            )
    if stopped:
        console.print("stopped; what is finished is kept, and the same command goes on")
        raise typer.Exit(130)


def _measure(
    cells: Sequence[Cell], selection: Selection, store: Store, data: Path | None, jobs: int
) -> bool:
    """Measure cells and show how it goes; say whether Ctrl-C stopped it."""
    with bar("benchmark", len(cells)) as advance:
        there = sum(cell in store for cell in cells)
        advance(f"{there} of {len(cells)} were there", there)
        try:
            for done in benchmark.measure_cells(cells, selection, store, data, jobs=jobs):
                first = done[0]
                advance(
                    f"{first.set}, {first.condition}, {first.user}, seed {first.seed}", len(done)
                )
        except KeyboardInterrupt:
            return True
    return False


def _sets_at_hand(data: Path | None) -> list[str]:
    """Return the sets whose files are there, and say what the others lack."""
    missing = {name: SETS[name].missing(data) for name in SETS}
    for why in filter(None, missing.values()):
        typer.echo(f"left out: {why}", err=True)
    return [name for name, why in missing.items() if not why]


def _names(between_commas: str) -> list[str] | None:
    return [name.strip() for name in between_commas.split(",") if name.strip()] or None
