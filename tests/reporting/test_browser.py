"""Pages in a real Chromium, where there is one: no errors, no requests, folds and sliders, numbers as recorded."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.regressions import users_with_validation
from torch import nn
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies
from coterie.federation import live
from coterie.reporting import plan_page
from coterie.reporting.figures import gain_factor
from coterie.reporting.page import (
    Bar,
    Interval,
    Lead,
    Section,
    Tile,
    bar_chart,
    interval_chart,
    line_chart,
    write_page,
)
from coterie.reporting.verdict import difference
from coterie.reporting.whom import peer_shares
from coterie.theory import Constants

PLACES = {"light": (1100, 820), "dark": (1100, 820), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Debian's Chromium, or another that is installed, driven by Playwright."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed (pip install playwright)"
    )
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip("no Chromium (apt-get install chromium): pages are not tried in a browser")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


class Shown:
    """A page as a browser shows it, and what it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, place: str = "light") -> None:
        (width, height), scheme = PLACES[place], "dark" if place == "dark" else "light"
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked_for.append(request.url))
        self.page.goto(path.as_uri())
        assert self.asked_for == [path.as_uri()]

    def width_too_much(self) -> int:
        root = "document.documentElement"
        return int(self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))

    def tables_cut_off(self) -> int:
        wider = "(all) => all.filter(one => one.scrollWidth > one.clientWidth).length"
        return int(self.page.locator(".scroll").evaluate_all(wider))

    def texts(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.page.locator(selector).all_inner_texts()]

    def bottoms(self, selector: str) -> list[float]:
        """Say where the things end, in pixels from the top of the page."""
        boxes = (each.bounding_box() for each in self.page.locator(selector).all())
        return [box["y"] + box["height"] for box in boxes]

    def close(self) -> None:
        assert self.complaints == []
        self.context.close()


@pytest.fixture(scope="module")
def run() -> coterie.Run:
    me, *peers = users_with_validation()
    options: dict[str, Any] = {"steps": 20, "guard": "held-out"}
    return coterie.train(
        nn.Linear(20, 1).double(), mse_loss, me, peers, coterie.WeightedAveraging(0.7), **options
    )


@pytest.mark.parametrize("place", PLACES)
def test_the_first_screen_is_the_record_and_details_fold(
    browser: Any, run: coterie.Run, tmp_path: Path, place: str
) -> None:
    shown = Shown(browser, run.report(tmp_path / "run.html"), place)
    assert shown.width_too_much() == 0
    end, (lead,) = run.record.end, shown.texts(".lead")
    assert end.verdict.split(": ")[0] in lead
    assert [end.verdict] == shown.texts(".evidence")
    assert lead.endswith(run.verdict.advice)
    assert all(bottom < PLACES[place][1] for bottom in shown.bottoms(".lead, .tile"))
    if end.comparison is not None:
        assert shown.texts(".tile strong")[:2] == [
            difference(one) for one in run.verdict.measures.values()
        ]
    names = [peer.name for peer in peer_shares(run.record.configuration, end)]
    bars = shown.texts("section:first-of-type .bar")
    assert [bar.split()[0] for bar in bars] == names
    # before anything is scrolled
    assert shown.page.locator(".lead").bounding_box()["y"] < PLACES[place][1] / 3
    folds = shown.page.locator("details")
    assert folds.count() >= 4
    inside = folds.nth(0).locator("p").nth(0)
    assert not inside.is_visible()
    folds.nth(0).locator("summary").click()
    assert inside.is_visible()
    shown.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert shown.width_too_much() == 0
    assert not shown.tables_cut_off()
    shown.close()


@pytest.mark.parametrize("place", PLACES)
def test_the_page_of_everyone_shows_who_listens_to_whom(
    browser: Any, tmp_path: Path, place: str
) -> None:
    rule, users = coterie.WeightedAveraging(0.7), users_with_validation()
    runs = coterie.train_everyone(
        nn.Linear(20, 1).double(), mse_loss, users, rule, steps=5, measure=False
    )
    shown = Shown(browser, runs.report(tmp_path / "all.html"), place)
    assert shown.width_too_much() == 0
    assert shown.texts(".lead")[0].startswith(runs.summary().splitlines()[0])
    cells = [[int(cell) for cell in row.split()[1:]] for row in shown.texts(".heat tr")[1:]]
    matrix = (100 * runs.weights.to_numpy()).round().astype(int)
    assert cells == [[share for share in row if share] for row in matrix.tolist()]
    assert len(shown.texts(".everybody tr")) == len(users)
    shown.close()


def test_sliders_show_what_was_computed(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_page, "POSITIONS", 3)
    problem = Constants(
        n_peers=9, noise=10, bias_floor=0.4, hessian_gap=0.1, smoothness=2, pl=1, initial_gap=5
    )
    table = plan_page.lookup(problem, 1000)
    shown = Shown(browser, plan_page.write_plan_page(tmp_path, problem, 1000), "phone")
    assert shown.width_too_much() == 0
    said = set()
    for places in ((1, 1, 1, 1), (2, 0, 1, 2), (0, 0, 2, 2)):
        for name, at in zip(table["values"], places, strict=True):
            slider = shown.page.locator(f"#{name}")
            slider.focus()
            for _ in range(3):
                slider.press("ArrowLeft")
            for _ in range(at):
                slider.press("ArrowRight")
            assert float(shown.texts(f"#of-{name}")[0]) == pytest.approx(
                table["values"][name][at], rel=1e-3
            )
        row = table["rows"][np.ravel_multi_index(places, (3,) * 4)]
        width = len(table["columns"])
        for i, method in enumerate(table["methods"]):
            cells = shown.page.locator(f"#plan tr:nth-child({i + 2}) td").all_inner_texts()
            wanted = row[i * width : (i + 1) * width]
            assert cells[0] == method
            assert [None if cell == "–" else float(cell) for cell in cells[1:]] == pytest.approx(
                wanted
            )
        said |= set(shown.texts("#said"))
    assert len(said) > 1
    shown.close()


def test_a_drawn_figure_fits_and_is_readable_in_the_dark(browser: Any, tmp_path: Path) -> None:
    page = write_page(
        tmp_path / "page.html", "A figure", [Section("Drawn", figures=[gain_factor()])]
    )
    for place in PLACES:
        shown = Shown(browser, page, place)
        assert shown.width_too_much() == 0
        colour = "getComputedStyle(document.querySelector('.drawn svg text')).fill"
        assert shown.page.evaluate(colour) == (
            "rgb(232, 236, 240)" if place == "dark" else "rgb(27, 31, 36)"
        )
        shown.close()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_colours_have_contrast() -> None:
    """Text has the ratio 4.5 that WCAG asks for, on the page and on its tiles; what is drawn has 3."""
    sheet = (Path(plan_page.__file__).parent / "page.html").read_text(encoding="utf-8")
    for colours in (
        dict(re.findall(r"--(\w+): (#\w{6})", part))
        for part in re.findall(r":root \{(.*?)\}", sheet, re.S)
    ):
        for ground in ("page", "wash"):
            for name in ("ink", "soft", "good", "bad", "fill", *(f"c{i}" for i in range(6))):
                pair = sorted((luminance(colours[name]), luminance(colours[ground])))
                least = 4.5 if name in ("ink", "soft", "good", "bad") else 3
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, ground)


HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "\" onmouseover='window.pwned=1' x=\"",
    "</style></title><svg onload=window.pwned=1>",
    "$\\frac{1}{$ {{7*7}} `x` &lt;b&gt; \u202eabc",
    "javascript:window.pwned=1",
)
"""Names of users, columns and classes that would run, or break a page, if they were taken for its source."""


def test_hostile_names_are_text_on_every_page(browser: Any, tmp_path: Path) -> None:
    """Of a run, with a default and with steps, of a model for each user, and of runs compared."""
    random = np.random.default_rng(0)
    columns = {name: random.normal(size=240) for name in HOSTILE[:3]}
    users, classes = np.repeat(HOSTILE, 40), np.array(["<b>yes</b>", "no<script>window.pwned=1//"])
    ill = classes[(sum(columns.values()) + random.normal(size=240) > 0).astype(int)]
    pd.DataFrame({"who": users, **columns, HOSTILE[3]: ill}).to_csv(tmp_path / "t.csv", index=False)
    table = ["--data", "t.csv", "--user-column", "who", "--target", HOSTILE[3]]
    steps = ["--rule", "wga", "--steps", "20"]
    for words in (
        ["train", *table, "--me", HOSTILE[0], "--out", "closed"],
        ["train", *table, "--me", HOSTILE[1], *steps, "--out", "stepped"],
        ["train", *table, "--me", "all", *steps, "--out", "everyone"],
        ["explore", "closed", "stepped", "--out", "explored.html"],
        ["plan", "stepped", "--out", "planned"],
    ):
        with contextlib.chdir(tmp_path):
            result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) >= 10
    for path in pages:
        assert_text(browser, path, named=path.parent.name not in ("everyone", "planned"))


def assert_text(browser: Any, path: Path, *, named: bool) -> None:
    """Check that nothing of hostile names ran or became an element, and that they are read as they are."""
    shown = Shown(browser, path)
    for element in shown.page.locator("summary").all():
        element.click()
    assert shown.page.evaluate("window.pwned") is None
    markup = "img, b:text-is('yes'), [onerror], [onload], [onmouseover], [href^='javascript:' i]"
    assert shown.page.locator(markup).count() == 0, path
    assert shown.asked_for == [path.as_uri()]
    if named:
        assert "onerror=window.pwned=1" in shown.page.inner_text("body"), path
    shown.close()


def test_hostile_names_are_text_on_the_live_page_and_in_every_part_of_one(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sites are called, why they refuse, what they say they still give, and what is in the news."""
    monkeypatch.setattr(live, "SECONDS_BETWEEN_PAGES", 0.0)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    hostile, (someone, *_) = HOSTILE[0], users_with_validation()
    me = coterie.User(f"{hostile} me", *someone.take(torch.arange(20), seed=0, step=0))

    class Sites:
        def ask(self, names: Any, method: str, timeout: float, **_: Any) -> LocalReplies:
            told = {"willing": True, "left": hostile, "size": hostile, "promises": hostile}
            if method == "gradients":
                told = {"refused": "".join(HOSTILE)}
            return LocalReplies(dict.fromkeys(names, told))

    (tmp_path / "news.log").write_text("\n".join(HOSTILE), encoding="utf-8")
    page = live.LivePage(tmp_path, Sites(), HOSTILE, 1.0, tmp_path / "news.log")
    seen = []

    def copied(step: Any) -> None:
        text = (tmp_path / live.LIVE).read_text(encoding="utf-8")
        seen.append(text.replace(live.RELOAD, ""))

    model, rule = nn.Linear(20, 1).double(), coterie.WeightedAveraging(0.7)
    engine = partial(Remote, sites=Sites(), names=list(HOSTILE))
    hooks = [page, copied]
    how: dict[str, Any] = {"engine": engine, "steps": 4, "hooks": hooks, "guard": "off"}
    coterie.train(model, mse_loss, me, [], rule, measure=False, **how)
    (tmp_path / "seen.html").write_text(seen[-1], encoding="utf-8")
    row = {name: name for name in HOSTILE}
    charts = [
        bar_chart([Bar(name, 1.0, name, name) for name in HOSTILE], hostile),
        interval_chart([Interval(name, 1.0, 0.1, name) for name in HOSTILE], hostile),
        line_chart({name: ([1.0, 2.0], [1.0, 2.0]) for name in HOSTILE}, hostile, hostile),
    ]
    section = Section(hostile, HOSTILE, [[row]], charts=charts)
    tiles = [Tile(name, name, name) for name in HOSTILE]
    lead = Lead(hostile, hostile, "", tiles, hostile, hostile)
    write_page(
        tmp_path / "parts.html", hostile, [section, replace(section, folded=True)], lead=lead
    )
    for name in (live.LIVE, "seen.html", "parts.html"):
        assert_text(browser, tmp_path / name, named=True)


def test_the_table_of_runs_shows_its_verdicts_on_a_phone(browser: Any, tmp_path: Path) -> None:
    users = users_with_validation()
    for name, alpha in (("some", 0.2), ("more", 0.8)):
        coterie.train(
            nn.Linear(20, 1).double(),
            mse_loss,
            users[0],
            users[1:],
            coterie.WeightedAveraging(alpha),
            steps=20,
            guard="held-out",
            out=tmp_path / name,
        )
    words = ["explore", str(tmp_path / "some"), str(tmp_path / "more")]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "all.html")])
    assert result.exit_code == 0, result.output
    shown = Shown(browser, tmp_path / "all.html", "phone")
    assert shown.width_too_much() == 0
    column = shown.texts("th").index("verdict") + 1
    for cell in shown.page.locator(f"section:first-of-type td:nth-child({column})").all():
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= PLACES["phone"][0]
    shown.close()
