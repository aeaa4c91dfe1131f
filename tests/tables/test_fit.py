"""From a table to a folder: metrics in the target's units, and predictions by the model that was saved."""

from __future__ import annotations

import errno
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.folders import Disk, claimed_elsewhere

import coterie
from coterie.data import Preparation, from_table
from coterie.errors import FileError, KnobError, ModelError
from coterie.evaluation import METRICS
from coterie.mixture.families import SQUARED
from coterie.mixture.fit import fit_here
from coterie.recording import files
from coterie.tables import models
from coterie.tables.fit import fit
from coterie.tables.predict import predict
from coterie.tables.report import metrics_of
from coterie.users.sampling import random_key


def visits(n: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, 2))
    return pd.DataFrame(x, columns=["u", "v"]).assign(
        who=np.resize(["a", "b"], n), y=40 + 7 * x[:, 0] + 4 * x[:, 1]
    )


def test_a_named_metric_is_in_the_units_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))

    @METRICS.register("mean-output")
    def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert 20 < float(targets.mean()) < 60
        return float(outputs.double().mean())

    task = from_table(visits(), user_column="who", target="y", me="a")
    names = ["mean-output", "rmse"]
    fitted = fit(task, coterie.Alone(), "linear", tmp_path / "run", metrics=names, steps=5, lr=0.05)
    assert fitted is not None
    assert list(fitted.test) == ["loss", "mean-output", "rmse"]
    assert task.me.test is not None
    inputs, targets = task.me.test.take(torch.arange(len(task.me.test)))
    with torch.no_grad():
        outputs = fitted.model(inputs)
    scale, centre = task.preparation.scale, task.preparation.centre
    assert fitted.test["mean-output"] == pytest.approx(
        centre + scale * float(outputs.mean()), rel=1e-5
    )
    rmse = scale * float((outputs - targets).square().mean().sqrt())
    assert fitted.test["rmse"] == pytest.approx(rmse, rel=1e-5)

    predictions = predict(tmp_path / "run", visits())
    assert len(predictions) == 90
    with torch.no_grad():
        wanted = centre + scale * fitted.model(task.preparation.inputs(visits())).flatten().double()
    np.testing.assert_allclose(predictions["prediction"], wanted, rtol=1e-6)


def test_what_is_not_there(tmp_path: Path) -> None:
    task = from_table(visits(), user_column="who", target="y", me="a")
    with pytest.raises(KnobError, match="unknown metric 'magic'"):
        fit(task, coterie.Alone(), "linear", tmp_path / "run", metrics=["magic"], steps=2)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileError, match="holds no finished model"):
        predict(tmp_path, visits())


def test_a_folder_cannot_name_code_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a folder that somebody else made neither runs nor is imported."""
    task = from_table(visits(), user_column="who", target="y", me="a")
    fit(task, coterie.Alone(), "linear", tmp_path / "run", steps=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    for about in (
        {"model": "builtins:exec", "n_inputs": "open('ran', 'w').close()"},
        {"model": "builtins:exec"},
        {"model": "planted:net"},
    ):
        path = tmp_path / "run" / "model.json"
        files.write_json(path, files.read_json(path, "") | about)
        with pytest.raises(
            (ModelError, FileError), match=r"would run code|must have whole numbers"
        ):
            predict(tmp_path / "run", visits())
    assert not (tmp_path / "ran").exists()


def test_a_model_that_would_fill_memory_is_refused(tmp_path: Path) -> None:
    """One that says it has 10¹² inputs, and one whose file is larger than any."""
    fit(
        from_table(visits(), user_column="who", target="y", me="a"),
        coterie.Alone(),
        "linear",
        tmp_path,
        steps=2,
    )
    about = files.read_json(tmp_path / "model.json", "")
    files.write_json(tmp_path / "model.json", about | {"n_inputs": 10**12})
    with pytest.raises(ModelError, match=r"\d{13} numbers do not fit into its"):
        predict(tmp_path, visits())
    files.write_json(tmp_path / "model.json", about)
    os.truncate(tmp_path / "model.pt", 2**40)
    with pytest.raises(FileError, match="more than the 1073741824 that one may have"):
        predict(tmp_path, visits())


def test_a_model_that_runs_code_when_it_is_read_is_refused(tmp_path: Path) -> None:
    task = from_table(visits(), user_column="who", target="y", me="a")
    fit(task, coterie.Alone(), "linear", tmp_path, steps=2)
    about = files.read_json(tmp_path / "model.json", "")
    for body in (pickle.dumps(Trap(tmp_path / "ran")), b"", b"PK\x03\x04"):
        (tmp_path / "model.pt").write_bytes(body)
        with pytest.raises(
            FileError,
            match=r"model.pt is damaged .* `coterie train` with `--resume` writes it anew",
        ):
            predict(tmp_path, visits())
        files.write_json(tmp_path / "model.json", about | {"parameters": files.sha256(body)})
        with pytest.raises(ModelError, match=r"model.pt does not fit the model 'linear'"):
            predict(tmp_path, visits())
        files.write_json(tmp_path / "model.json", about)
    assert not (tmp_path / "ran").exists()


def test_a_preparation_of_another_version_or_with_wrong_numbers_is_refused(tmp_path: Path) -> None:
    """It is plain data, of which nothing can run."""
    from_table(visits(), user_column="who", target="y", me="a").preparation.save(tmp_path)
    plain = files.read_json(tmp_path / "preparation.json", "")
    before = {name: value for name, value in plain.items() if name != "numbers"}
    for wrong in (before, plain | {"numbers": {"x": ["a", 0, 1, None]}}, plain | {"numbers": [1]}):
        files.write_json(tmp_path / "preparation.json", wrong)
        with pytest.raises(FileError, match=r"cannot be understood by this version"):
            Preparation.load(tmp_path)


def test_a_model_that_cannot_be_written_is_in_the_error_and_written_on_resuming(
    tmp_path: Path,
) -> None:
    task, disk = (
        from_table(visits(), user_column="who", target="y", me="a"),
        Disk(errno.ENOSPC, 2, 2),
    )
    settings: dict[str, Any] = {"steps": 2, "lr": 0.05, "trackers": ()}
    message = r"preparation.json cannot be written \(No space left.*`--resume` will write it then"
    warned = pytest.warns(UserWarning, match=r"goes on in memory|not all of this run is in")
    with disk.used(), warned, pytest.raises(FileError, match=message) as caught:
        fit(task, coterie.Alone(), "linear", tmp_path, **settings, hooks=[disk.follow])
    fit(task, coterie.Alone(), "linear", tmp_path, **settings, resume=True)
    ours = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(
        torch.equal(ours[name], value)
        for name, value in caught.value.run.model.state_dict().items()
    )
    with claimed_elsewhere(tmp_path), pytest.raises(FileError, match="is in use by process"):
        fit(task, coterie.Alone(), "linear", tmp_path, **settings, resume=True)


class Trap:
    """What runs code when a pickle of it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_row_of_weight_two_counts_as_two_rows_and_one_of_weight_0_not_at_all(kind: str) -> None:
    frame = visits(60).assign(w=np.resize([2.0, 1.0, 0.0, 1.0], 60))
    frame = (
        frame if kind == "regression" else frame.assign(y=np.where(frame["y"] > 40, "yes", "no"))
    )
    task = from_table(frame, user_column="who", target="y", me="a", weights="w")
    plain = replace(task.preparation, weights=None)
    model = models.build("linear", task.n_inputs, task.n_outputs).requires_grad_(
        requires_grad=False
    )
    twice = frame.loc[frame.index.repeat(frame["w"].astype(int))]
    inputs, targets = task.preparation.examples(frame, "y")
    repeated = plain.examples(twice, "y")
    outputs = model(inputs)
    loss, wanted = (
        models.loss_of(task.preparation)(outputs, targets),
        models.loss_of(plain)(model(repeated[0]), repeated[1]),
    )
    torch.testing.assert_close(loss, wanted)
    names = ["auc", "brier"] if kind == "classification" else ["mae", "r2"]
    for name, metric in metrics_of(task.preparation, names).items():
        assert metric(outputs, targets) == pytest.approx(
            metric(model(repeated[0]), repeated[1]), rel=1e-5
        ), name


def test_weights_reach_training_and_every_number_that_is_told(tmp_path: Path) -> None:
    """Rows of weight 0 may say anything; with them the run is the one without."""
    frame = visits(90).assign(w=1.0)
    wrong = frame.assign(
        y=lambda f: np.where(np.arange(90) % 6 < 2, -999.0, f["y"]), w=np.arange(90) % 6 >= 2
    )
    columns: dict[str, Any] = {"user_column": "who", "target": "y", "me": "a", "weights": "w"}
    preparation = from_table(frame, **columns).preparation
    task = from_table(wrong, **columns, preparation=preparation)
    run = fit(
        task, coterie.WeightedAveraging(0.5), "linear", tmp_path, steps=100, lr=0.1, progress=False
    )
    assert run is not None
    assert run.test["rmse"] < 1  # of a spread of 7
    assert run.test["loss"] < 0.05


def test_the_first_metric_named_makes_the_verdict(tmp_path: Path) -> None:
    frame = visits(200).assign(y=lambda f: np.where(f["y"] + 9 * f["v"] > 40, "yes", "no"))
    task = from_table(frame, user_column="who", target="y", me="a")
    run = fit(
        task,
        coterie.WeightedAveraging(0.5),
        "linear",
        tmp_path,
        metrics=["auc"],
        steps=20,
        progress=False,
    )
    assert run is not None
    assert list(run.test) == ["loss", "auc", "accuracy"]
    if run.record.end.comparison is not None:
        assert list(run.verdict.measures) == ["auc", "loss"]
    with pytest.raises(
        KnobError, match="`rmse` is no metric for classification; choose among accuracy"
    ):
        metrics_of(task.preparation, ["rmse"])


def test_predictions_carry_the_ids_along(tmp_path: Path) -> None:
    frame = visits().assign(patient=[f"p{i}" for i in range(90)])
    fit(
        from_table(frame, user_column="who", target="y", me="a", ids="patient"),
        coterie.Alone(),
        "linear",
        tmp_path,
    )
    assert predict(tmp_path, frame[::-1])["patient"].tolist() == [
        f"p{i}" for i in reversed(range(90))
    ]
    with pytest.warns(UserWarning, match="no column 'patient', so predictions carry no ids"):
        assert list(predict(tmp_path, frame.drop(columns="patient"))) == ["prediction"]
    numbers = frame.select_dtypes("number").columns.drop("y", errors="ignore")
    with pytest.warns(
        UserWarning, match=f"'{numbers[0]}' has 90 of 90 numbers more than 10 standard deviations"
    ):
        predict(tmp_path, frame.assign(**{numbers[0]: 1e9}))


def test_intervals_and_sets_come_from_the_scores_beside_the_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rows = visits(400).assign(y=lambda r: r["y"] + 3 * rng.normal(size=400))
    task = from_table(rows, user_column="who", target="y", me="a")
    fitted = fit(task, coterie.Alone(), "linear", tmp_path / "run", steps=150, lr=0.05)
    assert fitted is not None
    told = predict(tmp_path / "run", rows, coverage=0.9)
    assert list(told.columns) == ["prediction", "lower", "upper"]
    half = (told["upper"] - told["prediction"]).iloc[0]
    assert np.allclose(told["prediction"] - told["lower"], half)
    assert task.me.test is not None
    inputs, targets = task.me.test.take(torch.arange(len(task.me.test)))
    with torch.no_grad():
        residuals = task.preparation.scale * (fitted.model(inputs) - targets).flatten().abs()
    saved = files.read_json(tmp_path / "run" / "calibration.json", "")["own"]
    assert np.allclose(saved[-len(residuals) :], residuals.numpy(), rtol=1e-5)
    covered = ((told["lower"] <= rows["y"]) & (rows["y"] <= told["upper"])).mean()
    assert 0.85 < covered < 0.97

    classes = rows.assign(y=np.where(rows["y"] > 40, "ill", "well"))
    task = from_table(classes, user_column="who", target="y", me="a")
    assert (
        fit(task, coterie.Alone(), "linear", tmp_path / "classes", steps=150, lr=0.05) is not None
    )
    told = predict(tmp_path / "classes", classes, coverage=0.9)
    assert set(told["set"]) <= {"", "ill", "well", "ill | well"}
    assert (
        np.mean(
            [
                truth in found.split(" | ")
                for truth, found in zip(classes["y"], told["set"], strict=True)
            ]
        )
        > 0.8
    )


def test_what_each_peer_adds_is_on_the_page_where_it_is_asked_for(tmp_path: Path) -> None:
    task = from_table(visits(), user_column="who", target="y", me="a", validation=0.0)
    run = fit(task, coterie.Mixture(), "linear", tmp_path / "run", contributions=True)
    assert run is not None
    given = run.contributions()["b"].leave_one_out
    saved = files.read_json(tmp_path / "run" / "contributions.json", "")
    assert saved["b"]["leave_one_out"] == pytest.approx(given._asdict())
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "What each peer adds" in page
    assert f"{given.value:+.3g}" in page


def test_own_rows_calibrate_by_models_that_did_not_see_them(tmp_path: Path) -> None:
    """Their scores are those of `fit_here` on the same numbers, in the units of the target."""
    task = from_table(visits(), user_column="who", target="y", me="a", validation=0.0)
    run = fit(task, coterie.Mixture(), "linear", tmp_path / "run")
    assert run is not None
    rows = [
        [part.double().numpy() for part in user.examples.take(torch.arange(len(user)))]
        for user in (task.me, *task.peers)
    ]
    seed = random_key(0, "a/folds") % 2**32
    (x, y), peers = rows[0], [(inputs, targets) for inputs, targets in rows[1:]]
    losses = fit_here(x, y, peers, SQUARED, seed=seed).served.losses
    saved = files.read_json(tmp_path / "run" / "calibration.json", "")["own"]
    expected = task.preparation.scale * np.sqrt(losses)
    assert np.allclose(saved[-len(task.me) :], expected, rtol=1e-4)
    assert task.me.test is not None
    assert len(saved) == len(task.me) + len(task.me.test)


def test_a_folder_without_scores_says_what_to_do(tmp_path: Path) -> None:
    task = from_table(visits(), user_column="who", target="y", me="a")
    fit(task, coterie.Alone(), "linear", tmp_path / "run", steps=5, lr=0.05)
    (tmp_path / "run" / "calibration.json").unlink()
    with pytest.raises(coterie.errors.DataError, match="train it anew"):
        predict(tmp_path / "run", visits(), coverage=0.9)
    fit(task, coterie.Alone(), "linear", tmp_path / "again", steps=5, lr=0.05)
    with pytest.raises(KnobError, match="`coverage` must lie between 0 and 1"):
        predict(tmp_path / "again", visits(), coverage=1.5)
