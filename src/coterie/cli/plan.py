"""`coterie plan`: what the theory advises for a problem whose constants are known."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from coterie import theory
from coterie.cli import terminal
from coterie.cli.terminal import rich_table
from coterie.theory.phrases import cells, note, numbers, verdict


def plan(
    *,
    n_peers: Annotated[int, Option(help="N, the number of peers.")],
    noise: Annotated[float, Option(help="σ_0, the standard deviation of the own gradient noise.")],
    bias_floor: Annotated[float, Option(help="ζ, the peers' bias where your objective is stationary.")],
    bias_growth: Annotated[float, Option(help="m, how their squared bias grows with ‖∇f_0‖².")] = 0.0,
    hessian_gap: Annotated[float, Option(help="δ, how much the peers' Hessians differ from yours.")],
    smoothness: Annotated[float, Option(help="L, the smoothness of your objective.")],
    pl: Annotated[float, Option(help="μ, its Polyak-Łojasiewicz constant, at most L.")],
    steps: Annotated[int, Option(help="T, the number of steps.")],
    initial_gap: Annotated[float, Option(help="F_0, the loss at the start above the least.")],
    peer_noise: Annotated[float | None, Option(help="σ_k of one peer; as --noise if left out.")] = None,
    alpha: Annotated[float | None, Option(help="α for WGA; the best if left out.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, Option(help="Write the gain-factor picture, this point marked.")] = None,
) -> None:
    """Say whether collaboration pays: the best alpha, beta and step size of each method, by its bound."""
    problem = theory.Constants(
        n_peers=n_peers,
        noise=noise,
        peer_noise=peer_noise,
        bias_floor=bias_floor,
        bias_growth=bias_growth,
        hessian_gap=hessian_gap,
        smoothness=smoothness,
        pl=pl,
        initial_gap=initial_gap,
    )
    choices = theory.plan(problem, steps, alpha)
    rows = {name: numbers(choice) for name, choice in choices.items()}
    sentences = verdict(problem, choices, steps)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        console = terminal.console()
        console.print(rich_table(None, [cells(name, row) for name, row in rows.items()], note(rows)))
        for sentence in sentences:
            console.print(sentence, highlight=False)
    if out is not None:
        page = _write_picture(out, problem, steps, rows, sentences)
        typer.echo(f"wrote {page}, and the picture as PNG and PDF beside it", err=True)


def _write_picture(
    out: Path, problem: theory.Constants, steps: int, rows: dict[str, dict[str, float | None]], sentences: list[str]
) -> Path:
    """Write the gain-factor picture as PNG and PDF, and a page with it, the table and the sentences."""
    from coterie.reporting.figures import gain_factor
    from coterie.reporting.page import Section, write_page

    bias = problem.pl * steps * problem.bias_floor**2
    noise = problem.smoothness * problem.noise**2
    point = (float(noise / bias) if bias else math.inf, float(problem.n_peers)) if noise else None
    figure = gain_factor(mark=point)
    out.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "pdf"):
        figure.savefig(out / f"gain_factor.{kind}")
    text = [*sentences, note(rows), "The picture is for m = 0 and peers as noisy as user 0."]
    table = [cells(name, row) for name, row in rows.items()]
    return write_page(out / "index.html", "Plan", [Section("Does collaboration pay?", text, [table], [figure])])
