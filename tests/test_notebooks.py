"""The cells of the notebooks run, warnings being errors; `make docs` runs them too, and shows what they print."""

from __future__ import annotations

import os
import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from tests.test_extending import REGISTRIES

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.md"))
SHORTER = {
    "10_a_table_for_a_paper": {"--steps 15": "--steps 2"},
    "04_hugging_face_and_lora": {"range(150)": "range(3)", '"steps": 40': '"steps": 4'},
}
"""What is run here in a shorter form, since as it stands it trains a language model, or many runs."""
SLOW = {"05_a_consortium_on_one_machine", "10_a_table_for_a_paper"}
"""What starts a server and sites, or measures many methods.

tests/federation/test_consortium.py and tests/benchmark/test_for_papers.py run the same commands."""


def cells(text: str) -> list[str]:
    """Return the code of each cell of a text notebook, without its options."""
    return re.findall(r"^```\{code-cell\}.*\n(?::.*\n)*((?s:.*?))^```", text, re.MULTILINE)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if notebook.stem in SLOW and not os.environ.get("COTERIE_SLOW"):
        pytest.skip("takes minutes: COTERIE_SLOW=1 runs it here too")
    text = notebook.read_text(encoding="utf-8")
    for long, short in SHORTER.get(notebook.stem, {}).items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    for registry in REGISTRIES:  # what a notebook registers is forgotten
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as a notebook sets it; undone at the end
    monkeypatch.chdir(notebook.parent)
    found = cells(text)
    assert len(found) >= 3
    names = {"__name__": "__main__"}
    mpl.use("Agg")
    try:
        for number, cell in enumerate(found):
            exec(compile(cell, f"{notebook.stem}, cell {number}", "exec"), names)  # noqa: S102  # our own text
    finally:
        plt.close("all")


def test_notebooks_leave_nothing_in_their_folder() -> None:
    assert {path.suffix for path in FOLDER.iterdir()} == {".md", ".txt"}
