"""One self-contained HTML page, one look for all.

Text, tables and charts in a single file that opens anywhere.
"""

import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    charts: Sequence[str] = ()  # HTML of `coterie.reporting.charts`
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
