"""How good a table's model is: against scikit-learn and brute force, and what the page says of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from sklearn.inspection import permutation_importance
from torch.nn import functional as f

import coterie
from coterie.data import TableTask, from_table
from coterie.recording import files
from coterie.tables import models, report
from coterie.tables.fit import fit
from coterie.tables.report import FILE

COLUMNS: dict[str, Any] = {"user_column": "who", "target": "y", "me": "a"}


def visits(n: int = 240, classes: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    u, v, w = rng.normal(size=(3, n))
    v[::9] = np.nan
    score = 2 * u + np.nan_to_num(v) + rng.normal(size=n)
    frame = pd.DataFrame(
        {"who": np.resize(["a", "b"], n), "u": u, "v": v, "w": w, "z": rng.choice(["p", "q"], n)}
    )
    if classes == 0:
        return frame.assign(y=20 + 5 * score)
    return frame.assign(
        y=np.array(["no", "so", "yes"][:: 2 if classes == 2 else 1])[pd.qcut(score, classes).codes]
    )


def trained(task: TableTask) -> torch.nn.Module:
    """Return a linear model that follows the first inputs."""
    torch.manual_seed(0)
    model = models.build("linear", task.n_inputs, task.n_outputs)
    inputs, targets = task.me.examples.take(torch.arange(len(task.me)))
    loss = models.loss_of(task.preparation)
    for _ in range(60):
        slopes = torch.autograd.grad(loss(model(inputs), targets), list(model.parameters()))
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter.data -= slope
    return model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("classes", [2, 3])
def test_what_is_told_of_classes_is_as_scikit_learn_has_it(classes: int) -> None:
    task = from_table(visits(classes=classes), **COLUMNS, test=0.4)
    model, rows, preparation = trained(task), task.test_rows, task.preparation
    found = report.quality(model, None, preparation, "y", rows)
    outputs = model(preparation.inputs(rows)).double().softmax(1).numpy()
    truth, told = rows["y"], np.array(preparation.classes)[outputs.argmax(1)]
    np.testing.assert_allclose(
        found.confusion, sk.confusion_matrix(truth, told, labels=preparation.classes)
    )
    expected = sk.classification_report(truth, told, output_dict=True)
    for k, one in enumerate(found.by_class):
        assert one.sensitivity.value == pytest.approx(expected[one.name]["recall"])
        assert one.precision.value == pytest.approx(expected[one.name]["precision"])
        assert one.rows == expected[one.name]["support"]
        assert one.auc == pytest.approx(sk.roc_auc_score(truth == one.name, outputs[:, k]))
        wilson = stats.binomtest(round(one.sensitivity.value * one.rows), one.rows).proportion_ci(
            method="wilson"
        )
        assert (one.sensitivity.low, one.sensitivity.high) == pytest.approx(
            (wilson.low, wilson.high)
        )
        others = truth != one.name
        assert one.specificity.value == pytest.approx((told[others] != one.name).mean())
    assert bool(found.roc) is (classes == 2)
    assert sum(one.rows for one in found.calibration) == len(rows)
    assert found.served["accuracy"] == pytest.approx(expected["accuracy"])
    assert found.served["balanced-accuracy"] == pytest.approx(expected["macro avg"]["recall"])


def test_an_effect_is_the_mean_over_all_permutations() -> None:
    task = from_table(visits(), **COLUMNS)
    model, preparation, rows = trained(task), task.preparation, task.test_rows.head(4)
    targets = preparation.targets(rows["y"])

    def loss(frame: pd.DataFrame) -> float:
        return float(f.cross_entropy(model(preparation.inputs(frame)).double(), targets))

    for effect in report.permutation_effects(model, preparation, "y", rows):
        orders = itertools.permutations(range(4))
        each = [
            loss(rows.assign(**{effect.column: rows[effect.column].to_numpy()[list(o)]}))
            for o in orders
        ]
        assert effect.rise == pytest.approx(np.mean(each) - loss(rows), abs=1e-6)


def test_effects_are_those_of_scikit_learn_and_find_what_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = from_table(visits(), **COLUMNS, test=0.4)
    model, preparation, rows = trained(task), task.preparation, task.test_rows

    class Classifier:
        def fit(self) -> None: ...

    def score(_: Any, frame: pd.DataFrame, truth: Any) -> float:
        probabilities = model(preparation.inputs(frame)).double().softmax(1).numpy()
        return -float(sk.log_loss(truth, probabilities))

    columns = ["u", "v", "w", "z"]
    theirs = permutation_importance(
        Classifier(), rows[columns], rows["y"], scoring=score, n_repeats=20
    )
    ours = {one.column: one for one in report.permutation_effects(model, preparation, "y", rows)}
    assert list(ours)[:2] == ["u", "v"]
    for column, rises in zip(columns, theirs.importances, strict=True):
        assert ours[column].rise == pytest.approx(
            rises.mean(), abs=5 * rises.std() / math.sqrt(20) + 1e-9
        )
    monkeypatch.setattr(report, "PERMUTED_ROWS", 400)  # of 48 rows some shifts only
    some = {one.column: one for one in report.permutation_effects(model, preparation, "y", rows)}
    assert some["u"].rise == pytest.approx(ours["u"].rise, abs=3 * ours["u"].error)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_the_page_and_the_file_say_the_same_and_nothing_twice(tmp_path: Path, classes: int) -> None:
    task = from_table(visits(classes=classes), **COLUMNS)
    run = fit(
        task, coterie.WeightedAveraging(0.5), "linear", tmp_path, steps=20, lr=0.05, progress=False
    )
    assert run is not None
    page, told = (
        (tmp_path / "index.html").read_text(encoding="utf-8"),
        files.read_json(tmp_path / FILE, ""),
    )
    assert told["served"]["loss"] == pytest.approx(run.test["loss"])
    for one in told["effects"]:
        assert f"{one['rise']:+.3f} ± {one['error']:.3f}" in page
    for one in told["by_class"]:
        assert str(report.Share(**one["sensitivity"])) in page
    more = [name for name in told["served"] if name not in run.test]
    for name in more:
        assert page.count(f">{name}<") == 1
    assert ("sensitivity for yes (ROC)" in page) is (classes == 2)
    assert "(calibration, 2 bins)" in page


def test_weights_count_and_make_no_rows() -> None:
    frame = visits().assign(weight=3.0)
    plain, heavy = (
        from_table(frame, **COLUMNS, **each)
        for each in ({"drop": ["weight"]}, {"weights": "weight"})
    )
    model = trained(plain)
    found = [
        report.quality(model, None, each.preparation, "y", each.test_rows)
        for each in (plain, heavy)
    ]
    assert found[0].by_class[0].sensitivity == pytest.approx(found[1].by_class[0].sensitivity)
    assert [one.error for one in found[0].effects] == pytest.approx(
        [one.error for one in found[1].effects]
    )
    assert found[0].served == pytest.approx(found[1].served)
    assert np.sum(found[1].confusion) == 3 * np.sum(found[0].confusion)


def test_a_share_of_no_rows_is_a_dash() -> None:
    assert str(report.Share.of(0, 0)) == "–"
    assert str(report.Share.of(0, 4)) == "0.00 (0.00 to 0.49)"
