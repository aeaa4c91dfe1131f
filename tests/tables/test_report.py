"""The page of a table's run in a real Chromium, where there is one: it fits, and has the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.reporting.test_browser import PLACES, Shown, browser
from tests.support.hospitals import visits

import coterie
from coterie.data import from_table
from coterie.recording import files
from coterie.tables.fit import fit
from coterie.tables.report import FILE

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    task = from_table(
        visits(200).drop(columns="days"), user_column="hospital", target="ill", me="Bern"
    )
    assert fit(
        task, coterie.WeightedAveraging(0.5), "linear", out, steps=10, lr=0.1, progress=False
    )
    return out


@pytest.mark.parametrize("place", PLACES)
def test_the_page_has_the_numbers_and_fits(browser: Any, folder: Path, place: str) -> None:
    shown, told = Shown(browser, folder / "index.html", place), files.read_json(folder / FILE, "")
    assert shown.width_too_much() == 0
    section = "section:has(h2:text-matches('^How good'))"
    cells = [
        text.split("\t")[0]
        for text in shown.texts(f"{section} table >> nth=0 >> tr td:first-child")
    ]
    assert cells == [one["name"] for one in told["by_class"]]
    counts = shown.texts(f"{section} table >> nth=1 >> td:not(:first-child)")
    assert [float(count) for count in counts] == [n for row in told["confusion"] for n in row]
    bars = shown.texts("section:has(h2:text-matches('rest on')) .bar")
    assert [bar.split()[0] for bar in bars] == [one["column"] for one in told["effects"]]
    assert shown.page.locator(f"{section} svg[role=img]").count() == 2  # ROC and calibration
    shown.close()
