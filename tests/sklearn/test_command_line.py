"""An estimator fitted to some rows predicts what `coterie train --me all` makes of the same rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from tests.support.heart import hospitals
from typer.testing import CliRunner

from coterie.benchmark.sets.tables import heart
from coterie.cli import app
from coterie.sklearn import CoterieClassifier

REAL = os.environ.get("COTERIE_DATA")
STEPS: dict[str, float] = {"steps": 20, "lr": 0.05}  # by gradient steps; by default in closed form
RUNNER = CliRunner()


def real_heart(path: Path) -> pd.DataFrame:
    """Write the 920 patients of four hospitals, and return them."""
    people = heart(Path(str(REAL)) / "heart_disease")
    assert isinstance(people.inputs, pd.DataFrame)
    people.inputs.assign(hospital=people.owners, ill=people.targets).to_csv(path, index=False)
    return pd.read_csv(path)


def by_command(
    folder: Path, training: pd.DataFrame, new: pd.DataFrame, target: str, settings: dict[str, float]
) -> pd.DataFrame:
    """Return what the command line predicts for new rows."""
    training.to_csv(folder / "training.csv", index=False)
    new.to_csv(folder / "new.csv", index=False)
    columns = [
        "--data",
        str(folder / "training.csv"),
        "--user-column",
        "hospital",
        "--target",
        target,
    ]
    options = ["--me", "all", "--test", "0", "--out", str(folder / "run")]
    options += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    for command in (
        ["train", *columns, *options],
        ["predict", str(folder / "run"), str(folder / "new.csv"), "--out", str(folder / "out.csv")],
    ):
        result = RUNNER.invoke(app, command)
        assert result.exit_code == 0, result.output
    return pd.read_csv(folder / "out.csv")


@pytest.mark.parametrize(
    "source",
    [
        hospitals,
        pytest.param(
            real_heart,
            marks=pytest.mark.skipif(
                REAL is None, reason="COTERIE_DATA names no folder with the real sets"
            ),
        ),
    ],
)
@pytest.mark.parametrize("settings", [STEPS, {}], ids=["steps", "closed form"])
def test_the_same_classes_and_probabilities_row_by_row(
    source: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    table = source(tmp_path / "all.csv")
    rows, target = table.drop(columns="ill"), table["ill"]
    order = np.random.default_rng(0).permutation(len(table))
    split = order[len(table) // 3 :], order[: len(table) // 3]
    rows.iloc[split[1][:5], rows.columns.get_loc("hospital")] = "elsewhere"  # for the pooled model
    found = by_command(tmp_path, table.iloc[split[0]], rows.iloc[split[1]], "ill", settings)
    estimator = CoterieClassifier("hospital", **settings)
    passing = make_column_transformer(("passthrough", list(rows)), verbose_feature_names_out=False)
    pipeline = make_pipeline(passing.set_output(transform="pandas"), estimator)
    for each in (estimator, pipeline):
        scores = cross_validate(
            each, rows, target, cv=[split], scoring="accuracy", return_estimator=True
        )
        fitted, new = scores["estimator"][0], rows.iloc[split[1]]
        assert fitted.predict(new).tolist() == found["prediction"].tolist()
        assert (
            scores["test_score"][0]
            == (found["prediction"].to_numpy() == target.iloc[split[1]]).mean()
        )
        told = found[[f"probability_{each}" for each in fitted.classes_]]
        np.testing.assert_allclose(fitted.predict_proba(new), told, atol=1e-6)
    assert set(found["model"]) == {*set(table["hospital"]), "pooled"}
