"""`coterie explore` and `coterie plan RUN`: from records to pages."""

from __future__ import annotations

import json
import re
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
from coterie import theory
from coterie.cli import app
from coterie.cli.terminal import rich_table
from coterie.reporting import plan_page
from coterie.theory.estimates import Estimates

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs: by averaging, alone, and by averaging without measured constants."""
    folder, users = tmp_path_factory.mktemp("runs"), users_with_validation()
    rules = {
        "wga": coterie.WeightedAveraging(0.5),
        "alone": coterie.Alone(),
        "plain": coterie.WeightedAveraging(0.5),
    }
    for name, rule in rules.items():
        torch.manual_seed(0)
        options: dict[str, Any] = {
            "steps": 20,
            "guard": "held-out",
            "measure": name == "wga",
            "progress": False,
        }
        coterie.train(
            nn.Linear(20, 1).double(),
            mse_loss,
            users[0],
            users[1:],
            rule,
            out=folder / name,
            **options,
        )
    return folder


def test_runs_are_compared_on_one_page(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "runs.html"
    result = RUNNER.invoke(
        app,
        ["explore", str(runs / "wga"), str(runs / "alone" / "record.jsonl"), "--out", str(page)],
    )
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    for name in ("wga", "alone"):
        record = coterie.Record.load(runs / name / "record.jsonl")
        assert record.end.verdict.replace("'", "&#39;") in text
        assert f"{record.end.validation['rmse']:.4g}" in text
    assert "do not compare" not in text
    users = users_with_validation()
    model = nn.Linear(20, 1).double()
    coterie.train(
        model, mse_loss, users[1], users[2:], coterie.Alone(), steps=2, out=tmp_path / "other"
    )
    both = [str(runs / "wga"), str(tmp_path / "other")]
    assert RUNNER.invoke(app, ["explore", *both, "--out", str(page)]).exit_code == 0
    assert "do not compare their losses" in page.read_text(encoding="utf-8")
    missing = RUNNER.invoke(app, ["explore", str(tmp_path / "nothing")])
    assert missing.exit_code == 2
    assert "holds no run" in missing.stderr


def test_a_method_without_weights_is_not_drawn_as_if_nobody_were_heard(
    runs: Path, tmp_path: Path
) -> None:
    users, page = users_with_validation(), tmp_path / "runs.html"
    options: dict[str, Any] = {
        "lr": 1e-3,
        "steps": 4,
        "guard": "off",
        "progress": False,
        "out": tmp_path / "fedavg",
    }
    model, method = nn.Linear(20, 1).double(), coterie.methods.FedAvg(2)
    coterie.train(model, mse_loss, users[0], users[1:], method, **options)
    result = RUNNER.invoke(
        app, ["explore", str(runs / "alone"), str(tmp_path / "fedavg"), "--out", str(page)]
    )
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.count("whom the model listens to") == 1, "for the run alone, which asks nobody"
    assert "FedAvg(local_steps=2) does not say how much it listens to each peer" in text
    assert "Against training alone" not in text, "there is nothing to compare"
    assert all(told in text for told in ("4 rounds", "20 steps", "steps or rounds"))


def test_a_run_gives_the_constants_of_a_plan(runs: Path) -> None:
    result = RUNNER.invoke(app, ["plan", str(runs / "wga"), "--steps", "500", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    record = coterie.Record.load(runs / "wga" / "record.jsonl")
    estimates = Estimates.from_plain(record.configuration.estimates)
    equal = np.full(len(estimates.peers), 1 / len(estimates.peers))
    # the average with equal weights
    wanted = theory.plan(estimates.constants(500).constants(equal), 500)
    for name in ("alone", "wga", "bc"):
        assert found[name]["bound"] == pytest.approx(float(wanted[name].bound))
        assert found[name]["alpha"] == pytest.approx(float(wanted[name].alpha))
    less = json.loads(
        RUNNER.invoke(app, ["plan", str(runs / "wga"), "--noise", "0.001", "--json"]).stdout
    )
    assert less["alone"]["bound"] < found["alone"]["bound"]


def test_what_a_plan_lacks_is_named(runs: Path) -> None:
    for arguments, words in (
        ([str(runs / "plain")], "has no measured constants"),
        (["--n-peers", "3"], "`--noise` is missing; give it, or a run"),
        (["--drop", "seen"], "`--drop` has no effect without `--data`"),
        (["--data", "visits.csv"], "`--data` needs `--user-column` too"),
    ):
        result = RUNNER.invoke(app, ["plan", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr


def test_a_table_gives_the_constants_of_a_plan(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    frame = pd.DataFrame(x, columns=["u", "v"]).assign(
        who=np.resize(["a", "b", "c"], 120), y=x[:, 0] + rng.normal(size=120)
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    named = ["--user-column", "who", "--target", "y", "--me", "a"]
    result = RUNNER.invoke(app, ["plan", "--data", str(tmp_path / "t.csv"), *named, "--json"])
    assert result.exit_code == 0, result.output
    assert 0.5 < json.loads(result.stdout)["bc_oracle"]["alpha"] < 1  # two peers, about as noisy
    frame.assign(seen="2024-01-31").to_csv(
        tmp_path / "other.csv", index=False, sep=";", decimal=","
    )
    table = [
        "--data",
        str(tmp_path / "other.csv"),
        "--sep",
        ";",
        "--decimal",
        ",",
        "--drop",
        "seen",
    ]
    again = RUNNER.invoke(app, ["plan", *table, *named, "--json"])
    assert json.loads(again.stdout) == json.loads(result.stdout)


def test_what_sliders_show_is_the_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_page, "POSITIONS", 3)
    problem = theory.Constants(
        n_peers=9,
        noise=10,
        bias_floor=0.4,
        hessian_gap=0.1,
        smoothness=2,
        pl=1,
        initial_gap=5,
        peer_noise=5,
    )
    table = plan_page.lookup(problem, 1000)
    values, columns = table["values"], table["columns"]
    assert len(table["rows"]) == 3**4
    assert [places[1] for places in values.values()] == [9, 10, 0.4, 1000]
    for places in ((1, 1, 1, 1), (0, 2, 1, 0)):
        row = table["rows"][np.ravel_multi_index(places, (3,) * 4)]
        peers, noise, bias, steps = (of[at] for of, at in zip(values.values(), places, strict=True))
        changed = theory.Constants(
            n_peers=peers, noise=noise, bias_floor=bias, hessian_gap=0.1, smoothness=2, pl=1, initial_gap=5,
            peer_noise=noise / 2,
        )  # fmt: skip
        for i, choice in enumerate(theory.plan(changed, steps).values()):
            shown = dict(zip(columns, row[i * len(columns) :], strict=False))
            assert shown["speedup"] == pytest.approx(float(choice.speedup), rel=1e-3)
            assert shown["bound"] == pytest.approx(float(choice.bound), rel=1e-3)
    nothing = plan_page.lookup(
        theory.Constants(
            n_peers=1, noise=1, bias_floor=0, hessian_gap=0.1, smoothness=2, pl=1, initial_gap=5
        ),
        9,
    )
    assert nothing["values"]["bias"][0] == 0
    assert nothing["values"]["peers"] == [1, 2, 3]


@pytest.mark.parametrize(("n_peers", "bias"), [(1, 0.4), (3, 0.0), (4, 0.4), (30, 0.0)])
def test_sliders_begin_at_the_problem_that_the_headline_is_about(
    n_peers: int, bias: float, tmp_path: Path
) -> None:
    problem = theory.Constants(
        n_peers=n_peers,
        noise=10,
        bias_floor=bias,
        hessian_gap=0.1,
        smoothness=2,
        pl=1,
        initial_gap=5,
    )
    page = plan_page.write_plan_page(tmp_path, problem, 1000).read_text(encoding="utf-8")
    shown = dict(re.findall(r'<output id="of-(\w+)">([\d.]+)</output>', page))
    assert {name: float(value) for name, value in shown.items()} == {
        **{"peers": n_peers, "noise": 10, "bias": bias, "steps": 1000},
    }
    starts = [int(at) for at in re.findall(r'max="4" step="1" value="(\d)"', page)]
    table = plan_page.lookup(problem, 1000)
    row = table["rows"][np.ravel_multi_index(tuple(starts), (5,) * 4)]
    wga = theory.plan(problem, 1000)["wga"]
    assert row[2 * len(table["columns"]) - 1] == pytest.approx(float(wga.speedup), rel=1e-3)


def test_a_folder_of_many_runs_is_all_of_them_and_a_plan_says_to_name_one(
    runs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = RUNNER.invoke(app, ["explore", str(runs), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert all(str(run.parent) in page.read_text() for run in runs.glob("*/record.jsonl"))
    result = RUNNER.invoke(app, ["plan", str(runs)])
    assert f"{runs} holds several runs; name one of them, such as {runs / 'alone'}" in result.stderr


def test_a_table_that_is_too_wide_is_folded_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [{"method": "adaptive-guarded"} | {f"column {i}": "0.1234567" for i in range(9)}]
    Console(width=60).print(rich_table(None, rows))
    shown = capsys.readouterr().out
    assert "…" not in shown
    # of the numbers, and of two columns
    assert sum(shown.count(digit) for digit in "67") == 9 * 2 + 2
