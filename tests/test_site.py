"""What the site is made of is complete: a page and a picture for every rule, and every page that is listed."""

from __future__ import annotations

import re
from pathlib import Path

from coterie.methods import METHODS
from coterie.rules import RULES

DOCS = Path(__file__).parent.parent / "docs"


def named_in(page: Path) -> set[str]:
    """Return the pages that a page lists."""
    lists = re.findall(
        r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return {
        line
        for one in lists
        for line in one.splitlines()
        if line and not line.startswith((":", "%"))
    }


def test_every_rule_has_a_page_with_its_picture() -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "rules").glob("*.md")}
    pictures = (DOCS / "pictures.py").read_text(encoding="utf-8")
    for name in RULES:
        assert f"```{{rule-picture}} {name}\n" in pages[name]
        assert f'    "{name}": ' in pictures
        assert f"--rule {name}" in pages[name] or name == "adaptive"
    for name in set(pages) & set(METHODS):
        assert f"```{{rule-picture}} {name}\n" in pages[name]
        assert f"--rule {name}" in pages[name]
    assert named_in(DOCS / "rules" / "index.md") == set(pages) - {"index"}


def test_lists_name_pages_that_are_there() -> None:
    for index in (DOCS / "index.md", DOCS / "api" / "index.md"):
        for name in named_in(index):
            assert "*" in name or (index.parent / f"{name}.md").exists(), name
    assert "% every other page" in (DOCS / "index.md").read_text(encoding="utf-8")
