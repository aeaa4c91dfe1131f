"""`coterie plan`: what the theory advises for a problem whose constants are known."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coterie import theory

TITLES = {"alone": "Alone", "wga": "WGA", "bc_oracle": "BC, oracle", "bc": "BC"}


def plan(
    *,
    n_peers: Annotated[int, typer.Option(help="N, the number of peers.")],
    noise: Annotated[float, typer.Option(help="σ_0, the standard deviation of the own gradient noise.")],
    bias_floor: Annotated[float, typer.Option(help="ζ, the peers' bias where your objective is stationary.")],
    bias_growth: Annotated[float, typer.Option(help="m, how their squared bias grows with ‖∇f_0‖².")] = 0.0,
    hessian_gap: Annotated[float, typer.Option(help="δ, how much the peers' Hessians differ from yours.")],
    smoothness: Annotated[float, typer.Option(help="L, the smoothness of your objective.")],
    pl: Annotated[float, typer.Option(help="μ, its Polyak-Łojasiewicz constant, at most L.")],
    steps: Annotated[int, typer.Option(help="T, the number of steps.")],
    initial_gap: Annotated[float, typer.Option(help="F_0, the loss at the start above the least.")],
    peer_noise: Annotated[float | None, typer.Option(help="σ_k of one peer; as --noise if left out.")] = None,
    alpha: Annotated[float | None, typer.Option(help="α for WGA; the best if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the gain-factor picture, this point marked.")] = None,
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
    rows = {name: _numbers(choice) for name, choice in choices.items()}
    sentences = verdict(problem, choices, steps)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows, sentences)
    if out is not None:
        page = _write_picture(out, problem, steps, rows, sentences)
        typer.echo(f"wrote {page}, and the picture as PNG and PDF beside it", err=True)


def verdict(problem: theory.Constants, choices: dict[str, theory.Choice], steps: int) -> list[str]:
    """Say in plain words whether averaging pays, and whether bias correction does.

    Example:
        >>> problem = theory.Constants(smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=9)
        >>> print(verdict(problem, theory.plan(problem, 1000), 1000)[0])
        Collaboration pays: averaging with alpha = 0.9 needs 10 times fewer steps than training alone.
    """
    wga, bc = choices["wga"], choices["bc"]
    if wga.speedup > 1.05:
        first = (
            f"Collaboration pays: averaging with alpha = {wga.alpha:.3g} needs {wga.speedup:.3g} times fewer "
            "steps than training alone."
        )
    else:
        first = (
            "Averaging does not pay: over this many steps the peers' bias outweighs the noise they would save "
            f"(speedup {wga.speedup:.3g})."
        )
    if bc.speedup > 1.05:
        second = (
            f"Bias correction pays by its bound on the mean over the run: {bc.speedup:.3g} times fewer steps "
            f"than training alone, with alpha = {bc.alpha:.3g} and beta = {bc.beta:.3g}."
        )
    else:
        second = (
            f"Bias correction is not shown to pay: by its bound on the mean over the run its speedup is "
            f"{bc.speedup:.3g}, because {_obstacle(problem, steps)}."
        )
    return [first, second]


def _obstacle(problem: theory.Constants, steps: int) -> str:
    """Say what keeps bias correction from the linear speedup."""
    alpha = theory.least_noise_alpha(problem)
    if not alpha:
        return "there is no noise to save"
    lr = theory.oracle(problem, alpha).best_gradient_lr(steps)
    limit = theory.hessian_gap_limit(problem, alpha, lr)
    if problem.hessian_gap > limit:
        return (
            f"following the bias as it drifts costs more than the noise; it needs a Hessian gap below {limit:.2g}"
        )
    return (
        "the first estimate of the bias costs more than the noise; it needs more steps or a better first estimate"
    )


def _numbers(choice: theory.Choice) -> dict[str, float | None]:
    """Return what a method has, as JSON knows it: no infinities."""
    values = {name: float(value) for name, value in asdict(choice).items() if value is not None}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _cells(name: str, row: dict[str, float | None]) -> dict[str, str]:
    """Return a row of the table, in words and four digits."""

    def cell(key: str) -> str:
        value = row.get(key, math.nan)
        return "∞" if value is None else "" if math.isnan(value) else f"{value:.4g}"

    columns = {"alpha": "alpha", "beta": "beta", "step size": "lr", "excess loss ≤": "bound", "speedup": "speedup"}
    return {"method": TITLES[name]} | {column: cell(key) for column, key in columns.items()}


def _note(rows: dict[str, dict[str, float | None]]) -> str:
    return (
        f"Bounds are on the last step; BC's is on the mean over the run, where Alone's is "
        f"{rows['bc']['alone_bound']:.4g}."
    )


def _print_table(rows: dict[str, dict[str, float | None]], sentences: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    cells = [_cells(name, row) for name, row in rows.items()]
    table = Table(caption=_note(rows), caption_justify="left")
    for column in cells[0]:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in cells:
        table.add_row(*row.values())
    console = Console()
    console.print(table)
    for sentence in sentences:
        console.print(sentence, highlight=False)


def _write_picture(
    out: Path,
    problem: theory.Constants,
    steps: int,
    rows: dict[str, dict[str, float | None]],
    sentences: list[str],
) -> Path:
    """Write the gain-factor picture as PNG and PDF, and a page with it, the table and the sentences."""
    from coterie.figures import gain_factor
    from coterie.report import Section, write_page

    bias = problem.pl * steps * problem.bias_floor**2
    noise = problem.smoothness * problem.noise**2
    point = (float(noise / bias) if bias else math.inf, float(problem.n_peers)) if noise else None
    figure = gain_factor(mark=point)
    out.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "pdf"):
        figure.savefig(out / f"gain_factor.{kind}")
    text = [*sentences, _note(rows), "The picture is for m = 0 and peers as noisy as user 0."]
    table = [_cells(name, row) for name, row in rows.items()]
    return write_page(out / "index.html", "Plan", [Section("Does collaboration pay?", text, [table], [figure])])
