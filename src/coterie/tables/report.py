"""The page of a table's run: that of any run, and how good the predictions for the test rows are."""

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.data import Preparation
from coterie.recording import files
from coterie.reporting.charts import Interval, Points, interval_chart, line_chart
from coterie.reporting.page import Section
from coterie.reporting.run_page import write_run_page
from coterie.reporting.verdict import difference, serves_alone
from coterie.tables.quality import Quality, quality
from coterie.training.run import Run

if TYPE_CHECKING:
    import pandas as pd

FILE = "evaluation.json"
"""Holds the numbers of the page."""
SHOWN = 15
"""How many columns the page shows at most."""


def write_report(
    folder: Path,
    run: Run,
    preparation: Preparation,
    target: str,
    test_rows: "pd.DataFrame",
    *,
    more: Sequence[Section] = (),
) -> Quality | None:
    """Write the page of a run, and the numbers of its test rows, if any, to `evaluation.json`; return these."""
    if not len(test_rows):
        write_run_page(folder / "index.html", run.record, run.state.get("weight"), more=more)
        return None
    alone = None if serves_alone(run.record.end) or run.alone is None else run.alone
    judged = quality(run.model, alone, preparation, target, test_rows)
    files.write_json(folder / FILE, judged.to_plain())
    sections = [_predictions(judged, preparation, target, told=run.test), _effects(judged, target), *more]
    write_run_page(folder / "index.html", run.record, run.state.get("weight"), more=sections)
    return judged


def _predictions(judged: Quality, preparation: Preparation, target: str, told: Container[str]) -> Section:
    """Return how good the predictions are, in numbers and in pictures; what the page has told is left out."""
    classes = preparation.kind == "classification"
    text = [f"The model served, on {judged.rows} test rows that chose nothing."]
    if classes:
        text.append(
            "Sensitivity: the share of a class's rows that is predicted to be of it. Specificity: the share of the "
            "other rows that is not. Precision: the share of the rows predicted to be of it that is. In brackets "
            "95 % intervals. AUC: how often a row of the class has a higher probability of it than another row."
        )
    tables = [_by_class(judged), _confusion(judged, target)] if classes else []
    tables += [rows] if (rows := _measures(judged, told)) else []
    charts = _curves(judged, preparation, target)
    return Section(f"How good predictions of {target} are", text, tables, charts=charts)


def _measures(judged: Quality, told: Container[str]) -> list[dict[str, str]]:
    """Return a row for each further measure, beside the model trained alone where that is another."""
    more = [name for name in judged.served if name not in told]
    if judged.comparison is None:
        return [{"measure": name, "served": f"{judged.served[name]:.4g}"} for name in more]
    measures = {name: judged.comparison.measures[name] for name in more}
    return [
        {"measure": name, "served": f"{one.ours:.4g}", "alone": f"{one.alone:.4g}", "difference": difference(one)}
        for name, one in measures.items()
    ]


def _by_class(judged: Quality) -> list[dict[str, str]]:
    return [
        {
            "class": one.name,
            "rows": str(one.rows),
            "sensitivity": str(one.sensitivity),
            "specificity": str(one.specificity),
            "precision": str(one.precision),
            "AUC": "–" if math.isnan(one.auc) else f"{one.auc:.3f}",
        }
        for one in judged.by_class
    ]


def _confusion(judged: Quality, target: str) -> list[dict[str, str]]:
    names = [one.name for one in judged.by_class]
    return [
        {f"{target} is": name, **{f"predicted {other}": f"{n:.4g}" for other, n in zip(names, counts, strict=True)}}
        for name, counts in zip(names, judged.confusion, strict=True)
    ]


def _curves(judged: Quality, preparation: Preparation, target: str) -> list[str]:
    charts = []
    lines: dict[str, Points] = {name: curve for name, curve in judged.roc.items() if curve[0]}
    if lines:
        last = preparation.classes[-1]
        others = f"share of the other rows predicted to be {last}"
        charts.append(line_chart({**lines, "by chance": ([0, 1], [0, 1])}, others, f"sensitivity for {last} (ROC)"))
    bins = judged.calibration
    if len(bins) > 1:
        charts.append(_calibration_chart(judged, preparation, target))
    return charts


def _calibration_chart(judged: Quality, preparation: Preparation, target: str) -> str:
    bins, classes = judged.calibration, preparation.classes
    told, true = [one.told for one in bins], [one.came_true for one in bins]
    ends = [0.0, 1.0] if classes else [min(told), max(told)]
    low, high = ([one.came_true + side * one.error for one in bins] for side in (-2, 2))
    if classes:
        low, high = [max(0.0, y) for y in low], [min(1.0, y) for y in high]
        of = str(classes[-1]) if len(classes) == 2 else "the predicted class"
        names = f"predicted probability of {of}", f"share that came true (calibration, {len(bins)} bins)"
    else:
        names = f"predicted {target}", f"mean of what came true (calibration, {len(bins)} bins)"
    lines: dict[str, Points] = {"came true, ± two standard errors": (told, true), "as predicted": (ends, ends)}
    return line_chart(lines, *names, bands={"came true, ± two standard errors": (low, high)})


def _effects(judged: Quality, target: str) -> Section:
    """Return what the predictions rest on."""
    shown = judged.effects[:SHOWN]
    text = [
        f"By how much the loss on the test rows rises where a column's values are exchanged among them: what the "
        f"predictions of {target} rest on, not what causes it. Columns that tell the same share it. Lines are two "
        "standard errors to either side."
    ]
    if more := len(judged.effects) - len(shown):
        text.append(f"The {SHOWN} largest of {len(judged.effects)}; `evaluation.json` has the other {more}.")
    bars = [Interval(one.column, one.rise, one.error, f"{one.rise:+.3f} ± {one.error:.3f}") for one in shown]
    return Section("What predictions rest on", text, charts=[interval_chart(bars, "rise of the loss by column")])


def left_out_section(left_out: Mapping[str, str]) -> Section:
    """Return which peers could not take part, and why."""
    return Section("Who was left out", tables=[[{"peer": name, "why": why} for name, why in left_out.items()]])
