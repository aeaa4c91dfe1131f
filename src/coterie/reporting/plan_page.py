"""The page of a plan.

What the theory advises for some constants, and sliders that show what else would do to it.

Everything that a slider can show is computed here and lies in the page; the page itself only looks
it up.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from coterie.reporting.figures import gain_factor
from coterie.reporting.page import Lead, Section, drawn, write_page
from coterie.reporting.phrases import SOMETHING, TITLES, note, numbers, sure_speedup, verdict
from coterie.theory import Choice, Constants, plan
from coterie.theory.plan import PAYS

POSITIONS = 5
"""How many places a slider has; what was asked for is in the middle where it can be."""
FACTORS = {"peers": 3.0, "noise": 2.0, "bias": 3.0, "steps": 4.0}
"""What one place of a slider multiplies by."""
COLUMNS = {
    "alpha": "alpha",
    "beta": "beta",
    "lr": "step size",
    "bound": "excess loss ≤",
    "speedup": "speedup",
}
DIGITS = 4


def write_plan_page(
    out: Path, problem: Constants, steps: int, doubted: Constants | None = None
) -> Path:
    """Write the page with its sliders, and the gain-factor picture beside it.

    Return the page's path.

    For `doubted` see `coterie.reporting.phrases.verdict`.
    """
    choices = plan(problem, steps)
    first, *rest = verdict(problem, choices, steps, doubted)
    figure = gain_factor(mark=_mark(problem, steps))
    out.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "pdf"):
        figure.savefig(out / f"gain_factor.{kind}")
    table, middle = lookup(problem, steps), _asked(problem, steps)
    constants = [
        {"constant": name, "value": f"{value:.4g}"} for name, value in _scalars(problem).items()
    ]
    rows = {name: numbers(choice) for name, choice in choices.items()}
    picture = (
        "The speedup of averaging in the long run, for m = 0 and peers as noisy as user 0; the mark"
        " is this problem. The speedup above is that of the whole bound, the start included."
    )
    found = drawn("looked_up", columns=["method", *COLUMNS.values()])
    sections = [
        Section("", [*rest, note(rows)]),
        Section("What if?", charts=[_sliders(table["values"], middle), found]),
        Section(
            "The constants",
            tables=[[*constants, {"constant": "steps", "value": str(steps)}]],
            folded=True,
        ),
        Section("Gain over all problems", [picture], figures=[figure], folded=True),
    ]
    data = json.dumps(table).replace("<", "\\u003c")
    script = (
        "const PLAN ="
        f" {data};\n{resources.files('coterie.reporting').joinpath('plan.js').read_text('utf-8')}"
    )
    finding = "better" if sure_speedup(choices["wga"], steps, doubted) > PAYS else ""
    title = "Plan: does collaboration pay, by the theory's bounds?"
    return write_page(
        out / "index.html", title, sections, lead=Lead(first, "", finding), script=script
    )


def lookup(problem: Constants, steps: int) -> dict[str, Any]:
    """Return what the sliders can show.

    Their values, and for each combination of places a row for each method.

    Rows lie in the order of the places of peers, noise, bias and steps, the last fastest; a row has
    alpha, beta, step size, bound and speedup of each method, null where there is none or it is
    infinite.
    """
    values = {name: _places(name, value) for name, value in _asked(problem, steps).items()}
    peers, noise, bias, many = np.meshgrid(
        *(np.array(places) for places in values.values()), indexing="ij"
    )
    ratio = 1.0
    if problem.peer_noise is not None:
        ratio = float(problem.peer_noise) / (float(problem.noise) or 1.0)
    changed = replace(
        problem, n_peers=peers, noise=noise, peer_noise=ratio * noise, bias_floor=bias
    )
    choices = plan(changed, many)
    shape = peers.shape
    rows = np.stack(
        [_column(choice, name, shape) for choice in choices.values() for name in COLUMNS], axis=-1
    )
    flat = [[_number(value) for value in row] for row in rows.reshape(-1, rows.shape[-1])]
    titles = [TITLES[name] for name in choices]
    something = SOMETHING * float(problem.initial_gap)
    return {
        "values": values,
        "methods": titles,
        "columns": list(COLUMNS),
        "something": something,
        "rows": flat,
    }


def _asked(problem: Constants, steps: int) -> dict[str, float]:
    """Return what each slider begins at."""
    return {
        "peers": float(problem.n_peers),
        "noise": float(problem.noise),
        "bias": float(problem.bias_floor),
        "steps": float(steps),
    }


def _places(name: str, middle: float) -> list[float]:
    """Return the values that a slider has, what was asked for among them.

    Whole ones where they count.
    """
    powers = range(-(POSITIONS // 2), POSITIONS // 2 + 1)
    values = [middle * FACTORS[name] ** k for k in powers]
    if name == "bias" and not middle:
        values = [0.0, *(10.0 ** (k - POSITIONS + 1) for k in range(1, POSITIONS))]
    if name not in ("peers", "steps"):
        return values
    whole = [max(1.0, round(value)) for value in values]
    if len(set(whole)) == POSITIONS:
        return whole
    least = max(1.0, middle - POSITIONS // 2)  # few of a thing: one more or less at each place
    return [least + k for k in range(POSITIONS)]


def _column(
    choice: Choice, name: str, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    value = getattr(choice, name)
    return np.broadcast_to(
        np.asarray(math.nan if value is None else value, dtype=np.float64), shape
    )


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _sliders(values: Mapping[str, Sequence[float]], asked: Mapping[str, float]) -> str:
    """Return the sliders, each at what was asked for."""
    words = {
        "peers": "peers N",
        "noise": "own noise σ₀",
        "bias": "peers' bias ζ",
        "steps": "steps T",
    }
    each = [(name, words[name], of, of.index(asked[name])) for name, of in values.items()]
    return drawn("sliders", sliders=each)


def _scalars(problem: Constants) -> dict[str, float]:
    return {
        name.replace("_", " "): float(value)
        for name, value in asdict(problem).items()
        if value is not None
    }


def _mark(problem: Constants, steps: int) -> tuple[float, float] | None:
    """Return the point Lσ_0²/(μTζ²), N of a problem in the picture."""
    bias = problem.pl * steps * problem.bias_floor**2
    noise = problem.smoothness * problem.noise**2
    return (float(noise / bias) if bias else math.inf, float(problem.n_peers)) if noise else None
