"""How Sphinx makes the site of the Markdown in this folder: `make docs`. Nothing on a page comes from elsewhere."""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import coterie

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
# What kernels of notebooks read: figures as SVG, one thread for small models, no line about
# progress.
os.environ |= {
    "IPYTHONDIR": str(FOLDER / "_ipython"),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}

project, author, copyright = "coterie", "The coterie developers", "the coterie developers"  # noqa: A001  # Sphinx's name
version = release = coterie.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "pictures",
]
exclude_patterns = ["_build", "_ipython"]
default_role = "code"  # docstrings have code between single backquotes
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "coterie"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
templates_path: list[str] = []
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\w*\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 90
napoleon_use_rtype = False


def maths(visitor: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    text = convert(node.astext(), display="block" if block else "inline")
    text = re.sub(
        r"<mo[^>]*>(&#x02225;|‖|&#x02016;)</mo>",
        r'<mo stretchy="false" form="prefix" lspace="0" rspace="0">‖</mo>',
        text,
    )
    visitor.body.append(f'<div class="math">{text}</div>' if block else text)
    raise nodes.SkipNode


OF_THE_ROOT = "SECURITY|CHANGELOG|CONTRIBUTING|GOVERNANCE|CODE_OF_CONDUCT"
"""Files of the root folder that are pages of the site too, by their names in small letters."""


def whole_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """List in the index every page of this folder that it does not name; link pages of the root; tidy examples."""
    if docname == "index":
        pages = sorted(path.stem for path in FOLDER.glob("*.md"))
        unnamed = [
            page
            for page in pages
            if page != "index" and not re.search(rf"^{page}$", source[0], re.M)
        ]
        source[0] = source[0].replace("% every other page", "\n".join(unnamed))
    # doctest wants a blank line after what is printed
    source[0] = source[0].replace("\n\n```\n", "\n```\n")
    if whole := re.fullmatch(r"```\{include\} \.\./(\w+\.md)\n```\n", source[0]):
        source[0] = (FOLDER.parent / whole[1]).read_text(encoding="utf-8").replace("](docs/", "](")
    source[0] = re.sub(
        rf"\]\((?:\.\./)?({OF_THE_ROOT})\.md", lambda m: f"]({m[1].lower()}.md", source[0]
    )


INLINE = ("attribute", "data", "property")
# stands for the first colon of such a docstring, before which Sphinx would look for a type
COLON = "\ue000"


def before_napoleon(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Take docstrings as they are meant: an indented paragraph stands as it is, `docs/….md` is a link."""
    kept: list[str] = []
    section = last = ""
    for line in lines:
        if (
            line.startswith(" ")
            and kept
            and not kept[-1]
            and not last.startswith(" ")
            and not section.endswith(":")
        ):
            kept += ["::", ""]
        if line:
            last = line
            section = section if line.startswith(" ") else line
        kept.append(re.sub(r"`?docs/(\w+)\.md`?", r":doc:`/\1`", line))
    if what in INLINE and kept:
        kept[0] = kept[0].replace(":", COLON, 1)
    lines[:] = kept


def after_napoleon(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Put colons back, and tell "K." from the beginning of a list."""
    lines[:] = [re.sub(r"^(\s+)([A-Z])\.$", r"\1\2\\.", line.replace(COLON, ":")) for line in lines]


def without_noise(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out fields of which Python says no more than their number, and what scikit-learn adds to estimators."""
    noise = str(getattr(obj, "__doc__", "")).startswith("Alias for field number")
    return True if noise or re.fullmatch(r"set_\w+_request", name) else None


def signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    given: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leave out the signature that a protocol has from Python."""
    return ("" if given == "(*args, **kwargs)" else given), returned


ASKED_FOR = {
    "*.html": re.compile(
        r"""<(?:script|img|iframe|link rel="(?:stylesheet|icon)")[^>]*(?:src|href)="(?:https?:)?//"""
    ),
    "*.css": re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//"""),
}
"""What a browser would ask another machine for, without being told to."""


def nothing_from_elsewhere(app: Sphinx, error: Exception | None) -> None:
    """Refuse pages and styles that ask another machine for a script, a font or a picture."""
    for kind, asked_for in ASKED_FOR.items() if error is None else ():
        for path in Path(app.outdir).rglob(kind):
            if found := asked_for.search(path.read_text(encoding="utf-8")):
                raise ExtensionError(f"{path} asks for what is elsewhere: {found[0]}")


def setup(app: Sphinx) -> None:
    """Register what is above."""
    warnings.filterwarnings("ignore", module="torch")
    app.add_html_math_renderer("mathml", (maths, None), (maths, None))
    app.connect("build-finished", nothing_from_elsewhere)
    app.connect("source-read", whole_pages)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", without_noise)
