"""The page of one run: the verdict, whom the model listens to, how Alone does, the cost; details fold."""

from collections.abc import Sequence
from pathlib import Path

from coterie.recording.configuration import Configuration
from coterie.recording.record import Record
from coterie.recording.result import Difference, End
from coterie.reporting.charts import Interval, interval_chart
from coterie.reporting.page import Lead, Section, Tile, write_page
from coterie.reporting.run_details import details
from coterie.reporting.summary import beside_alone
from coterie.reporting.verdict import Verdict, difference, verdict
from coterie.reporting.whom import whom_section

HEADLINES = {
    "better": "Better than alone",
    "worse": "Worse than alone",
    "mixed": "Better in one measure, worse in the other",
    "unclear": "No clear difference to training alone",
    "alone": "Trained alone",
    "unknown": "Not compared with training alone",
}


def write_run_page(
    path: Path, record: Record, weight: float | None = None, *, more: Sequence[Section] = ()
) -> Path:
    """Write the page of an ended run to one HTML file that needs nothing else, and return its path.

    More sections come before the details.
    """
    title = f"A model for {record.configuration.me.name}"
    return write_page(path, title, [*_first(record), *more, *details(record, weight)], lead=lead(record))


def lead(record: Record) -> Lead:
    """Return what the page of a run says first."""
    said = verdict(record.configuration, record.end)
    tiles = [*_measured(said, record.end), _cost(record.configuration, record.end)]
    return Lead(said.sentence, HEADLINES[said.finding], said.finding, tiles)


def _measured(said: Verdict, end: End) -> list[Tile]:
    """Return the numbers that the verdict rests on; the model's own where there is nothing to compare."""
    if said.measures:
        return [
            Tile(f"{name}, against alone", difference(one), f"{one.ours:.4g} served, {one.alone:.4g} alone")
            for name, one in said.measures.items()
        ]
    which, measures = end.judged_on
    return [Tile(f"{which} {name}", f"{value:.4g}", "of the model served") for name, value in measures.items()][:2]


def _cost(configuration: Configuration, end: End) -> Tile:
    """Return what the run cost: time, gradients, and what travelled."""
    me = configuration.me.name
    own = end.costs[me].gradients if me in end.costs else 0
    theirs = end.gradients_of_others(me)
    sent = end.traffic[me].bytes_sent + end.traffic[me].bytes_received if me in end.traffic else 0
    travelled = f", {sent / 1e6:.3g} MB" if sent else ""
    length = configuration.counts.removesuffix("s") if end.step == 1 else configuration.counts
    note = f"{end.step:,} {length}; {own:,} own gradients, {theirs:,} of peers{travelled}"
    return Tile("it took", f"{end.seconds:.3g} s", note)


def _first(record: Record) -> list[Section]:
    configuration, end = record.configuration, record.end
    sections = [whom_section(configuration, end)]
    said = verdict(configuration, end)
    comparison = said.comparison
    rows = beside_alone(record)
    if comparison is None:
        return [*sections, *([Section("The model served", tables=[rows])] if rows else [])]
    intervals = [interval(name, one, said.clear.get(name)) for name, one in comparison.measures.items()]
    text = f"On {comparison.on}. Lines are two standard errors to either side; right of the mark is better."
    charts = [interval_chart([one], f"difference of {one.name} to training alone") for one in intervals]
    return [*sections, Section("Beside a model trained alone", [text], [rows], charts=charts)]


def interval(name: str, one: Difference, better: bool | None) -> Interval:
    """Return a difference as an interval, what is better to the right."""
    gain = -one.difference if one.less_is_better else one.difference
    return Interval(name, gain, one.error, difference(one), better)
