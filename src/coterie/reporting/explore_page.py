"""Several runs on one page.

Each one's verdict, numbers, cost and weights, and their curves together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.recording.record import Record
from coterie.reporting.page import Lead, Points, Section, interval_chart, line_chart, write_page
from coterie.reporting.run_page import interval
from coterie.reporting.summary import length_of
from coterie.reporting.verdict import HEADLINES, verdict
from coterie.reporting.whom import whom_section

CURVES = 6
"""How many runs a chart of curves has."""


def write_explore_page(path: Path, records: Mapping[str, Record]) -> Path:
    """Write a page that compares ended runs, given by name, and return its path."""
    findings = [
        HEADLINES[verdict(record.configuration, record.end).finding] for record in records.values()
    ]
    counted = ", ".join(
        f"{findings.count(each)} × {each.lower()}" for each in dict.fromkeys(findings)
    )
    lead = Lead(
        f"{len(records)} runs: {counted}. Each verdict is that of its run by itself. If you take"
        " the run with the best test numbers, these numbers chose it, and look better than they"
        " are."
    )
    of = {
        (record.configuration.me, *record.configuration.data.split()[:1])
        for record in records.values()
    }
    unlike = "Not all runs have the same examples of the same user: do not compare their losses."
    sections = [
        Section(
            "Side by side",
            [unlike] if len(of) > 1 else [],
            [[_row(*each) for each in records.items()]],
        ),
        *_against_alone(records),
        *_loss_curves(records),
        *(_of_run(name, record) for name, record in records.items()),
    ]
    return write_page(path, f"{len(records)} runs compared", sections, lead=lead)


def _row(name: str, record: Record) -> dict[str, Any]:
    """Return what the table says of a run.

    Its test numbers, else those on its validation examples.
    """
    configuration, end = record.configuration, record.end
    which, measures = end.judged_on
    numbers = ", ".join(f"{measure} {value:.4g}" for measure, value in measures.items())
    return {
        "run": name,
        "verdict": HEADLINES[verdict(configuration, end).finding],
        "user": configuration.me.name,
        "rule": configuration.rule,
        "numbers": f"{which}: {numbers}" if measures else "–",
        "length": length_of(record),
        "seconds": f"{end.seconds:.3g}",
        "peers' gradients": f"{end.gradients_of_others(configuration.me.name):,}",
    }


def _against_alone(records: Mapping[str, Record]) -> list[Section]:
    """Return for each measure the differences of all runs that have it.

    Nothing where none has one.
    """
    intervals: dict[str, list[Any]] = {}
    for name, record in records.items():
        said = verdict(record.configuration, record.end)
        for measure, one in said.measures.items():
            shown = interval(f"{name}, {measure}", one, said.clear.get(measure), said.comparison)
            intervals.setdefault(measure, []).append(shown)
    charts = [
        interval_chart(group, f"difference to alone in {measure}")
        for measure, group in intervals.items()
    ]
    if charts:
        return [Section("Against training alone", ["Right of the mark is better."], charts=charts)]
    return []


def _loss_curves(records: Mapping[str, Record]) -> list[Section]:
    lines: dict[str, Points] = {
        name: record.curve("validation_loss") for name, record in records.items()
    }
    lines = {name: line for name, line in list(lines.items())[:CURVES] if line[0]}
    more = [f"The first {CURVES} runs."] if len(records) > CURVES else []
    counts = " or ".join(dict.fromkeys(records[name].configuration.counts for name in lines))
    charts = [line_chart(lines, counts, "validation loss")]
    return [Section("Validation loss", more, charts=charts)] if lines else []


def _of_run(name: str, record: Record) -> Section:
    """Return what one run says by itself."""
    said = verdict(record.configuration, record.end).sentence
    whom = whom_section(record.configuration, record.end)
    return Section(name, [said, *whom.text], charts=whom.charts, folded=True)
