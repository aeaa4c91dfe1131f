"""Hooks: what they are told and what they may do; the progress bar and TensorBoard."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_runs import network
from torch.nn.functional import cross_entropy

import coterie
from coterie import Hook
from coterie.errors import GradientError, KnobError
from coterie.methods import FedAvg
from coterie.recording import checkpoint
from coterie.recording.result import Point
from coterie.training.hooks import Start, as_hook
from coterie.training.run import Stopped

Users = Callable[..., list[coterie.User]]


def test_functions_of_a_step(make_users: Users, tmp_path: Path) -> None:
    users, steps, others = make_users(), list[coterie.Step](), list[int]()

    def stop(step: coterie.Step) -> bool:
        steps.append(step)
        return step.step == 5

    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.25)),
        steps=20,
        evaluate_every=2,
        hooks=[stop, lambda step: others.append(step.step)],
        out=tmp_path,
    )
    assert [step.step for step in steps] == others == [1, 2, 3, 4, 5]
    assert [step.point is not None for step in steps] == [False, True, False, True, False]
    assert all(step.weight == 0.25 and math.isfinite(step.own_loss) for step in steps)
    assert (run.stopped, run.step) == (Stopped.HOOK, 5)
    assert run.test
    assert "stopped by a hook at step 5 of 20" in run.summary()
    assert checkpoint.load(checkpoint.saved(tmp_path / "checkpoints")[-1])["learner"]["step"] == 5


@pytest.mark.parametrize("shown", [True, False, None])
def test_progress(make_users: Users, monkeypatch: pytest.MonkeyPatch, shown: bool | None) -> None:
    users, screen = make_users(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.25)),
        steps=10,
        progress=shown,
    )
    text = screen.getvalue()
    assert bool(text) == bool(shown)  # None: standard error is no terminal here
    if shown:
        assert "WeightedAveraging" in text
        assert "10/10" in text
        assert "peers' weight 0.25" in text
        assert "own loss" in text


def test_tensorboard_events_can_be_read(make_users: Users, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    users = make_users()
    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5)),
        steps=6,
        evaluate_every=2,
        out=tmp_path,
    )
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps, losses = run.record.curve("validation_loss")
    logged = {event.step: event.value for event in events.Scalars("validation_loss")}
    wanted = dict(zip(steps, losses, strict=True))
    assert logged == pytest.approx(wanted, rel=1e-6)
    assert {"own_loss", "weight", "validation_accuracy"} <= set(events.Tags()["scalars"])


class Noting(Hook):
    """Note what is told."""

    def __init__(self, last: int | None = None) -> None:
        self.told: list[Any] = []
        self.last = last

    def on_start(self, start: Start) -> None:
        self.told.append(
            ("start", start.step, type(start.rule).__name__, start.configuration.steps)
        )

    def on_step(self, step: coterie.Step) -> bool:
        self.told.append((step.step, step.best_loss is not None, dict(step.tau())))
        return step.step == self.last

    def on_evaluation(self, point: Point) -> None:
        self.told.append(point.step)

    def on_end(self, run: coterie.Run) -> None:
        self.told.append((run.stopped, run.step, run.record.ended))


def test_a_hook_sees_start_steps_evaluations_and_end(make_users: Users, tmp_path: Path) -> None:
    users, tau = make_users((12, 16, 9)), {"peer 1": 0.25, "peer 2": 0.75}
    problem: Any = (
        network(),
        cross_entropy,
        users[0],
        users[1:],
        coterie.WeightedAveraging(0.5, tau),
    )
    settings: dict[str, Any] = {"steps": 4, "evaluate_every": 3, "out": tmp_path}
    first, second = Noting(last=2), Noting()
    coterie.train(*problem, **settings, hooks=[first])
    start = ("start", 0, "WeightedAveraging", 4)
    assert first.told == [start, 0, (1, True, tau), (2, True, tau), (Stopped.HOOK, 2, True)]
    coterie.train(*problem, **settings, hooks=[second], resume=True)
    start = ("start", 2, "WeightedAveraging", 4)
    assert second.told == [start, 3, (3, True, tau), 4, (4, True, tau), (None, 4, True)]


def test_a_hook_sees_the_rule_that_was_chosen_and_a_method(make_users: Users) -> None:
    users = make_users((12, 16, 9))
    for rule, names in (
        (coterie.WeightedAveraging("auto"), ["Alone", "WeightedAveraging"]),
        (coterie.AdaptiveAveraging(), ["AdaptiveAveraging"]),
        (FedAvg(local_steps=2), ["FedAvg"]),
    ):
        noting = Noting()
        coterie.train(
            network(), cross_entropy, users[0], users[1:], rule, steps=2, lr=0.1, hooks=[noting]
        )
        assert noting.told[0][2] in names


def test_a_hook_is_told_of_the_end_by_a_gradient_that_is_not_finite(make_users: Users) -> None:
    users, noting = make_users(), Noting()
    with pytest.raises(GradientError):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
            optimizer=torch.optim.SGD,
            lr=1e308,
            hooks=[noting],
        )
    assert noting.told[-1][0] is Stopped.NOT_FINITE


def test_a_hook_that_clips_after_the_step_is_told_that_it_does_nothing(make_users: Users) -> None:
    users = make_users()
    problem: Any = (network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5))

    def clips(step: coterie.Step) -> None:
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1e-9)

    with pytest.warns(
        UserWarning, match="a hook has changed gradients after the step .* `clip_norm`"
    ) as told:
        clipped = coterie.train(*problem, steps=4, hooks=[clips])
    assert len(told) == 1
    plain = coterie.train(*problem, steps=4, hooks=[lambda step: None])
    assert all(
        torch.equal(a, b)
        for a, b in zip(clipped.model.parameters(), plain.model.parameters(), strict=True)
    )


class Seldom(Noting):
    """Need not be told of every step."""

    every_step = False


class NoSteps(Hook):
    """Is told of points alone."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_evaluation(self, point: Point) -> None:
        self.told.append(point.step)


def test_a_hook_that_need_not_see_every_step_leaves_blocks_whole(make_users: Users) -> None:
    assert as_hook(print).every_step
    users, seldom, points, every = make_users(), Seldom(), NoSteps(), Noting()
    settings: dict[str, Any] = {"steps": 9, "evaluate_every": 4, "capture": True, "guard": "off"}
    problem: Any = (network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5))
    coterie.train(*problem, **settings, checkpoint_every=9, hooks=[seldom, points])
    assert [told[0] for told in seldom.told[1:-1] if isinstance(told, tuple)] == [1, 4, 8, 9]
    assert points.told == [0, 4, 8, 9]
    coterie.train(*problem, **settings, hooks=[every, seldom])
    assert [told[0] for told in every.told[1:-1] if isinstance(told, tuple)] == list(range(1, 10))


@pytest.mark.parametrize("hook", [3, "print", Noting, None])
def test_what_is_no_hook(make_users: Users, tmp_path: Path, hook: Any) -> None:
    users = make_users()
    with pytest.raises(
        KnobError, match=r"`hooks` must be functions of a `Step` or instances of `coterie\.Hook`"
    ):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:]), out=tmp_path / "run", hooks=[hook]
        )
    assert not (tmp_path / "run").exists()
