"""Partial dependence: against a plain loop over rows, and what the pages say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.tables.test_quality import COLUMNS, trained, visits

import coterie
from coterie.data import from_table, users_from_table
from coterie.recording import files
from coterie.tables.dependence import LEAVES, dependence
from coterie.tables.fit import fit, fit_everyone
from coterie.tables.models import load_model
from coterie.trees.tensors import for_another_user


@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("column", ["v", "z"])
def test_a_curve_is_the_mean_of_what_is_predicted_for_changed_rows(
    classes: int, column: str
) -> None:
    task = from_table(visits(classes=classes), **COLUMNS)
    model, preparation, rows = trained(task), task.preparation, task.test_rows
    found = dependence({"served": model}, preparation, rows, column)
    assert len(found.values) > 1
    for value, told in zip(found.values, found.means["served"], strict=True):
        outputs = model(preparation.inputs(rows.assign(**{column: value}))).double()
        plain = (
            outputs.softmax(1)[:, -1]
            if classes
            else preparation.centre + preparation.scale * outputs[:, 0]
        )
        assert told == pytest.approx(float(plain.mean()), rel=1e-5)
    if column == "v":
        assert list(found.values) == sorted(found.values)
        assert min(found.values) > rows["v"].min()


def test_a_column_without_values_has_no_curve() -> None:
    task = from_table(visits(), **COLUMNS)
    rows = task.test_rows.assign(v=np.nan)
    assert not dependence({"served": trained(task)}, task.preparation, rows, "v").values


def test_pages_of_everybody_show_where_a_user_differs(tmp_path: Path) -> None:
    """One user's target falls where the others' rises."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(list("abcd"), 60), "u": rng.normal(size=240)})
    sign = np.where(frame["who"] == "a", -1.0, 1.0)
    frame["y"] = 10 + 3 * sign * frame["u"] + 0.1 * rng.normal(size=240)
    table = users_from_table(frame, user_column="who", target="y", kind="regression")

    def rule(_: Any) -> Any:
        return coterie.Mixture()

    settings: dict[str, Any] = {"steps": 1, "measure": False, "progress": False}
    runs = fit_everyone(table, rule, "linear", tmp_path, user_column="who", **settings)
    assert runs is not None
    told = files.read_json(tmp_path / "a" / "evaluation.json", "")["dependence"]
    (one,) = told
    slopes = {name: np.polyfit(one["values"], means, 1)[0] for name, means in one["means"].items()}
    assert slopes["served"] == pytest.approx(-3, abs=0.3)
    assert [slopes[f"user {name}"] for name in "bcd"] == pytest.approx([3, 3, 3], abs=0.3)
    page = (tmp_path / "a" / "index.html").read_text(encoding="utf-8")
    assert "3 other users" in page
    assert page.count("polygon") >= 1


def test_the_page_shows_how_far_leaves_are_shifted(tmp_path: Path) -> None:
    """One user's target falls where the others' rises; the same trees know both."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(list("abcd"), 100), "u": rng.normal(size=400)})
    own = frame["who"] == "a"
    wave = np.where(frame["u"] > 0, np.where(own, -3.0, 3.0), 0.0)
    frame["y"] = 10 + wave + 0.1 * rng.normal(size=400)
    task = from_table(frame, user_column="who", target="y", kind="regression", me="a")
    settings: dict[str, Any] = {"steps": 1, "measure": False, "progress": False}
    run = fit(task, coterie.Mixture(trees="only"), "linear", out=tmp_path, **settings)
    (along,) = files.read_json(tmp_path / "evaluation.json", "")["dependence"]
    values = np.array(along["values"])
    served, another = (np.array(along["means"][name]) for name in ("served", LEAVES))
    rise, of_another = (
        line[values > 0.3].mean() - line[values < -0.3].mean() for line in (served, another)
    )
    assert rise == pytest.approx(-3, abs=0.6)
    assert of_another == pytest.approx(3, abs=1)
    assert "leaves are shifted" in (tmp_path / "index.html").read_text()
    assert for_another_user(torch.nn.Linear(1, 1)) is None
    assert run is not None
    again = load_model(tmp_path)
    inputs = task.preparation.inputs(task.test_rows)
    with torch.no_grad():
        assert torch.equal(again(inputs), run.model(inputs))
