"""Everybody's runs as one program: resumed, interrupted, restarted by a guard and left by one that fails."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.everyone import everyone
from tests.support.small_runs import network, same, state_of
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import UserCodeError
from coterie.everyone.folders import align
from coterie.recording import checkpoint
from coterie.training.run import Stopped
from coterie.users.examples import InMemory

RULES: dict[str, Any] = {
    "adaptive": None,
    "wga": coterie.WeightedAveraging(0.5),
    "bc": coterie.BiasCorrection(0.5, 0.1),
}
SETTINGS: dict[str, Any] = {"lr": 0.05, "measure": False, "trackers": (), "steps": 12}


def train(rule: Any, users: list[coterie.User] | None = None, **changed: Any) -> coterie.Runs:
    return coterie.train_everyone(
        network(), cross_entropy, users or everyone(), rule, **{**SETTINGS, **changed}
    )


def assert_close(
    runs: coterie.Runs, users: list[coterie.User], rule: Any, but: str = "", /, **more: Any
) -> None:
    """Everybody's run is the one that `train` gives, to rounding, with the same costs and the same record."""
    settings = {key: value for key, value in {**SETTINGS, **more}.items() if key != "out"}
    for me in (user for user in users if user.name != but):
        peers = [user for user in users if user is not me]
        one, mine = (
            coterie.train(network(), cross_entropy, me, peers, rule, **settings),
            runs.runs[me.name],
        )
        inputs, _ = me.examples.take(torch.arange(len(me)))
        torch.testing.assert_close(mine.model(inputs), one.model(inputs), rtol=1e-5, atol=1e-6)
        # a last layer of five examples that are apart has a flat mode, which a search meets roughly
        torch.testing.assert_close(
            list(mine.model.parameters()), list(one.model.parameters()), rtol=1e-3, atol=1e-4
        )
        assert mine.record.end.costs == one.record.end.costs
        assert [point.step for point in mine.record.points] == [
            point.step for point in one.record.points
        ]
        for a, b in zip(mine.record.points, one.record.points, strict=True):
            assert a.to_plain() == pytest.approx(b.to_plain(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_one_program_gives_the_runs_of_train(rule: str) -> None:
    users = everyone(4)
    # other folds, and nothing held out
    users[3] = coterie.User("few", *users[3].examples.take(torch.arange(5)))
    runs = train(RULES[rule], users)
    how = {run.record.configuration.runs for run in runs.runs.values()}
    assert any(told.startswith("one program") for told in how)
    assert_close(runs, users, RULES[rule])


@pytest.mark.cuda
@pytest.mark.parametrize("rule", RULES)
def test_one_program_on_a_gpu_gives_what_the_cpu_gives(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # captured steps are each run's own
    monkeypatch.setattr("coterie.training.train.captured_steps", lambda *_: (None, "off"))
    there, here = (train(RULES[rule], device=device) for device in ("cuda", "cpu"))
    for name, run in there.runs.items():
        assert run.record.configuration.runs.startswith("one program")
        ours, theirs = (
            [p.cpu() for p in each.model.parameters()] for each in (run, here.runs[name])
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_steps_between_looks_are_taken_for_all_and_constants_are_measured_once() -> None:
    users, settings = everyone(3), {"steps": 96, "evaluate_every": 24, "measure": True}
    runs = train(None, users, **settings)
    assert_close(runs, users, None, **settings)
    one = coterie.train(
        network(), cross_entropy, users[2], users[:2], **{**SETTINGS, **settings, "steps": 1}
    )
    assert runs.runs["user 2"].record.configuration.estimates == one.record.configuration.estimates


def test_schedules_clipping_and_a_guard_that_restarts() -> None:
    users = everyone(3, examples=60)
    for user in users[1:]:  # contrary to the first, who restarts from the model trained alone
        inputs, targets = user.examples.take(torch.arange(len(user)))
        user.examples = InMemory(inputs, (targets + 1) % 3)
    options: dict[str, Any] = {
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995),
        "clip_norm": 0.5,
        "guard": "held-out",
        "steps": 60,
        "lr": 0.2,
        "evaluate_every": 10,
    }
    rule = coterie.WeightedAveraging(1.0)
    runs = train(rule, users, **options)
    restarts = [
        run.record.points[-1].guard.restarts
        for run in runs.runs.values()
        if run.record.points[-1].guard
    ]
    assert max(restarts) > 0
    assert_close(runs, users, rule, **options)


@pytest.mark.parametrize("rule", ["adaptive", "bc"])
def test_resumed_it_has_the_same_bits(rule: str, tmp_path: Path) -> None:
    whole = train(RULES[rule], out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for folder in (tmp_path / "part").iterdir():
        for path in checkpoint.saved(folder / "checkpoints")[-1:] if folder.is_dir() else ():
            path.unlink()
    ahead = tmp_path / "part" / "user_1" / "checkpoints"
    ahead.mkdir(exist_ok=True)
    for path in checkpoint.saved(tmp_path / "whole" / "user_1" / "checkpoints"):
        # killed while checkpoints were written: one is ahead of the others
        shutil.copy(path, ahead)
    again = train(RULES[rule], out=tmp_path / "part", resume=True)
    for name, run in whole.runs.items():
        assert same(state_of(run.model), state_of(again.models[name]))
        assert run.record.end.costs == again.runs[name].record.end.costs
        assert again.runs[name].record.configuration.runs == "one program of 4"


def test_ctrl_c_ends_all_after_the_step_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pressing(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        calls.append(1)
        if len(calls) == 15:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    users = everyone()
    stopped = train(RULES["wga"], users, out=tmp_path, metrics={"m": pressing}, evaluate_every=2)
    assert stopped.stopped is Stopped.CTRL_C
    assert stopped.pooled is None
    assert {run.step for run in stopped.runs.values()} == {next(iter(stopped.runs.values())).step}
    assert next(iter(stopped.runs.values())).step < 12
    again = train(
        RULES["wga"], users, out=tmp_path, metrics={"m": pressing}, evaluate_every=2, resume=True
    )
    whole = train(RULES["wga"], users, evaluate_every=2)
    for name, run in whole.runs.items():
        assert same(state_of(run.model), state_of(again.models[name]))
    assert again.pooled is not None


def test_one_whose_gradient_is_not_finite_ends_and_the_others_go_on() -> None:
    for rule in ("adaptive", "wga"):
        users = everyone()
        inputs, targets = users[2].examples.take(torch.arange(12))
        users[2] = coterie.User("user 2", inputs * torch.nan, targets)
        with pytest.warns(
            UserWarning,
            match=r"the run of 'user 2' has ended early: .* not finite at step 0 \(loss",
        ):
            runs = train(RULES[rule], users)
        assert runs.runs["user 2"].stopped is Stopped.NOT_FINITE
        others = [run for name, run in runs.runs.items() if name != "user 2"]
        assert all(run.stopped is None and run.step == 12 for run in others)
        assert_close(runs, users, RULES[rule], "user 2")


def test_where_nobodys_gradient_is_finite_all_end() -> None:
    for rule in ("adaptive", "wga"):
        bad = []
        for user in everyone():
            inputs, targets = user.examples.take(torch.arange(12))
            bad.append(coterie.User(user.name, inputs * torch.nan, targets))
        with pytest.warns(UserWarning, match="has ended early"):
            runs = train(RULES[rule], bad)
        assert [run.stopped for run in runs.runs.values()] == [Stopped.NOT_FINITE] * len(bad)


def test_code_of_ones_own_that_raises_ends_its_run_and_the_error_has_all() -> None:
    calls = []

    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        calls.append(1)
        if len(calls) == 7:
            raise ZeroDivisionError
        return 0.0

    with pytest.raises(UserCodeError, match="all runs are in this error") as caught:
        train(RULES["wga"], metrics={"m": failing})
    runs = caught.value.run
    assert isinstance(runs, coterie.Runs)
    assert len(runs.runs) == 4
    assert sum(run.stopped is Stopped.USER_CODE for run in runs.runs.values()) == 1


def test_code_of_ones_own_that_raises_for_the_pooled_model_does_not_lose_the_others() -> None:
    users = everyone()

    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        if len(targets) > 12:  # more than anybody holds out
            raise ZeroDivisionError
        return 0.0

    with pytest.raises(UserCodeError, match="all runs are in this error") as caught:
        train(RULES["wga"], users, metrics={"m": failing})
    runs = caught.value.run
    assert isinstance(runs, coterie.Runs)
    assert [run.stopped for run in runs.runs.values()] == [None] * len(users)


def test_with_fewer_exchanges_nothing_is_said_of_the_pooled_model() -> None:
    """It is trained alone, on everybody's examples; a warning would be an error here."""
    runs = train(RULES["wga"], everyone(3), exchange_every=3)
    assert runs.pooled is not None
    assert (runs.specs[0].exchange_every, runs.pooled.record.configuration.exchange_every) == (3, 1)


def test_rules_that_need_every_gradient_are_followed_one_by_one() -> None:
    median = coterie.WeightedAveraging(0.5, aggregator=coterie.aggregators.CoordinateMedian())
    users = everyone(3)
    runs = train(median, users)
    assert {run.record.configuration.runs for run in runs.runs.values()} == {
        "by itself: every peer's gradient is needed"
    }
    assert_close(runs, users, median)


@pytest.mark.parametrize("rule", [None, coterie.WeightedAveraging(0.5)])
def test_a_layer_that_keeps_runs_apart_is_the_reason_told(rule: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    runs = coterie.train_everyone(
        model, cross_entropy, everyone(3), rule, **SETTINGS | {"steps": 2}
    )
    told = {run.record.configuration.runs for run in runs.runs.values()}
    assert len(told) == 1
    assert "the model moves its buffers" in told.pop()


def test_alignment_takes_the_step_that_most_have(tmp_path: Path) -> None:
    for name, steps in {"a": (4, 8), "b": (4, 8), "c": (8, 12), "failed": (3,)}.items():
        for step in steps:
            checkpoint.save(tmp_path / name / "checkpoints", step, {"x": torch.zeros(1)})
    folders = [tmp_path / name for name in ("a", "b", "c", "failed")]
    align(folders)
    newest = [
        checkpoint.step_of(checkpoint.saved(folder / "checkpoints")[-1]) for folder in folders
    ]
    assert newest == [8, 8, 8, 3]
