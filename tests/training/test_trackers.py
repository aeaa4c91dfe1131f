"""Trackers of other packages: what their stubs are told, and what they store where they are installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sqlite3
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_runs import network
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import KnobError

Users = Callable[..., list[coterie.User]]


class Noted(types.ModuleType):
    """A module whose functions, and whose run's, note how they are called."""

    def __init__(self, name: str, fails: str = "") -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*values: Any, **named: Any) -> Any:
            if name == self.fails:
                raise RuntimeError("the server is gone")
            self.calls.append((name, values, named))
            return None if name == "active_run" else self

        return self if name == "summary" else call

    def of(self, name: str) -> list[Any]:
        return [(*values, named) for called, values, named in self.calls if called == name]


def tracked(users: list[coterie.User], out: Path, *names: str) -> coterie.Run:
    problem: Any = (network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5))
    return coterie.train(
        *problem, steps=6, evaluate_every=3, out=out, trackers=names, guard="off", measure=False
    )


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Noted]:
    def installed(name: str, fails: str = "") -> Noted:
        module = Noted(name, fails)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return installed


def test_mlflow_is_told_of_parameters_points_and_the_end(
    make_users: Users, tmp_path: Path, stub: Callable[..., Noted]
) -> None:
    mlflow = stub("mlflow")
    run = tracked(make_users(), tmp_path / "first", "mlflow")
    assert mlflow.of("start_run") == [({"run_name": "first", "nested": False},)]
    ((parameters, _),) = mlflow.of("log_params")
    assert (parameters["rule"], parameters["seed"]) == ("WeightedAveraging(alpha=0.5)", "0")
    assert all(isinstance(value, str) and len(value) <= 500 for value in parameters.values())
    *points, (last, _) = mlflow.of("log_metrics")
    assert [named["step"] for _, named in points] == [point.step for point in run.record.points]
    for (numbers, _), point in zip(points, run.record.points, strict=True):
        assert {"step": point.step, **numbers} == point.to_plain()
    assert last["test_loss"] == run.test["loss"]
    assert last["tau/peer 1"] == run.record.end.tau["peer 1"]
    assert mlflow.of("set_tags") == [({"verdict": run.verdict.sentence}, {})]
    assert mlflow.of("log_artifact") == [(str(tmp_path / "first" / "record.jsonl"), {})]
    assert mlflow.of("end_run") == [("FINISHED", {})]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_told_the_same(
    make_users: Users, tmp_path: Path, stub: Callable[..., Noted], name: str
) -> None:
    package = stub(name)
    run = tracked(make_users(), tmp_path / "first", name)
    ((opened,),) = package.of("init")
    assert (opened["project"], opened["name"]) == ("coterie", "first")
    assert opened["config"]["batch_size"] == 32
    logged = package.of("log")
    if name == "trackio":
        *logged, (summary, _) = logged
    else:
        ((summary, _),) = package.of("update")
        assert opened["dir"] == str(tmp_path / "first")
    assert [(named["step"], {"step": named["step"], **numbers}) for numbers, named in logged] == [
        (point.step, point.to_plain()) for point in run.record.points
    ]
    assert (summary["verdict"], summary["test_loss"]) == (run.verdict.sentence, run.test["loss"])
    assert len(package.of("finish")) == 1


def test_a_tracker_that_fails_does_not_end_the_run(
    make_users: Users, tmp_path: Path, stub: Callable[..., Noted]
) -> None:
    mlflow = stub("mlflow", fails="log_metrics")
    with pytest.warns(
        UserWarning, match="MLflow tracks this run no more: the server is gone"
    ) as told:
        run = tracked(make_users(), tmp_path, "mlflow")
    assert len(told) == 1
    assert run.step == 6
    assert not mlflow.of("end_run")


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_first_step(
    make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KnobError, match=f"`pip install {name}`"):
        tracked(make_users(), tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def _installed(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: only its stub was tried")


@pytest.mark.filterwarnings("default")  # the packages' own
def test_mlflow_itself(make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = tracked(make_users(), tmp_path / "first", "mlflow")
    with sqlite3.connect(tmp_path / "mlflow.db") as file:
        wanted = "select step, value from metrics where key = 'validation_loss' order by step"
        rows = file.execute(wanted).fetchall()
    assert rows == list(zip(*run.record.curve("validation_loss"), strict=True))


@pytest.mark.filterwarnings("default")
def test_wandb_itself_offline(
    make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked(make_users(), tmp_path / "first", "wandb")
    assert list((tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.filterwarnings("default")
def test_trackio_itself(make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = tracked(make_users(), tmp_path / "first", "trackio")
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as file:
        rows = [
            json.loads(row) for (row,) in file.execute("select metrics from metrics order by step")
        ]
    assert [row["validation_loss"] for row in rows[:-1]] == run.record.curve("validation_loss")[1]


def test_tensorboard_follows_where_it_is_installed_and_is_refused_where_it_is_named_and_is_not(
    make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name)
    )
    problem: Any = (
        network(),
        cross_entropy,
        *(users := make_users())[:1],
        users[1:],
        coterie.Alone(),
    )
    coterie.train(*problem, steps=2, out=tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    with pytest.raises(
        KnobError, match="needs 'tensorboard', which is not installed; `pip install tensorboard`"
    ):
        coterie.train(*problem, steps=2, out=tmp_path / "named", trackers=["tensorboard"])
    assert not (tmp_path / "named").exists()
