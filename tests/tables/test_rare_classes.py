"""Classes that are rare: what the page leads with, the constant beside the model, classes that count alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data import from_table, users_from_table
from coterie.errors import KnobError
from coterie.evaluation import METRICS
from coterie.tables import models


def visits(n: int = 900, rare: float = 2.5) -> pd.DataFrame:
    """Make a table in which about 4 % of the rows are `ill`."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(n, 3)), columns=list("xyz"))
    signal = frame["x"] + rng.normal(0, 1, n)
    return frame.assign(ward=np.resize(list("abc"), n), ill=np.where(signal > rare, "yes", "no"))


def trained(folder: Path, *words: str) -> tuple[Any, dict[str, Any]]:
    visits().to_csv(folder / "t.csv", index=False)
    command = ["train", "--data", str(folder / "t.csv"), "--user-column", "ward"]
    command += ["--target", "ill", "--me", "a", "--out", str(folder / "run"), *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "run" / "evaluation.json").read_text())


def test_a_rare_class_is_led_with_by_measures_that_see_it(tmp_path: Path) -> None:
    result, judged = trained(tmp_path)
    assert "of the training rows are 'no'" in result.stderr
    assert "`--class-weight balanced`" in result.stderr
    assert "balanced-accuracy" in result.stdout.split("loss")[0]
    page = (tmp_path / "run" / "index.html").read_text()
    assert page.index("balanced-accuracy") < page.index(">accuracy<")
    train = from_table(visits(), user_column="ward", target="ill", me="a", validation=0.0)
    share = float(np.mean(train.me.examples.take(torch.arange(len(train.me)))[1].numpy()))
    rate = float((train.test_rows["ill"] == "yes").mean())
    loss = -(rate * np.log(share) + (1 - rate) * np.log(1 - share))
    assert judged["constant"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert judged["constant"]["accuracy"] == pytest.approx(1 - rate)
    assert judged["constant"]["balanced-accuracy"] == 0.5
    assert judged["constant"]["average-precision"] == pytest.approx(rate)


def test_a_site_with_five_rows_of_one_class_gets_a_model_that_sees_the_rare_class(
    tmp_path: Path,
) -> None:
    table = visits(600, rare=1.5)
    small = table[(table["ward"] == "a") & (table["ill"] == "no")][:5]
    pd.concat([table[table["ward"] != "a"], small]).to_csv(tmp_path / "t.csv", index=False)
    columns = ["--data", str(tmp_path / "t.csv"), "--user-column", "ward", "--target", "ill"]
    columns += ["--model", "linear"]
    new = pd.DataFrame({"ward": ["a"] * 2, "x": [0.0, 3.0], "y": [0.0] * 2, "z": [0.0] * 2})
    new.to_csv(tmp_path / "new.csv", index=False)
    for me in ("a", "all"):
        out = tmp_path / me
        done = CliRunner().invoke(app, ["train", *columns, "--me", me, "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert "100%" not in done.output  # one class is no imbalance
        assert "nan" not in done.output
        told = CliRunner().invoke(app, ["predict", str(out), str(tmp_path / "new.csv")])
        rare = [float(row.split(",")[2]) for row in told.stdout.splitlines()[1:3]]
        assert rare[1] > rare[0] + 0.05, told.output  # what the peers know of x
    page = (tmp_path / "all" / "index.html").read_text(encoding="utf-8")
    assert "left out" not in page
    steps = ["--rule", "wga", "--out", str(tmp_path / "steps")]
    done = CliRunner().invoke(app, ["train", *columns, "--me", "a", *steps])
    assert "user 'a' has examples of one class only (0)" in done.output


def test_balanced_weights_let_the_rare_class_be_found(tmp_path: Path) -> None:
    _, plain = trained(tmp_path, "--rule", "alone", "--steps", "200")
    again = tmp_path / "balanced"
    again.mkdir()
    _, balanced = trained(again, "--rule", "alone", "--steps", "200", "--class-weight", "balanced")
    found = [one["by_class"][1]["sensitivity"]["value"] for one in (plain, balanced)]
    assert found[1] > found[0]
    assert balanced["served"]["balanced-accuracy"] > plain["served"]["balanced-accuracy"]


def test_the_loss_of_balanced_classes_is_the_mean_of_the_classes_means() -> None:
    asked: dict[str, Any] = {"user_column": "ward", "target": "ill", "class_weight": "balanced"}
    for task in (from_table(visits(), me="a", **asked), users_from_table(visits(), **asked)):
        preparation = task.preparation
        rows = visits().query("ward == 'a'") if hasattr(task, "me") else visits()
        assert preparation.class_weights == pytest.approx(sklearn_weights(rows["ill"]), rel=0.1)
        inputs, targets = preparation.examples(visits(), "ill")
        assert isinstance(targets, torch.Tensor)
        outputs = torch.stack([inputs[:, 0], inputs[:, 1]], 1)
        each = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        w = torch.tensor(preparation.class_weights)[targets]
        got = models.loss_of(preparation)(outputs, targets)
        torch.testing.assert_close(got, (w * each).sum() / w.sum())
    with pytest.raises(KnobError, match="`class_weight` is for classes, but 'x' is a number"):
        from_table(visits(), me="a", **(asked | {"target": "x"}))
    with pytest.raises(KnobError, match="`class_weight` and `weights` both weigh the rows"):
        from_table(visits().assign(w=1.0), me="a", **asked, weights="w")


def sklearn_weights(targets: Any) -> Any:
    from sklearn.utils.class_weight import compute_class_weight

    return compute_class_weight("balanced", classes=np.array(["no", "yes"]), y=targets)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_metrics_of_rare_classes_are_scikit_learns(
    n_classes: int, weighted: bool
) -> None:  # a case
    rng = np.random.default_rng(n_classes)
    outputs = torch.tensor(rng.normal(size=(60, n_classes)).round(1))
    truth = rng.integers(0, n_classes, 60)
    weights = rng.uniform(0.5, 2, 60) if weighted else None
    given = None if weights is None else torch.tensor(weights)
    probabilities = outputs.softmax(1).numpy()
    of = [1] if n_classes == 2 else range(n_classes)
    precision = [
        sklearn_metrics.average_precision_score(
            truth == k, probabilities[:, k], sample_weight=weights
        )
        for k in of
    ]
    targets, found = torch.tensor(truth), {name: cast("Any", METRICS[name]) for name in METRICS}
    assert found["average-precision"](outputs, targets, given) == pytest.approx(np.mean(precision))
    average = "binary" if n_classes == 2 else "macro"
    expected = sklearn_metrics.f1_score(
        truth, probabilities.argmax(1), average=average, sample_weight=weights
    )
    assert found["f1"](outputs, targets, given) == pytest.approx(expected)
