"""The files that docs/extending.md shows work wherever those of coterie do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.engines import ENGINES
from torch import nn
from typer.testing import CliRunner

import coterie
from coterie.aggregators import AGGREGATORS
from coterie.benchmark.sets import SETS
from coterie.cli import app
from coterie.evaluation import METRICS
from coterie.methods import METHODS
from coterie.registry import Registry, import_user_code
from coterie.rules import RULES
from coterie.training.hooks import TRACKERS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
REGISTRIES: tuple[Registry[Any], ...] = (RULES, METHODS, AGGREGATORS, SETS, METRICS, TRACKERS)
LOSS = nn.functional.cross_entropy
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the page, and the clinics' visits."""
    folder = tmp_path_factory.mktemp("own")
    for block in re.findall(
        r"```python\n(# (\w+\.py)\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    ):
        (folder / block[1]).write_text(block[0], encoding="utf-8")
    rng = np.random.default_rng(0)
    age, pressure = rng.normal(50, 15, 240), rng.normal(130, 20, 240)
    ill = (age - 50 + (pressure - 130) / 2 + rng.normal(0, 9, 240) > 0).astype(int)
    visits = pd.DataFrame(
        {"clinic": np.resize(list("abcd"), 240), "age": age, "pressure": pressure, "ill": ill}
    )
    (folder / "clinics").mkdir()
    visits.to_csv(folder / "clinics" / "visits.csv", index=False)
    return folder


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the files, and let the registries forget them afterwards."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    everything = ModuleType("own")
    for path in sorted(folder.glob("own_*.py")):
        name = f"coterie_imported_{path.stem}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        import_user_code(str(path))
        vars(everything).update(vars(sys.modules[name]))
    return everything


def users() -> tuple[coterie.User, list[coterie.User]]:
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = (inputs.sum(1) > 0).long()
    me = coterie.User("me", inputs[:12], targets[:12], validation=(inputs[12:20], targets[12:20]))
    peers = [
        coterie.User(f"peer {k}", inputs[20 + 10 * k :][:10], targets[20 + 10 * k :][:10])
        for k in range(4)
    ]
    return me, peers


def trained(rule: Any, **settings: Any) -> torch.Tensor:
    """Return the parameters after a few steps, in double precision."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2).double()
    run = coterie.train(
        model, LOSS, *users(), rule, **{"steps": 7, "batch_size": 5, "lr": 0.05, **settings}
    )
    assert run.step == settings.get("steps", 7)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("limit", [1e9, 0.05])
def test_the_rule_on_every_engine(own: ModuleType, engine: Any, limit: float) -> None:
    wanted = trained(coterie.WeightedAveraging(0.5) if limit > 1 else own.Clipped(limit=limit))
    with engine() as make:
        close(trained(own.Clipped(limit=limit), engine=make), wanted)
    if limit < 1:
        assert not torch.allclose(wanted, trained(coterie.WeightedAveraging(0.5)))


def test_the_rule_captured_and_on_the_engine_of_ones_own(own: ModuleType) -> None:
    rule = own.Clipped(alpha=lambda step: 1 / (1 + step), limit=0.05)
    wanted = trained(rule)
    close(trained(rule, capture=True), wanted)
    close(trained(rule, engine=own.PlainLoop), wanted)
    close(
        trained(coterie.BiasCorrection(0.5, 0.1), engine=own.PlainLoop),
        trained(coterie.BiasCorrection(0.5, 0.1)),
    )
    with pytest.raises(coterie.errors.KnobError, match="at a point of its own"):
        trained(own.HalfWay(), engine=own.PlainLoop)


def test_the_rule_in_many_runs_at_once(own: ModuleType) -> None:
    me, peers = users()
    rules = [own.Clipped(limit=0.05), own.Clipped(alpha=0.9), coterie.Alone()]
    torch.manual_seed(1)
    model = nn.Linear(4, 2).double()
    specs = [
        coterie.RunSpec(model, LOSS, me, peers, rule, lr=0.05, steps=7, batch_size=5)
        for rule in rules
    ]
    runs = coterie.train_many(specs)
    assert runs[0].record.configuration.runs == "one program of 3"
    for run, rule in zip(runs, rules, strict=True):
        close(nn.utils.parameters_to_vector(run.model.parameters()).detach(), trained(rule))


def test_the_aggregator_and_the_method(own: ModuleType) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 5.0], [600.0, 800.0]])
    torch.testing.assert_close(own.Bounded()(rows), torch.tensor([2.0, 13 / 3]))
    trained(coterie.BiasCorrection(0.5, 0.1, aggregator=own.Bounded(times=2.0)))
    alone = trained(own.HalfWay(share=0.0, local_steps=1), lr=0.05, steps=3, guard="off")
    close(alone, trained(coterie.Alone(), optimizer=torch.optim.SGD, steps=3))
    assert not torch.allclose(
        alone, trained(own.HalfWay(share=1.0, local_steps=1), steps=3, guard="off")
    )


def coterie_command(folder: Path, *words: str) -> str:
    """Run a command in a process of its own, and return what it prints."""
    source = str(Path(coterie.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": source}
    command = [sys.executable, "-W", "error", "-m", "coterie", *words]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_line_trains_by_the_rule(folder: Path) -> None:
    files = ("own_rule.py", "own_tracker.py", "own_metric")  # the last as a module of this folder
    imports = [word for name in files for word in ("--import", name)]
    data = [
        "--data",
        "clinics/visits.csv",
        "--user-column",
        "clinic",
        "--target",
        "ill",
        "--me",
        "a",
    ]
    options = [
        "--rule",
        "clipped",
        "--knob",
        "limit=0.1",
        "--metric",
        "recall",
        "--tracker",
        "best",
    ]
    options += ["--steps", "20", "--out", "run"]
    coterie_command(folder, *imports, "train", *data, *options)
    record = coterie.Record.load(folder / "run" / "record.jsonl")
    assert record.configuration.rule == "Clipped(limit=0.1)"
    assert record.end is not None
    assert set(record.end.test) == {"loss", "accuracy", "recall"}
    best = min(point.validation["loss"] for point in record.points)
    assert (folder / "run" / "best.txt").read_text(
        encoding="utf-8"
    ) == f"{best:.6g} after 20 steps\n"
    assert not (folder / "run" / "tensorboard").exists()


def test_the_help_and_the_list_name_them(own: ModuleType) -> None:
    shown = " ".join(re.sub(r"[│\s]+", " ", RUNNER.invoke(app, ["train", "--help"]).output).split())
    assert "data-interpolation, clipped." in shown
    assert "brier, recall." in shown
    assert (
        "tensorboard, mlflow, wandb, trackio, best; tensorboard, where it is installed, if left out"
        in shown
    )
    listed = RUNNER.invoke(app, ["list", "aggregators"]).output
    assert (
        "  bounded              Cut every row to a multiple of the median length, and average."
        in listed
    )


def test_the_benchmark_compares_them_on_the_set(
    own: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = [
        word
        for name in ("rule", "aggregator", "method", "set")
        for word in ("--import", f"own_{name}.py")
    ]
    asked = ["--data", ".", "--sets", "clinics", "--methods", "clipped,half-way,wga-bounded"]
    small = ["--conditions", "permuted", "--users", "1", "--steps", "3", "--jobs", "2"]
    monkeypatch.chdir(folder)
    result = RUNNER.invoke(app, [*imports, "bench", *asked, *small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    frame = pd.read_parquet(tmp_path / "results.parquet")  # of another process
    assert sorted(set(frame["method"])) == [
        "alone",
        "clipped",
        "half-way",
        "sklearn-alone",
        "wga-bounded",
    ]
    assert len(frame) == 5
    tried = dict(zip(frame["method"], frame["settings"], strict=True))
    assert tried == {
        "alone": 12,
        "sklearn-alone": 9,
        "clipped": 9,
        "half-way": 12,
        "wga-bounded": 12,
    }
