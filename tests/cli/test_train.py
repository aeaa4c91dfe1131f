"""`coterie train` and `coterie predict`, as a newcomer uses them."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.records import configuration
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.cli.train import _listened_to
from coterie.data import Preparation, from_table
from coterie.methods import FedAvg
from coterie.recording import End
from coterie.recording.record import Record
from coterie.tables import models

RUNNER = CliRunner()
ADAPTIVE = "AdaptiveAveraging(rates=(0.3, 1.0, 3.0))"
"""The default with steps: no step size is given, so that several are tried."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write visits to three wards that follow one rule, with a missing value here and there."""
    rng = np.random.default_rng(0)
    n = 180
    age, sex = rng.normal(50, 10, n), rng.choice(["f", "m"], n)
    ill = age + 8 * (sex == "m") + rng.normal(0, 4, n) > 54
    age[::17] = np.nan
    frame = pd.DataFrame(
        {
            "ward": np.resize(["a", "b", "c"], n),
            "age": age,
            "sex": sex,
            "ill": np.where(ill, "yes", "no"),
        }
    )
    path = tmp_path / "visits.csv"
    frame.assign(dose=np.nan_to_num(age, nan=50) * 2 + 7.25).to_csv(path, index=False)
    return path


def train(table: Path, out: Path, *options: str, target: str = "ill") -> list[str]:
    named = [
        "--user-column",
        "ward",
        "--target",
        target,
        "--me",
        "a",
        "--out",
        str(out),
        "--steps",
        "60",
        "--rule",
        "wga",
    ]
    return ["train", "--data", str(table), *named, *options]


def test_train_reports_beside_alone_and_predict_applies_what_was_saved(
    table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = RUNNER.invoke(app, train(table, out))
    assert result.exit_code == 0, result.output
    record = Record.load(out / "record.jsonl")
    assert record.end.verdict in " ".join(result.output.split())
    assert "one standard error, paired" in record.end.verdict
    assert "<svg" in (out / "index.html").read_text(encoding="utf-8")

    frame = pd.read_csv(table)
    predicted = RUNNER.invoke(app, ["predict", str(out), str(table)])
    assert predicted.exit_code == 0, predicted.output
    predictions = pd.read_csv(io.StringIO(predicted.stdout))
    preparation = Preparation.load(out)
    model = models.linear(preparation.n_inputs, 2)
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    with torch.no_grad():
        probability = model(preparation.inputs(frame)).double().softmax(1).numpy()
    assert predictions["prediction"].tolist() == [["no", "yes"][i] for i in probability.argmax(1)]
    for k, name in enumerate(("probability_no", "probability_yes")):
        np.testing.assert_allclose(predictions[name], probability[:, k], rtol=1e-12)
    assert (predictions["prediction"] == frame["ill"]).mean() > 0.8

    written = tmp_path / "predictions.csv"
    RUNNER.invoke(app, ["predict", str(out), str(table), "--out", str(written)])
    pd.testing.assert_frame_equal(pd.read_csv(written), predictions)


def test_ids_are_written_beside_predictions_as_they_are_in_the_table(
    table: Path, tmp_path: Path
) -> None:
    frame = pd.read_csv(table)
    ids = [f"{row:03d}" for row in range(len(frame))]
    frame.assign(patient=ids).to_csv(table, index=False)
    assert (
        RUNNER.invoke(
            app, train(table, tmp_path / "run", "--id", "patient", "--steps", "2")
        ).exit_code
        == 0
    )
    predicted = RUNNER.invoke(app, ["predict", str(tmp_path / "run"), str(table)]).stdout
    assert pd.read_csv(io.StringIO(predicted), dtype=str)["patient"].tolist() == ids


def test_a_spreadsheet_runs_no_cell_of_what_is_written_unless_it_is_asked_for(
    table: Path, tmp_path: Path
) -> None:
    frame = pd.read_csv(table)
    ids = [f"=cmd|{row}" for row in range(len(frame))]
    frame.assign(patient=ids).to_csv(table, index=False)
    assert (
        RUNNER.invoke(
            app, train(table, tmp_path / "run", "--id", "patient", "--steps", "2")
        ).exit_code
        == 0
    )
    for options, before in (([], "'"), (["--raw"], "")):
        predicted = RUNNER.invoke(
            app, ["predict", str(tmp_path / "run"), str(table), *options]
        ).stdout
        assert pd.read_csv(io.StringIO(predicted), dtype=str)["patient"].tolist() == [
            before + one for one in ids
        ]


def test_the_reported_test_metric_is_that_of_the_saved_model(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--rule", "bc", "--alpha", "0.6", "--beta", "0.1", "--model", "mlp"]
    assert RUNNER.invoke(app, train(table, out, *options, target="dose")).exit_code == 0
    record = Record.load(out / "record.jsonl")
    assert record.configuration.rule == "BiasCorrection(alpha=0.6, beta=0.1)"
    predicted = RUNNER.invoke(app, ["predict", str(out), str(table)]).stdout
    values = pd.read_csv(io.StringIO(predicted))["prediction"]
    truth = pd.read_csv(table)["dose"]
    overall = float(np.sqrt(((values - truth) ** 2).mean()))
    assert record.end.test["rmse"] == pytest.approx(overall, rel=0.6)  # in the units of the table
    assert overall < truth.std()


def test_the_default_finds_its_weights(table: Path, tmp_path: Path) -> None:
    command = [
        word
        for word in train(table, tmp_path / "run", "--own-examples", "12")
        if word not in ("--rule", "wga")
    ]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    record = Record.load(tmp_path / "run" / "record.jsonl")
    assert record.configuration.rule == ADAPTIVE
    assert set(record.end.account["weights"]) == {"b", "c"}
    assert record.end.verdict in " ".join(result.output.split())


def test_knobs_by_the_theory_and_the_page_that_shows_why(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = RUNNER.invoke(
        app, train(table, out, "--rule", "bc", "--alpha", "auto", "--beta", "auto")
    )
    assert result.exit_code == 0, result.output
    configuration = Record.load(out / "record.jsonl").configuration
    assert configuration.rule == "BiasCorrection(alpha='auto', beta='auto')"
    assert 0 < configuration.choice["alpha"] < 1
    assert 0 < configuration.choice["beta"] <= 1
    assert set(configuration.estimates["peers"]) == {"b", "c"}
    page = (out / "index.html").read_text(encoding="utf-8")
    for words in ("Hessian gap δ_k", "What the theory makes of them", "BC, oracle"):
        assert words in page


@pytest.mark.parametrize("rule", ["alone", "pooled"])
def test_other_rules(table: Path, tmp_path: Path, rule: str) -> None:
    result = RUNNER.invoke(app, train(table, tmp_path / rule, "--rule", rule))
    assert result.exit_code == 0, result.output
    record = Record.load(tmp_path / rule / "record.jsonl")
    wanted = (
        "Alone()"
        if rule == "alone"
        else "WeightedAveraging(alpha=0.7692307692307693, tau={'b': 0.5, 'c': 0.5})"
    )
    assert record.configuration.rule == wanted


@pytest.mark.parametrize("options", [[], ["--lr", "0.3"]])
def test_a_method_by_name_takes_rounds_of_plain_steps(
    table: Path, tmp_path: Path, options: list[str]
) -> None:
    """The model is that of `coterie.train` with the method, and so is the verdict."""
    out = tmp_path / "run"
    result = RUNNER.invoke(
        app, train(table, out, "--rule", "fedavg", "--knob", "local_steps=3", *options)
    )
    assert result.exit_code == 0, result.output
    record = Record.load(out / "record.jsonl")
    lr = 0.3 if options else 0.1
    assert record.configuration.rule == "FedAvg(local_steps=3)"
    assert record.configuration.optimizer == f"SGD(lr={lr})"
    assert (record.end.step, record.end.costs["b"].gradients) == (60, 3 * 60)
    assert record.end.costs["a"].gradients == 2 * 3 * 60, "as many for the model trained alone"
    task = from_table(table, user_column="ward", target="ill", me="a")
    torch.manual_seed(0)
    model = models.build("linear", task.n_inputs, task.n_outputs)
    how: dict[str, Any] = {"loss": models.loss_of(task.preparation), "steps": 60, "lr": lr}
    run = coterie.train(model, me=task.me, peers=task.peers, rule=FedAvg(3), **how)
    assert run.verdict.finding != "unknown"
    assert run.verdict.sentence in " ".join(result.output.split())
    for name, value in torch.load(out / "model.pt", weights_only=True).items():
        assert torch.equal(value, run.model.state_dict()[name])


def test_knobs_of_a_method_may_depend_on_its_rounds(table: Path, tmp_path: Path) -> None:
    assert (
        RUNNER.invoke(app, train(table, tmp_path / "run", "--rule", "fedavg-tuned")).exit_code == 0
    )
    rule = Record.load(tmp_path / "run" / "record.jsonl").configuration.rule
    assert rule == f"FineTuning(rounds={round(0.3 * 60)}, together=FedAvg(local_steps=5))"


def test_the_step_size_of_a_rule_is_that_of_adam(table: Path, tmp_path: Path) -> None:
    for me in ("a", "all"):
        out = tmp_path / me
        assert RUNNER.invoke(app, train(table, out, "--me", me)).exit_code == 0
        record = Record.load((out / "a" if me == "all" else out) / "record.jsonl")
        assert record.configuration.optimizer == "Adam(lr=0.01)"


def test_weights_by_name_and_a_model_of_ones_own(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = "nn.Linear(i, 5), nn.Tanh(), nn.Linear(5, o)"
    source = f"from torch import nn\ndef net(i, o):\n    return nn.Sequential({layers})\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(
        app,
        train(table, tmp_path / "r", "--tau", "b=0.25", "--tau", "c=0.75", "--model", "mine:net"),
    )
    assert result.exit_code == 0, result.output
    record = Record.load(tmp_path / "r" / "record.jsonl")
    assert record.configuration.rule == "WeightedAveraging(alpha=0.5, tau={'b': 0.25, 'c': 0.75})"
    assert "Tanh" in record.configuration.model
    named = ["predict", str(tmp_path / "r"), str(table), "--model", "mine:net"]
    assert RUNNER.invoke(app, named).exit_code == 0
    not_named = RUNNER.invoke(app, named[:3])
    assert not_named.exit_code == 2
    assert "'mine:net', which would run code" in not_named.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--alpha", "1.5"], "`--alpha` must lie in [0, 1], got 1.5"),
        (["--rule", "bc", "--beta", "best"], "`--beta` must be a number or \"auto\", got 'best'"),
        (["--beta", "0.1"], "`--beta` does not fit 'wga', which takes alpha, tau, aggregator"),
        (
            ["--rule", "alone", "--alpha", "0.5"],
            "`--alpha` does not fit 'alone', which takes no knobs",
        ),
        (
            ["--knob", "speed=1"],
            "`--knob speed` does not fit 'wga', which takes alpha, tau, aggregator",
        ),
        (["--knob", "speed"], "`--knob` must be NAME=VALUE, got 'speed'"),
        (
            ["--rule", "bc", "--knob", "warm_up=perhaps"],
            "`--knob warm_up` must be true or false, got 'perhaps'",
        ),
        (
            ["--rule", "bc", "--knob", "start=third"],
            '`--knob start` must be "first" or "zero", got \'third\'',
        ),
        (
            ["--knob", "aggregator=magic"],
            "unknown aggregator 'magic'; the aggregators are mean, median",
        ),
        (["--rule", "magic"], "unknown rule 'magic'; the rules are alone, pooled, wga, bc"),
        (["--rule", "magic"], ", data-interpolation, and the methods fedavg, fedavg-tuned"),
        (["--rule", "fedavg", "--tau", "b=1"], "'fedavg' takes no `--tau`"),
        (
            ["--rule", "fedavg", "--knob", "local_steps=0"],
            "`--knob local_steps` must be a whole number, at least 1",
        ),
        (["--rule", "selfish", "--knob", "internal=z"], "`internal` names 'z', who is no peer"),
        (
            ["--rule", "fedavg", "--local-steps", "2"],
            "a method has rounds of its own: leave `--exchange-every`",
        ),
        (
            ["--rule", "fedavg", "--me", "all", "--engine", "torch"],
            "'fedavg' is a method, which `--me all` takes in one process",
        ),
        (["--rule", "fedbn"], "BatchNorm"),
        (["--metric", "magic"], "unknown metric 'magic'; the metrics are accuracy"),
        (["--tau", "b=0.5"], "`--tau` must sum to 1, got 0.5"),
        (["--tau", "z=1"], "unknown peer 'z'"),
        (["--tau", "b"], "`--tau` must be NAME=WEIGHT, got 'b'"),
        (["--model", "forest"], "unknown model 'forest'"),
        (["--model", "no.such:net"], "cannot be found"),
        (["--leave-out", "b", "--leave-out", "c"], "no peers"),
        (["--steps", "0"], "`--steps` must be a whole number, at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_message_and_leave_nothing(
    table: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    out = tmp_path / "run"
    cluster = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    result = RUNNER.invoke(app, train(table, out, *options), env=cluster)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("coterie: ")
    assert "Traceback" not in result.output
    assert not out.exists()


def test_a_folder_is_not_written_over_and_resume_must_be_of_the_same_run(
    table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert RUNNER.invoke(app, train(table, out)).exit_code == 0
    again = RUNNER.invoke(app, train(table, out))
    assert again.exit_code == 2
    assert "already holds a run" in again.stderr
    other = RUNNER.invoke(app, train(table, out, "--resume", "--alpha", "0.4"))
    assert other.exit_code == 2
    assert "`--rule` was 'WeightedAveraging(alpha=0.5)'" in other.stderr
    assert RUNNER.invoke(app, train(table, out, "--resume")).exit_code == 0
    pd.read_csv(table).assign(age=1.0).to_csv(table, index=False)
    changed = RUNNER.invoke(app, train(table, out, "--resume"))
    assert changed.exit_code == 2
    assert "is of another run" in changed.stderr


def test_predict_without_a_model(table: Path, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["predict", str(tmp_path), str(table)])
    assert result.exit_code == 2
    assert "holds no finished model" in result.stderr


PRESSING = """
import os, signal
from coterie.recording.record import Record

add = Record.add

def pressing(record, point):
    add(record, point)
    if point.step == 50:  # as Ctrl-C does, at a moment that no busy machine moves
        os.kill(os.getpid(), signal.SIGINT)

Record.add = pressing
"""


def test_interrupted_training_goes_on_to_the_same_model(table: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    long = ["--steps", "500"]
    assert RUNNER.invoke(app, train(table, whole, *long)).exit_code == 0
    (tmp_path / "pressing.py").write_text(PRESSING)
    start = [sys.executable, "-m", "coterie", "--import", str(tmp_path / "pressing.py")]
    process = subprocess.Popen(
        [*start, *train(table, cut, *long)], stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "--resume goes on" in " ".join(output.split())
    assert not (cut / "model.pt").exists()
    assert RUNNER.invoke(app, train(table, cut, *long, "--resume")).exit_code == 0
    states = [torch.load(folder / "model.pt", weights_only=True) for folder in (whole, cut)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("options", "rule", "held_out"),
    [
        ([], "Mixture(trees=True)", 0),
        (["--validation", "0.3"], "Mixture(trees=True)", 18),
        (["--steps", "5"], ADAPTIVE, 0),
        (["--model", "mlp", "--steps", "5"], ADAPTIVE, 0),
        (["--steps", "5", "--lr", "0.05"], "AdaptiveAveraging()", 0),
        (["--rule", "alone", "--steps", "5"], "Alone()", 12),
    ],
)
def test_the_closed_form_where_no_option_describes_steps(
    table: Path, tmp_path: Path, options: list[str], rule: str, held_out: int
) -> None:
    command = [
        "train",
        "--data",
        str(table),
        "--user-column",
        "ward",
        "--target",
        "ill",
        "--me",
        "a",
        "--drop",
        "dose",
    ]
    result = RUNNER.invoke(app, [*command, "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == 0, result.output
    configuration = Record.load(tmp_path / "run" / "record.jsonl").configuration
    assert (configuration.rule, configuration.me.validation) == (rule, held_out)


def test_whom_a_mixture_listens_to_is_told_in_parts_of_the_whole() -> None:
    board = {
        kind: {"weight": weight, "loss": 1.0}
        for kind, weight in {"pooled": 0.4, "alone": 0.6}.items()
    }
    record = Record(configuration(rule="Mixture()", peers={"a": 40, "b": 30, "c": 20}))
    record.finish(
        End(step=0, best_step=0, tau={"a": 0.75, "b": 0.25}, account={"leaderboard": board})
    )
    assert _listened_to(record) == "a 30%, b 10%"


def test_predictions_rise_in_a_column_where_that_is_asked_for(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = RUNNER.invoke(app, [*train(table, out)[:-4], "--monotone", "dose=1"])
    assert result.exit_code == 0, result.output
    configuration = Record.load(out / "record.jsonl").configuration
    assert configuration.rule == "Mixture(trees=True, monotonic_cst={1: 1})"
    for wrong, said in (("dose", "COLUMN=1"), ("dos=1", "did you mean 'dose'")):
        bad = RUNNER.invoke(app, [*train(table, tmp_path / "bad")[:-4], "--monotone", wrong])
        assert bad.exit_code
        assert said in " ".join(bad.output.split())
