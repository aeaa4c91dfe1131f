"""`coterie plan`: what the theory advises for a problem whose constants are known, or measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from coterie import theory
from coterie.cli import terminal
from coterie.cli.terminal import record_of, rich_table
from coterie.errors import DataError, KnobError
from coterie.recording.record import Record
from coterie.reporting.phrases import (
    cells,
    exchange_cells,
    exchange_choices,
    exchange_sentence,
    note,
    numbers,
    verdict,
)
from coterie.theory.estimates import Estimates

NEEDED = ("n_peers", "noise", "bias_floor", "hessian_gap", "smoothness", "pl", "initial_gap")


def plan(
    run: Annotated[
        Path | None, Argument(metavar="[RUN]", help="A run's folder or record, whose measured constants are taken.")
    ] = None,
    *,
    data: Annotated[
        Path | None, Option(help="A table to measure the constants on, as `coterie train` reads it.")
    ] = None,
    user_column: Annotated[str, Option(help="With --data: the column that says whose row it is.")] = "",
    target: Annotated[str, Option(help="With --data: the column to predict.")] = "",
    me: Annotated[str, Option(help="With --data: which user is user 0.")] = "",
    model: Annotated[str, Option(help="With --data: linear, mlp, or module.path:factory.")] = "linear",
    n_peers: Annotated[int | None, Option(help="N, the number of peers.")] = None,
    noise: Annotated[float | None, Option(help="σ_0, the standard deviation of the own gradient noise.")] = None,
    bias_floor: Annotated[
        float | None, Option(help="ζ, the peers' bias where your objective is stationary.")
    ] = None,
    bias_growth: Annotated[
        float | None, Option(help="m, how their squared bias grows with ‖∇f_0‖²; else 0.")
    ] = None,
    hessian_gap: Annotated[float | None, Option(help="δ, how much the peers' Hessians differ from yours.")] = None,
    smoothness: Annotated[float | None, Option(help="L, the smoothness of your objective.")] = None,
    pl: Annotated[float | None, Option(help="μ, its Polyak-Łojasiewicz constant, at most L.")] = None,
    steps: Annotated[int | None, Option(help="T, the number of steps; else the run's, or 1000.")] = None,
    initial_gap: Annotated[float | None, Option(help="F_0, the loss at the start above the least.")] = None,
    peer_noise: Annotated[float | None, Option(help="σ_k of one peer; as --noise if left out.")] = None,
    alpha: Annotated[float | None, Option(help="α for WGA; the best if left out.")] = None,
    exchange_cost: Annotated[
        float | None,
        Option(min=0.0, help="R, what an exchange costs in gradients: also say how often to exchange."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, Option(help="Folder for a page with sliders and the gain-factor picture.")] = None,
) -> None:
    """Say whether collaboration pays: the best alpha, beta and step size of each method, by its bound.

    The constants are given by options, or measured: by a run (`coterie plan RUN`), or now, on a table (--data). An
    option goes before what was measured. Measured peers count as alike, with the mean of their constants.

    Example: coterie plan run --steps 5000 --out plan
    """
    given: dict[str, Any] = {
        "n_peers": n_peers, "noise": noise, "peer_noise": peer_noise, "bias_floor": bias_floor,
        "bias_growth": bias_growth, "hessian_gap": hessian_gap, "smoothness": smoothness, "pl": pl,
        "initial_gap": initial_gap,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if run is not None:
        record = record_of(run)
        steps = record.configuration.steps if steps is None else steps
        given = _alike(_estimates(record, run), steps) | given
    elif data is not None:
        from coterie.tables.measure import measured

        steps = 1000 if steps is None else steps
        given = (
            _alike(measured(data, user_column=user_column, target=target, me=me, model=model, steps=steps), steps)
            | given
        )
    if missing := [name for name in NEEDED if name not in given]:
        raise KnobError(
            f"`--{missing[0].replace('_', '-')}` is missing; give it, or a run whose constants were measured"
        )
    problem, steps = theory.Constants(**given), 1000 if steps is None else steps
    choices = theory.plan(problem, steps, alpha)
    rows = {name: numbers(choice) for name, choice in choices.items()}
    fewer = {} if exchange_cost is None else exchange_choices(problem, steps, exchange_cost)
    if as_json:
        shown = {"exchanges": {kind: asdict(one) for kind, one in fewer.items()}} if fewer else {}
        typer.echo(json.dumps({**rows, **shown}, indent=2))
    else:
        console = terminal.console()
        console.print(rich_table(None, [cells(name, row) for name, row in rows.items()], note(rows)))
        for sentence in verdict(problem, choices, steps):
            console.print(sentence, highlight=False)
        if exchange_cost is not None:
            title = f"In the time of {steps} steps with an exchange each"
            console.print(rich_table(title, exchange_cells(problem, steps, exchange_cost)))
            console.print(exchange_sentence(fewer, exchange_cost), highlight=False)
    if out is not None:
        from coterie.reporting.plan_page import write_plan_page

        page = write_plan_page(out, problem, steps)
        typer.echo(f"wrote {page}, and the picture as PNG and PDF beside it", err=True)


def _estimates(record: Record, run: Path) -> Estimates:
    if not record.configuration.estimates:
        why = record.configuration.not_measured or "it was trained alone, by a method, or with `measure=False`"
        raise DataError(f"the run in {run} has no measured constants: {why}; give them by options")
    return Estimates.from_plain(record.configuration.estimates)


def _alike(estimates: Estimates, steps: int) -> dict[str, Any]:
    """Return the constants of peers that are all alike and together do as those measured, equally weighed."""
    peers = estimates.constants(steps)
    n = len(estimates.peers)

    def mean(values: Any, power: int = 1) -> float:
        return float(np.mean(np.asarray(values) ** power) ** (1 / power))

    return {
        "n_peers": n,
        "noise": peers.noise,
        "peer_noise": mean(peers.peer_noise, 2),
        "bias_floor": mean(peers.bias_floor, 2),
        "bias_growth": mean(peers.bias_growth),
        "hessian_gap": mean(peers.hessian_gap),
        "smoothness": peers.smoothness,
        "pl": peers.pl,
        "initial_gap": peers.initial_gap,
    }
