"""The page of a run."""

from __future__ import annotations

from pathlib import Path

from tests.support.records import configuration
from tests.support.regressions import users_with_validation
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.recording import Point
from coterie.reporting.page import Section, write_page
from coterie.reporting.run_page import sections


def test_the_page_of_a_run(tmp_path: Path) -> None:
    users = users_with_validation()
    model = nn.Linear(20, 1).double()
    for rule in (coterie.WeightedAveraging("auto"), coterie.AdaptiveAveraging(), coterie.Alone()):
        run = coterie.train(model, mse_loss, users[0], users[1:], rule, steps=20, guard="held-out")
        page = run.report(tmp_path / "report.html").read_text(encoding="utf-8")
        assert "<svg" in page
        assert ("Hessian gap δ_k" in page) == (not isinstance(rule, coterie.Alone))
        assert ("When it stopped" in page) == isinstance(rule, coterie.AdaptiveAveraging)
        for line in run.summary().splitlines():
            assert line.replace("'", "&#39;") in page


def test_a_page_has_what_the_record_tells(tmp_path: Path) -> None:
    record = coterie.Record(configuration(peers={}))
    record.add(Point(step=9, own_loss=0.5))
    assert [section.title for section in sections(record, ["done"])] == ["Result", "Learning curves"]
    page = write_page(tmp_path / "page.html", "A title", [Section("Result", ["a < b"], [[{"loss": 1.0}]])])
    assert "a &lt; b" in page.read_text(encoding="utf-8")
