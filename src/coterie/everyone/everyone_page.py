"""The page of everyone's runs.

Who gains, who listens to whom, what it cost; in the look of the page of a run.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from coterie.errors import few_of
from coterie.everyone.gains import Gain, beside_pooled, by_chance, counted, overall
from coterie.everyone.runs import Runs
from coterie.recording.record import Record
from coterie.reporting.page import Lead, Section, Tile, drawn, interval_chart, write_page
from coterie.reporting.run_page import interval
from coterie.reporting.summary import length_of
from coterie.reporting.verdict import HEADLINES, difference, weight_of_peers, with_error
from coterie.reporting.whom import weighs
from coterie.training.run import Run

if TYPE_CHECKING:
    import pandas as pd


PEERS = " The last column is what models that follow peers have of the weight in the user's own."


def write_everyone_page(
    path: Path,
    all_runs: Runs,
    pages: Mapping[str, str] | None = None,
    contributions: "pd.DataFrame | None" = None,
) -> Path:
    """Write the page to one HTML file that needs nothing else, and return its path.

    `pages`: by user, where the page of its own run lies, relative to this one. `given`: who gives
    what to whom, of `Runs.contributions`.
    """
    runs, gains = all_runs.runs, all_runs.gains
    asked = {
        name: share for name, run in runs.items() if (share := weight_of_peers(run.record.end))
    }
    sections = [
        _gains(gains),
        *_beside_pooled(gains, runs),
        Section(
            "Who listens to whom",
            [
                "Each row is a user: what each other user has of the weight of its peers, in per"
                " cent. A row without numbers is a user who is served the model trained"
                f" alone{_unweighed(runs)}.{PEERS if asked else ''}"
            ],
            charts=[heat_map(all_runs.weights, asked)],
        ),
        *([] if contributions is None else [_contributed(contributions)]),
        Section(
            "Everybody",
            [*_others(all_runs), *filter(None, [by_chance(gains)])],
            charts=[_links(gains, pages or {})],
        ),
        Section("What it cost each user", tables=[_costs(runs)], folded=True),
    ]
    title = f"A model for each of {len(runs)} users"
    return write_page(path, title, sections, lead=_lead(gains, runs))


def _contributed(contributions: "pd.DataFrame") -> Section:
    """Return the section of who gives and who takes."""
    table = contributions.assign(**{"from all": contributions.sum(axis=1)})
    table.loc["to all"] = table.sum()
    rows = [
        {"user": str(name)}
        | {str(to): "" if to == name else f"{value:+.3g}" for to, value in row.items()}
        for name, row in table.iterrows()
    ]
    text = [
        "Each row is a user: by how much its loss on own rows, by models that did not see them, is"
        " lower with each other one, in the mean over orders in which they could have come (Shapley"
        " values). They are of different losses where targets differ in spread, and have errors: see"
        " each user's own page. They are no price."
    ]
    return Section("Who gives what to whom", text, tables=[rows])


def _lead(gains: list[Gain], runs: Mapping[str, Run]) -> Lead:
    totals = overall(gains)
    tiles = [
        Tile(
            f"{one.measure}, against alone",
            with_error(one.mean, one.error),
            f"mean of {one.users} users; worst-off {one.worst[1]:.4g}, alone"
            f" {one.worst_alone[1]:.4g}",
        )
        for one in totals
    ]
    records = [run.record for run in runs.values()]
    # each that was taken in one program has the seconds of all of it
    together = {each.end.seconds for each in records if _is_together(each)}
    by_itself = [each.end.seconds for each in records if not _is_together(each)]
    seconds = max(together, default=0.0) + sum(by_itself)
    lengths = " or ".join(dict.fromkeys(length_of(run.record) for run in runs.values()))
    tiles.append(Tile("it took", f"{seconds:.3g} s", f"{lengths} for each"))
    findings = {gain.verdict.finding for gain in gains}
    finding = "better" if "better" in findings and not findings & {"worse", "mixed"} else ""
    return Lead(
        counted(gains),
        advice=_advice(gains),
        evidence=beside_pooled(gains),
        finding=finding,
        tiles=tiles,
    )


def _is_together(record: Record) -> bool:
    return record.configuration.runs.startswith("one program of")


def _advice(gains: Sequence[Gain]) -> str:
    """Return what to do, in one sentence."""
    if bad := [gain.name for gain in gains if gain.verdict.finding == "worse"]:
        return f"Give everybody their model, but train alone for {few_of(bad)}."
    if beside_pooled(gains).startswith("A model for each is worse"):
        return "Give everybody the pooled model: it has the lower loss in the mean."
    if any(gain.verdict.finding in ("better", "mixed") for gain in gains):
        return "Give everybody their model."
    return "Nobody clearly gains: training alone would do as well."


def _gains(gains: list[Gain]) -> Section:
    """Return the section with everybody's difference to training alone."""
    compared = [gain for gain in gains if gain.verdict.comparison is not None]
    if not compared:
        served = all(gain.verdict.finding == "alone" for gain in gains)
        why = "Nobody has one trained alone beside"
        if served:
            why = "The model trained alone is served to everybody"
        return Section("Who gains", [f"{why}: there is no difference to show."])
    text = [
        "Differences to a model trained alone, on each user's held-out examples. A difference is"
        " clear where its line leaves out the mark; right of it is better."
    ]
    if alone := [gain.name for gain in gains if gain.verdict.finding == "alone"]:
        text.append(f"Served a model trained alone: {', '.join(alone)}.")
    charts = []
    for key in compared[0].measures:
        ordered = [
            interval(
                gain.name, gain.measures[key], gain.verdict.clear.get(key), gain.verdict.comparison
            )
            for gain in compared
            if key in gain.measures
        ]
        ordered.sort(key=lambda one: -one.value)
        charts.append(
            f"<h3>{escape(key)}</h3>"
            + interval_chart(ordered, f"difference of {key} to training alone")
        )
    return Section("Who gains", text, charts=charts)


def _beside_pooled(gains: Sequence[Gain], runs: Mapping[str, Run]) -> list[Section]:
    """Return everybody's loss beside that of one model for all."""
    each = {gain.name: one for gain in gains if (one := gain.beside_pooled) is not None}
    rows = []
    for name, one in each.items():
        board = runs[name].record.end.account.get("leaderboard", {})
        row = {"user": name, "own model": f"{one.ours:.4g}", "pooled model": f"{one.alone:.4g}"}
        if "test" in (column := board.get("pooled, user as a column", {})):
            row["pooled, user as a column"] = f"{column['test']:.4g}"
        rows.append(row | {"own less pooled": difference(one)})
    rows = [{key: row.get(key, "") for key in max(rows, key=len)} for row in rows]
    text = [
        "Loss on each user's test examples, of its model and of one that was trained on"
        " everybody's training examples alike, and with who it is as a column. The pooled model"
        " also serves users who are not here."
    ]
    return [Section("Why not one model for all?", text, [rows])] if rows else []


def _unweighed(runs: Mapping[str, Run]) -> str:
    """Say who has a model trained with others, and no weights that could be shown.

    "" where nobody has.
    """
    records = {name: run.record for name, run in runs.items()}
    names = [name for name, each in records.items() if not weighs(each.configuration, each.end)]
    return f", or whose rule gave no weights ({', '.join(names)})" if names else ""


def heat_map(weights: "pd.DataFrame", asked: Mapping[str, float] | None = None) -> str:
    """Return a matrix with names as a table whose cells have more colour where the share is larger.

    `asked`: by row what peers have in all, a column of its own.

    Example:
        >>> import pandas as pd
        >>> heat_map(pd.DataFrame([[0.0, 1.0], [0.0, 0.0]], index=["a", "b"], columns=["a", "b"])).count("<td")
        4
    """
    rows = [
        (name, list(zip(weights.columns, row, strict=True)))
        for name, row in zip(weights.index, weights.to_numpy().tolist(), strict=True)
    ]
    return drawn("heat", names=list(weights.columns), rows=rows, asked=asked or {})


def _others(all_runs: Runs) -> list[str]:
    """Return what is to be said beside the verdicts.

    Of the pooled model, and of users who have none.
    """
    notes = [
        f"{name} joined later, and began from {whose}."
        for name, whose in all_runs.began_from.items()
    ]
    notes += [f"{name}: {why}." for name, why in all_runs.not_trained.items()]
    if all_runs.pooled is not None:
        end = all_runs.pooled.record.end
        numbers = ", ".join(
            f"{name} {value:.4g}" for name, value in (end.test or end.validation).items()
        )
        of_all = ""
        if numbers:
            of_all = f" On everybody's {'test' if end.test else 'validation'} examples: {numbers}."
        notes.append(
            "The pooled model, for users who are not here, was trained on all training examples"
            f" alike.{of_all}"
        )
    return notes


def _links(gains: list[Gain], pages: Mapping[str, str]) -> str:
    """Return a table with everybody's verdict, and a link to the page of its run."""
    rows = [
        {
            "name": gain.name,
            "page": quote(pages.get(gain.name, "")),
            "finding": gain.verdict.finding,
            "headline": HEADLINES[gain.verdict.finding],
            "sentence": gain.verdict.sentence,
        }
        for gain in gains
    ]
    return drawn("everybody", rows=rows)


def _costs(runs: Mapping[str, Run]) -> list[dict[str, str]]:
    """Return what all runs together asked of each user."""
    rows = []
    for name in runs:
        each = [run.record.end.costs[name] for run in runs.values() if name in run.record.end.costs]
        rows.append(
            {
                "user": name,
                "gradients": f"{sum(cost.gradients for cost in each):,}",
                "examples passed": f"{sum(cost.examples for cost in each):,}",
                "numbers sent": f"{sum(cost.numbers_sent for cost in each):,}",
                "numbers received": f"{sum(cost.numbers_received for cost in each):,}",
            }
        )
    return rows
