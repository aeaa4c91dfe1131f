"""The benchmark's results as files: the rows, the summary, and a page with tables and figures."""

import inspect
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from coterie.benchmark.cells import Store
from coterie.benchmark.contenders import BUDGET, PLAIN_RATES, RATES
from coterie.benchmark.tasks import GradientAttack, condition_of
from coterie.benchmark.tools import TOOLS
from coterie.benchmark.totals import (
    ALONE,
    HARMED,
    LEVEL,
    PLACE,
    SIGNIFICANT,
    by_condition,
    overall,
    summary,
    table,
)
from coterie.recording import files
from coterie.recording.configuration import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_results(store: Store, out: Path) -> "pd.DataFrame":
    """Write `results.parquet`, `results.json`, `index.html`, tables and figures from all cells.

    Return the rows. Tables are CSV, Markdown and LaTeX, and figures PDF and SVG.
    """
    frame = table(store.rows())
    files.write(out / "results.parquet", frame.to_parquet(index=False))
    parts = {"rows": frame, "summary": summary(frame), "overall": overall(frame)}
    parts["conditions"] = by_condition(frame)
    plain = {
        name: json.loads(part.to_json(orient="records", double_precision=15))
        for name, part in parts.items()
    }
    files.write_json(out / "results.json", {"settings": store.settings} | plain)
    _write_page(out / "index.html", store, parts["summary"], parts["overall"], parts["conditions"])
    _write_for_papers(out, parts)
    return frame


def _write_for_papers(out: Path, parts: Mapping[str, "pd.DataFrame"]) -> None:
    """Write every table as CSV, Markdown and LaTeX, and every figure as PDF and SVG."""
    tables = {"methods": in_short(parts["overall"]), "differences": over_sets(parts["conditions"])}
    for condition, part in parts["summary"].groupby("condition", sort=False):
        tables[str(condition)] = _by_place(part)
        for i, figure in enumerate(_figures(part)):
            for kind, about in (("pdf", {"CreationDate": None}), ("svg", {"Date": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, bbox_inches="tight", metadata=about)
                files.write(out / "figures" / f"{condition}-{i + 1}.{kind}", buffer.getvalue())
    for name, rows in tables.items():
        frame = pd.DataFrame(rows)
        texts = {"csv": frame.to_csv(index=False), "md": markdown(rows), "tex": latex(rows)}
        for kind, text in texts.items():
            files.write(out / "tables" / f"{name}.{kind}", text.encode())


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(markdown([{"method": "wga", "gain": "+0.1"}]))
        | method | gain |
        |---|---|
        | wga | +0.1 |
        <BLANKLINE>
    """
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)] if rows else []
    written = ["| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines]
    written[1:1] = ["|" + "---|" * len(rows[0])] if rows else []
    return "\n".join([*written, ""])


def latex(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""Return a table in LaTeX, for the package `booktabs`.

    Example:
        >>> print(latex([{"method": "a_b", "gain": "+0.1 ± 0.02"}]))
        \begin{tabular}{lr}
        \toprule
        method & gain \\
        \midrule
        a\_b & +0.1 $\pm$ 0.02 \\
        \bottomrule
        \end{tabular}
        <BLANKLINE>
    """
    frame = pd.DataFrame(rows).astype(str)
    columns = "l" + "r" * (frame.shape[1] - 1)
    text = frame.to_latex(index=False, escape=True, column_format=columns)
    return text.replace("±", r"$\pm$").replace("−", "$-$")


def in_short(totals: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return a row a method.

    Of how many sets and conditions, in how many better, worse, near the best.
    """
    return [
        {
            "method": row["method"],
            "of": row["places"],
            "better/worse": f"{row['better']}/{row['worse']}",
            "by chance": f"{row['by_chance']:.1f}",
            "corrected": f"{row['surely_better']}/{row['surely_worse']}",
            "near best": row["near_best"],
            "harmed": f"{row['harmed']} of {row['users']}",
            "by chance ": f"{row['harmed_by_chance']:.1f}",
            "settings": f"{row['settings']:.0f}",
        }
        for row in totals.to_dict("records")
    ]


def conclusion(totals: "pd.DataFrame") -> str:
    """Say which methods are near the best most often, how one of them does beside Alone, where a tool wins."""
    if totals["method"].isin(ALONE).all():
        return "Only Alone is measured yet; there is nothing to compare it with."
    first = totals[totals["near_best"] == totals["near_best"].max()]
    best = first.iloc[0]
    most = (
        f"Of {len(totals)} methods {', '.join(f'`{name}`' for name in first['method'])} "
        f"{'is' if len(first) == 1 else 'are'} near the best most often: in {best['near_best']} of "
        f"{int(totals['places'].max())} sets and conditions."
    )
    if best["users"] == best["places"]:
        return (
            f"{most} With one user each there are no standard errors: no method can be called"
            " better or worse."
        )
    beside = (
        ""
        if len(first) > 1
        else (
            f" It is better than the best Alone by {SIGNIFICANT:g} standard errors in"
            f" {best['better']} and worse in {best['worse']}; chance would show"
            f" {best['by_chance']:.1f} of each."
        )
    )
    wins = totals[totals["method"].isin(TOOLS) & (totals["best"] > 0)]
    where = ", ".join(f"`{row['method']}` in {row['best']}" for row in wins.to_dict("records"))
    return (
        f"{most}{beside}"
        f" {f'Plain tools have the highest mean: {where}.' if where else 'No plain tool wins.'}"
    )


def over_sets(conditions: "pd.DataFrame", name: str = "difference") -> list[dict[str, Any]]:
    """Return a row a method.

    A mean difference over the sets in each condition, errors between sets.
    """
    empty = dict.fromkeys(conditions["condition"], "")  # where a method is not measured
    rows: dict[str, dict[str, Any]] = {}
    for row in conditions.to_dict("records"):
        told = rows.setdefault(row["method"], {"method": row["method"], **empty})
        told[row["condition"]] = _number(row, name, "+.3f")
    return list(rows.values())


def _by_place(means: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return a row a set, model and condition.

    The best Alone's score, and each method's difference to it.
    """
    rows = []
    methods = list(means["method"].unique())
    for place, part in means.groupby(PLACE, sort=False):
        of = {row["method"]: row for row in part.to_dict("records")}
        best = next(iter(of.values()))["best_alone"]
        row = dict(zip(PLACE, place, strict=True)) | {
            "best alone": _number(of[best], "score", ".3f")
        }
        rows.append(
            row | {m: _number(of[m], "difference", "+.3f") if m in of else "" for m in methods}
        )
    return rows


def _write_page(
    path: Path,
    store: Store,
    means: "pd.DataFrame",
    totals: "pd.DataFrame",
    conditions: "pd.DataFrame",
) -> Path:
    from coterie.reporting.page import Lead, Section, write_page

    compared = int((means["method"] != means["best_alone"]).sum())
    about = resources.files("coterie.benchmark").joinpath("results.txt").read_text("utf-8")
    said = about.format(
        **{name: counted(int(means[name].max()), name[:-1]) for name in ("users", "seeds")},
        budget=BUDGET,
        rates=", ".join(map(str, RATES)),
        plain_rates=", ".join(map(str, PLAIN_RATES)),
        steps=store.steps,
        alone=" and ".join(f"`{name}`" for name in ALONE),
        compared=compared,
        significant=f"{SIGNIFICANT:g}",
        level=f"{LEVEL:.0%}",
        harmed=f"{HARMED:g}",
    )
    text = [" ".join(paragraph.split()) for paragraph in said.split("\n\n")]
    loss = over_sets(conditions, "loss_difference")
    sections = [
        Section("What was measured", text, [in_short(totals), over_sets(conditions)]),
        Section("Log loss against the best Alone, sets with classes", ["Less is better."], [loss]),
    ]
    for condition, part in means.groupby("condition", sort=False):
        rows = [{k: v for k, v in row.items() if k != "condition"} for row in _by_place(part)]
        made = condition_of(str(condition))
        done = [str(made) if isinstance(made, GradientAttack) else inspect.getdoc(made) or ""]
        sections.append(Section(f"Condition: {condition}", done, [rows], _figures(part)))
    seconds = "Seconds are of CPU time, of all settings tried."
    sections.append(Section("Everything", [seconds], [_everything(means)]))
    return write_page(path, "Benchmark on real users", sections, lead=Lead(conclusion(totals)))


def _figures(part: "pd.DataFrame") -> list["Figure"]:
    """Return a figure for each metric, since their units differ."""
    from coterie.reporting.figures import differences

    drawn = []
    for metric, rows in part[part["method"] != part["best_alone"]].groupby("metric", sort=False):
        values: dict[str, dict[str, tuple[float, float]]] = {}
        for row in rows.to_dict("records"):
            pair = row["difference"], row["difference_error"]
            values.setdefault(f"{row['set']}, {row['model']}", {})[row["method"]] = pair
        drawn.append(differences(values, "", "accuracy" if metric == "accuracy" else "−RMSE"))
    return drawn


def _everything(means: "pd.DataFrame") -> list[dict[str, Any]]:
    return [
        {
            **{key: row[key] for key in (*PLACE, "method")},
            "score": _number(row, "score", ".3f"),
            "against the best Alone": _number(row, "difference", "+.3f"),
            "loss": f"{row['loss']:.3f}",
            "wins/ties/losses": f"{row['wins']}/{row['ties']}/{row['losses']}",
            "harmed": row["harmed"],
            "weight on wrong peers": (
                "" if math.isnan(row["wrong_weight"]) else f"{row['wrong_weight']:.3f}"
            ),
            "settings": f"{row['settings']:.0f}",
            "seconds": f"{row['seconds']:.1f}",
        }
        for row in means.to_dict("records")
    ]


def _number(row: dict[Any, Any], name: str, form: str) -> str:
    error = row[f"{name}_error"]
    return f"{row[name]:{form}}" + ("" if math.isnan(error) else f" ± {error:.3f}")
