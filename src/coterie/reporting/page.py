"""Pages in HTML: sections, tables, and charts as drawn by the templates."""

import functools
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.recording import files

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Tile:
    """A number that stands by itself: its name, the number, and a few words below."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Lead:
    """What a page says first.

    The conclusion in a word and in a sentence, what to do, and the numbers that it rests on.
    """

    sentence: str
    headline: str = ""
    finding: str = ""  # "better" and "worse" have colours
    tiles: Sequence[Tile] = ()
    advice: str = ""  # what to do
    evidence: str = ""  # what the sentence rests on, in full


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, paragraphs, charts, tables and figures, in this order."""

    title: str
    text: Sequence[str] = ()  # paragraphs of plain text; what is between backquotes is set as code
    # each a list of rows, a row what stands in each column
    tables: Sequence[Sequence[Mapping[str, Any]]] = ()
    figures: Sequence["Figure"] = ()  # drawn into the page as SVG
    charts: Sequence[str] = ()  # HTML of `coterie.reporting.page`
    folded: bool = False  # shown as its title, which opens by a click


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    *,
    lead: Lead | None = None,
    script: str = "",
) -> Path:
    """Write a page to one HTML file that needs nothing else, and return its path.

    What is folded comes last.
    """
    text = (
        environment()
        .get_template("page.html")
        .render(title=title, lead=lead, sections=sections, script=script)
    )
    files.write(path, text.encode())
    return path


@functools.cache
def environment() -> "Environment":
    """Return what reads the templates of pages and of their pieces."""
    import jinja2
    from markupsafe import Markup, escape

    def prose(text: str) -> Markup:
        parts = str(escape(text)).split("`")
        marked = (f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
        return Markup("".join(marked))  # noqa: S704  # escaped above

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("coterie.reporting", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["prose"] = prose
    made.filters["kinds"] = _kinds
    made.filters["svg"] = lambda figure: Markup(svg(figure))  # noqa: S704  # our own drawing
    return made


def _kinds(table: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return of each column whether most are words, which stand to the left, or numbers with errors."""
    kinds = {}
    for name in table[0]:
        cells = [text for row in table if (text := str(row[name]))]
        words = bool(cells) and 2 * sum(cell[0].isalpha() for cell in cells) > len(cells)
        kinds[name] = "words" if words else "error" if any("±" in cell for cell in cells) else ""
    return kinds


_THEMED = {
    "#fdfdfd": "var(--page)",
    "#000000": "currentColor",
    "#262626": "currentColor",
    "#444444": "var(--soft)",
    "#555555": "var(--soft)",
    "#dddddd": "var(--line)",
    "#bbbbbb": "var(--line)",
    "#0072b2": "var(--c0)",
    "#e69f00": "var(--c1)",
    "#009e73": "var(--c2)",
    "#cc79a7": "var(--c3)",
    "#d55e00": "var(--c4)",
    "#56b4e9": "var(--c5)",
}
"""What colours of a figure are in a page, so that they suit a dark one too."""


def svg(figure: "Figure") -> str:
    """Return a figure as an SVG element as wide as its place.

    The same figure gives the same text.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "coterie", "svg.fonttype": "none"}):
        figure.savefig(
            buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    head, rest = text.split(">", 1)
    head = " ".join(part for part in head.split(" ") if not part.startswith(("width=", "height=")))
    for colour, themed in _THEMED.items():
        rest = rest.replace(f": {colour}", f": {themed}")
    return f'{head} fill="currentColor">{rest}'


DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")
"""What tells lines apart beside their colour."""

Points = tuple[Sequence[float], Sequence[float]]
"""The places and the values of a line."""


@dataclass(frozen=True)
class Bar:
    """A bar: its name, its length as a share of the longest, what stands at its end, and a note beside the name."""

    name: str
    value: float
    text: str
    note: str = ""


@dataclass(frozen=True)
class Interval:
    """A value with its standard error, on an axis that has a zero."""

    name: str
    value: float
    error: float
    text: str
    better: bool | None = None  # whether the difference is clear, and good or bad
    reach: tuple[float, float] | None = None  # where the interval ends, if not by the error

    @property
    def ends(self) -> tuple[float, float]:
        """The interval that was given, else two standard errors to either side, where they are known.

        One that is given may be without end: the line then leaves the axis.
        """
        if self.reach is not None:
            return self.reach
        reach = 2 * self.error if math.isfinite(self.error) else 0.0
        return self.value - reach, self.value + reach


def bar_chart(bars: Sequence[Bar], label: str) -> str:
    """Return horizontal bars, the longest as wide as there is room.

    Example:
        >>> "width:50.0%" in bar_chart([Bar("a", 2.0, "two"), Bar("b", 1.0, "one")], "some")
        True
    """
    return drawn("bars", bars=bars, most=_most(bars), label=label)


def bar_picture(bars: Sequence[Bar], title: str) -> str:
    """Return the same bars as an SVG file that stands by itself, with a title and colours of its own.

    Example:
        >>> bar_picture([Bar("a", 2.0, "two"), Bar("b", 1.0, "one")], "some").count("<rect")
        3
    """
    return drawn("picture", bars=bars, most=_most(bars), title=title) + "\n"


def interval_chart(intervals: Sequence[Interval], label: str) -> str:
    """Return values with two standard errors to either side, all on one axis with zero in sight.

    Example:
        >>> chart = interval_chart([Interval("a", 1.0, 0.5, "+1 ± 0.5")], "some")
        >>> chart.count("<i "), chart.count("+1 ± 0.5")
        (2, 1)
    """
    ends = [0.0, *(one.value for one in intervals)]
    for one in intervals:
        ends += [end for end in (*one.ends, *replace(one, reach=None).ends) if math.isfinite(end)]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / (high - low)

    rows = [(one, place(one.ends[0]), place(one.value), place(one.ends[1])) for one in intervals]
    return drawn("intervals", rows=rows, zero=place(0.0), label=label)


def line_chart(
    lines: Mapping[str, Points], xlabel: str, ylabel: str, bands: Mapping[str, Points] | None = None
) -> str:
    """Return lines over one pair of axes, with the values at their ends of the axes and a legend below.

    A band has the lower and the upper end at every place of the line of the same name.

    Example:
        >>> line_chart({"loss": ([0, 10], [2.0, 1.0])}, "steps", "loss").count("<polyline")
        1
    """
    finite = {name: _finite(line) for name, line in lines.items()}
    xs = [x for places, _ in finite.values() for x in places]
    ys = [y for _, values in finite.values() for y in values]
    for ends in (bands or {}).values():
        ys += [y for side in ends for y in side if math.isfinite(y)]
    if not xs:
        return ""
    ticks = _ticks(min(ys), max(ys))
    (left, right), (low, high) = (min(xs), max(xs)), (min(*ys, *ticks), max(*ys, *ticks))

    def up(y: float) -> float:
        return (y - low) / ((high - low) or 1)

    def path(places: Sequence[float], values: Sequence[float]) -> str:
        pairs = zip(places, values, strict=True)
        at = ((1000 * (x - left) / ((right - left) or 1), 300 * (1 - up(y))) for x, y in pairs)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in at)

    shown = []
    for i, (name, (places, values)) in enumerate(finite.items()):
        one = {"name": name, "points": path(places, values), "dashes": DASHES[i % 6]}
        if bands and name in bands:
            lower, upper = bands[name]
            outline = [*places, *reversed(places)], [*upper, *reversed(lower)]
            one["band"] = path(*outline)
        shown.append(one)
    about = {"ticks": [(y, up(y)) for y in ticks], "ends": (left, right)}
    return drawn("lines", lines=shown, xlabel=xlabel, ylabel=ylabel, **about)


def drawn(piece: str, **values: Any) -> str:
    """Return a piece of a page, by the name of its macro in charts.html."""
    return str(getattr(environment().get_template("charts.html").module, piece)(**values)).strip()


def _most(bars: Sequence[Bar]) -> float:
    return max((bar.value for bar in bars), default=0) or 1.0


def _finite(line: Points) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in zip(*line, strict=True) if math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round values that lie around an interval.

    Example:
        >>> _ticks(0.12, 0.97)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * k, 12) for k in range(first, last + 1)]
