"""One self-contained HTML page: text, tables and figures in a single file that opens anywhere."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.recording import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, paragraphs, tables and figures, in this order."""

    title: str
    text: Sequence[str] = ()  # paragraphs of plain text; what is between backquotes is set as code
    tables: Sequence[Sequence[Mapping[str, Any]]] = ()  # each a list of rows, a row what stands in each column
    figures: Sequence["Figure"] = ()  # drawn into the page as SVG


def write_page(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write a page of sections to one HTML file that needs nothing else, and return its path."""
    import jinja2
    from markupsafe import Markup, escape

    def prose(text: str) -> Markup:
        parts = str(escape(text)).split("`")
        return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))  # noqa: S704  # escaped above

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coterie.reporting", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"prose": prose, "svg": lambda figure: Markup(_svg(figure))}  # noqa: S704  # our own drawing
    text = environment.get_template("page.html").render(title=title, sections=sections)
    files.write(path, text.encode())
    return path


def _svg(figure: "Figure") -> str:
    """Return a figure as an SVG element; the same figure gives the same text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "coterie", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
