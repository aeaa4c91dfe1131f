"""A plan in words and tables, for the terminal and for pages."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from coterie.theory.choices import least_noise_alpha
from coterie.theory.constants import Constants
from coterie.theory.correction import hessian_gap_limit
from coterie.theory.descent import oracle
from coterie.theory.plan import Choice

TITLES = {"alone": "Alone", "wga": "WGA", "bc_oracle": "BC, oracle", "bc": "BC"}


def verdict(problem: Constants, choices: Mapping[str, Choice], steps: int) -> list[str]:
    """Say in plain words whether averaging pays, and whether bias correction does."""
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


def _obstacle(problem: Constants, steps: int) -> str:
    """Say what keeps bias correction from the linear speedup."""
    alpha = least_noise_alpha(problem)
    if not alpha:
        return "there is no noise to save"
    lr = oracle(problem, alpha).best_gradient_lr(steps)
    limit = hessian_gap_limit(problem, alpha, lr)
    if problem.hessian_gap > limit:
        return (
            f"following the bias as it drifts costs more than the noise; it needs a Hessian gap below {limit:.2g}"
        )
    return (
        "the first estimate of the bias costs more than the noise; it needs more steps or a better first estimate"
    )


def numbers(choice: Choice) -> dict[str, float | None]:
    """Return what a method has, as JSON knows it: no infinities."""
    values = {name: float(value) for name, value in asdict(choice).items() if value is not None}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def cells(name: str, row: Mapping[str, float | None]) -> dict[str, str]:
    """Return a row of the table, in words and four digits."""

    def cell(key: str) -> str:
        value = row.get(key, math.nan)
        return "∞" if value is None else "" if math.isnan(value) else f"{value:.4g}"

    columns = {"alpha": "alpha", "beta": "beta", "step size": "lr", "excess loss ≤": "bound", "speedup": "speedup"}
    return {"method": TITLES[name]} | {column: cell(key) for column, key in columns.items()}


def note(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    """Say what the bounds of a table are on."""
    return (
        f"Bounds are on the last step; BC's is on the mean over the run, where Alone's is "
        f"{rows['bc']['alone_bound']:.4g}."
    )


def in_short(choices: Mapping[str, Choice]) -> str:
    """Return a plan in one line."""
    shown = []
    for name in ("wga", "bc"):
        row = numbers(choices[name])
        knobs = [f"{key} {row[key]:.3g}" for key in ("alpha", "beta", "speedup") if row.get(key) is not None]
        shown.append(f"{TITLES[name]} {', '.join(knobs)}")
    return "; ".join(shown)
