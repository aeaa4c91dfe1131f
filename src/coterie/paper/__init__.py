"""Reproduction of the paper: every figure with its settings, exact values and sampled runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import KnobError, did_you_mean
from coterie.paper.lines import TRIALS, Line, Series
from coterie.paper.studies import STUDIES, Study
from coterie.reporting.page import Lead, Section, write_page
from coterie.users.sampling import random_key

__all__ = ["STUDIES", "Line", "Series", "Study", "reproduce"]


def reproduce(names: Sequence[str], out: Path, *, seed: int = 0) -> Iterator[str]:
    """Make figures and yield the name of each once it is written.

    For every figure `NAME.png` and `NAME.pdf`; `results.json` grows with each, `index.html` comes
    last.

    Args:
        names: the figures; all when empty.
        out: the folder to write to.
        seed: what the sampled runs depend on.
    """
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        hint = did_you_mean(unknown[0], STUDIES)
        raise KnobError(
            f"unknown figure {unknown[0]!r}; the figures are {', '.join(STUDIES)}{hint}"
        )
    if out.exists() and not out.is_dir():
        raise KnobError(f"`out` must be a folder, {str(out)!r} is a file; name another")
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    sections = []
    for name in names or STUDIES:
        study = STUDIES[name]
        series = study.series(random_key(seed, name))
        figure = study.draw(series)
        figure.savefig(out / f"{name}.png")
        figure.set_layout_engine("none")  # the next two formats keep the layout of the first
        figure.savefig(out / f"{name}.pdf", metadata={"CreationDate": None})
        results[name] = {
            "series": {one.label: one.results() for one in series},
            "curves": {
                one.label: {"x": one.x.tolist(), "exact": one.exact.tolist()} for one in series
            },
            "knobs": {one.label: one.knobs for one in series if one.knobs},
        }
        (out / "results.json").write_text(
            json.dumps({"figures": results}, indent=1), encoding="utf-8"
        )
        sections.append(
            Section(study.title, [study.claim, study.finding], [_table(study, series)], [figure])
        )
        yield name
    lead = Lead(
        f"{len(sections)} figures, computed exactly: each with what the paper says and what was"
        " found."
    )
    title = "Linear speedup in personalized collaborative learning, reproduced"
    write_page(out / "index.html", title, sections, lead=lead)


def _table(study: Study, series: Sequence[Series]) -> list[dict[str, str]]:
    """Return the numbers beside a figure: exact values, and where the sampled runs lie."""
    return [
        {
            "": one.legend,
            **({"panel": _panel(study, one)} if study.panels else {}),
            "knobs": one.knobs,
            f"{study.unit}, exact": f"{one.exact[-1]:.3g}",
            "stationary, exact": "–" if one.stationary is None else f"{one.stationary:.3g}",
            f"{TRIALS} sampled runs": (
                "–"
                if one.mean is None or one.error is None
                else f"{one.mean[-1]:.3g} ± {one.error[-1]:.1g}"
            ),
        }
        for one in series
    ]


def _panel(study: Study, one: Series) -> str:
    """Return the heading of the panel that a line is in."""
    return next(heading for end, heading in study.panels.items() if one.label.endswith(end))
