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
from coterie.benchmark.tasks import CONDITIONS
from coterie.cli import terminal
from coterie.cli.options.groups import grouped
from coterie.cli.terminal import bar, rich_table
from coterie.errors import KnobError
from coterie.recording.claim import claimed

WHICH = (
    'Rules and methods (see `coterie list`), wga-AGGREGATOR, between commas; or "all". If left out:'
    f" {', '.join(DEFAULT)}."
)


@grouped
def bench(
    out: Path,
    data: Path | None = None,
    sets: str = "",
    methods: Annotated[str, Option(help=WHICH)] = "",
    conditions: str = "",
    attack: str = "",
    attackers: Annotated[int | None, Option(min=1)] = None,
    models: str = "",
    users: int = 3,
    seeds: int = 1,
    steps: int = 60,
    knob: Annotated[list[str] | None, Option(metavar="NAME=VALUE,VALUE")] = None,
    jobs: Annotated[int | None, Option(min=1)] = None,
) -> None:
    """Compare the methods on real users: honest peers, wrong peers, users alike, a user like nobody.

    Every method chooses its settings by the user's validation examples, out of as many; the test
    examples are used once. Ctrl-C loses nothing that is finished; the same command goes on, and one
    that asks for more adds to what is there.

    Example: coterie bench --data sets --sets digits,vowels --users 5 --seeds 2 --out bench

    Your own rule or set beside them: coterie --import own.py bench --methods own --sets digits,mine
    --out bench

    Args:
        out: Folder for cells, results and the page; what is there is kept.
        data: Folder of the sets, one folder each; digits needs none.
        sets: Sets, between commas; all that are there if left out.
        methods: What is compared.
        conditions: Conditions, between commas; all if left out.
        attack: Attacks, between commas, each one more condition: peers send what the attack
            says. Of: {attacks}.
        attackers: How many peers attack; half of them if left out.
        models: Models, between commas; each set's first if left out.
        users: How many users of a set are user 0 in turn.
        seeds: How often each is repeated, with other examples and peers.
        steps: Steps of each run.
        knob: Compare values of a knob: each method that takes it becomes one for each value;
            repeat it for another knob.
        jobs: Processes; as many as there are cores if left out.
    """
    import torch

    torch.set_num_threads(1)
    console = terminal.console()
    chosen = _names(sets) or _sets_at_hand(data)
    compared = all_methods() if methods == "all" else _names(methods) or DEFAULT
    contenders = [each for name in compared for each in swept(name, knob or [])]
    attacks = [each + (f"-{attackers}" if attackers else "") for each in _names(attack) or ()]
    if attackers and not attacks:
        raise KnobError("`--attackers` is for `--attack`, which names what they send; give both")
    under = [*(_names(conditions) or (() if attacks else CONDITIONS)), *attacks]
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
