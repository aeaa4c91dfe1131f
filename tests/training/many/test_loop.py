"""Many runs as one program: what cannot take part, what may go wrong, hooks and Ctrl-C."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.many_runs import (
    assert_same,
    by_itself,
    compared,
    falling,
    from_disk,
    my_loss,
    network,
    run_of,
    together,
)
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie import Alone, BiasCorrection, Run, Step, User, WeightedAveraging, train_many
from coterie.aggregators import CoordinateMedian
from coterie.methods import FedAvg
from coterie.recording.result import Point
from coterie.rules.similarity import CosineSimilarity
from coterie.training.hooks import Start
from coterie.training.run import Stopped

Users = Callable[..., list[User]]


class Scaled(nn.Linear):
    """A linear model with a number that is no parameter."""

    def __init__(self, factor: float) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * super().forward(inputs)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def test_what_cannot_take_part_is_trained_by_itself_and_says_why(make_users: Users) -> None:
    users, model = make_users(), Scaled(1.0)
    base = run_of(users, Alone(), model)
    median = WeightedAveraging(0.5, aggregator=CoordinateMedian())
    specs = {
        "not all examples are in memory": replace(base, me=from_disk(users[0])),
        "one program of 2": replace(base, rule=WeightedAveraging(0.5)),
        "an aggregator needs every": replace(base, rule=median),
        "`CosineSimilarity` is not": replace(base, rule=CosineSimilarity(0.5)),
        "`FedAvg` is not": replace(base, rule=FedAvg(2)),
        "Adafactor is not known": replace(base, optimizer=torch.optim.Adafactor),
        "`ReduceLROnPlateau` follows": replace(base, scheduler=plateau),
        "its model is not the one": replace(base, model=Scaled(2.0)),
    }
    specs["one program of 2 "] = base
    runs = train_many(list(specs.values()), progress=False)
    for run, (why, each) in zip(runs, specs.items(), strict=True):
        said = run.record.configuration.runs
        assert why.rstrip() in said
        assert said.startswith(("by itself: ", "one program"))
        assert_same(run, by_itself(each))


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            f.cross_entropy,
            "buffers",
        ),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)), f.cross_entropy, "random"),
        (nn.Linear(3, 3), my_loss, "not known to be a mean"),
    ],
)
def test_a_model_or_loss_that_cannot_be_shared(
    make_users: Users, model: nn.Module, loss: Any, why: str
) -> None:
    base = run_of(make_users(), Alone(), copy.deepcopy(model).double(), loss=loss)
    runs = compared(replace(base, seed=seed) for seed in (0, 1))
    assert all(why in run.record.configuration.runs for run in runs)


def test_a_run_that_fails_does_not_hurt_the_others(make_users: Users) -> None:
    users = make_users()
    bad = User("peer 1", *users[1].examples.take(torch.arange(16)))
    bad.examples.inputs[3] = math.nan  # type: ignore[attr-defined]
    base = run_of(users, WeightedAveraging(0.5), optimizer=torch.optim.SGD)
    specs = [
        base,
        replace(base, peers=[bad, *users[2:]]),
        replace(base, rule=Alone(), lr=1e308),
        replace(base, rule=BiasCorrection(0.5, 0.1)),
    ]
    runs = train_many(specs, progress=False)
    for k in (0, 1, 3):
        assert_same(runs[k], by_itself(specs[k]))
    assert together(runs) == [True, False, False, True]
    assert runs[1].record.end.left_out["peer 1"]["not finite"] > 0
    assert runs[2].stopped is Stopped.NOT_FINITE
    with pytest.raises(coterie.errors.GradientError) as caught:
        by_itself(specs[2])
    assert_same(runs[2], caught.value.run)


def test_a_run_that_has_failed_is_not_ended_by_its_hook(make_users: Users) -> None:
    base = run_of(make_users(), Alone(), optimizer=torch.optim.SGD, evaluate_every=12)
    base = replace(base, hooks=[lambda step: step.step == 7])
    runs = train_many([replace(base, lr=lr) for lr in (0.1, 1e308)], progress=False)
    assert [run.stopped for run in runs] == [Stopped.HOOK, Stopped.NOT_FINITE]


class OverPlaces(nn.Linear):
    """A linear model of the mean over any number of places."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mean(2))


def test_examples_of_another_shape_are_taken_by_themselves(make_users: Users) -> None:
    users = make_users()
    specs, model = [], OverPlaces(3, 3, dtype=torch.float64)
    for places in (2, 2, 5):
        inputs, targets = users[0].examples.take(torch.arange(12))
        held = [
            User(name, inputs.unsqueeze(2).repeat(1, 1, places), targets) for name in ("me", "a")
        ]
        specs.append(run_of(held, WeightedAveraging(0.5), model))
    runs = compared(specs)
    assert together(runs) == [True, True, False]
    assert "another shape" in runs[2].record.configuration.runs


def test_ctrl_c_returns_what_is_there(make_users: Users) -> None:
    users = make_users()

    def press(step: Step) -> None:
        if step.step == 7:
            signal.raise_signal(signal.SIGINT)

    base = run_of(users, Alone())
    specs = [
        replace(base, rule=WeightedAveraging(0.5, aggregator=CoordinateMedian())),
        replace(base, rule=WeightedAveraging(0.5), hooks=[press]),
        base,
        replace(base, rule=FedAvg(2)),
    ]
    runs = train_many(specs, progress=False)
    assert [(run.stopped, run.step) for run in runs] == [(Stopped.CTRL_C, n) for n in (0, 7, 7, 0)]
    assert_same(runs[1], by_itself(specs[1]))
    assert torch.equal(runs[0].model.get_parameter("0.weight"), network().get_parameter("0.weight"))
    assert not any(run.test for run in runs)
    specs[0] = replace(specs[3], hooks=[press])  # pressed in a run by itself
    runs = train_many(specs[::3], progress=False)
    assert [(run.stopped, run.step) for run in runs] == [(Stopped.CTRL_C, 7), (Stopped.CTRL_C, 0)]
    specs = [replace(base, steps=9, hooks=[press]), base]  # of two programs
    runs = train_many(specs, progress=False)
    assert [(run.stopped, run.step) for run in runs] == [(Stopped.CTRL_C, 7), (Stopped.CTRL_C, 0)]


def test_hooks_are_told_of_their_run_and_may_end_it(make_users: Users) -> None:
    users = make_users()
    told: dict[str, list[tuple[Any, ...]]] = {}

    def telling(name: str, last: int) -> Callable[[Step], bool]:
        def tell(step: Step) -> bool:
            x = [float(p.detach().sum()) for p in step.model.parameters()]
            point = step.point.validation["loss"] if step.point else -1.0
            told.setdefault(name, []).append((step.step, step.own_loss, step.weight, point, *x))
            return step.step == last

        return tell

    rules: list[coterie.Rule] = [WeightedAveraging(falling), Alone(), BiasCorrection(0.5, 0.1)]
    base = run_of(users)
    runs = train_many(
        [
            replace(base, rule=rule, hooks=[telling(f"many {k}", 6 + 2 * k)])
            for k, rule in enumerate(rules)
        ],
        progress=False,
    )
    for k, rule in enumerate(rules):
        assert_same(
            runs[k], by_itself(replace(base, rule=rule, hooks=[telling(f"one {k}", 6 + 2 * k)]))
        )
        for a, b in zip(told[f"many {k}"], told[f"one {k}"], strict=True):
            assert a == pytest.approx(b, rel=1e-9)
    assert [run.stopped for run in runs] == [Stopped.HOOK] * 3


def test_one_bar_shows_the_mean_own_loss_of_all(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, told = list[tuple[int, float]](), list[float]()

    @contextmanager
    def bar(*_: object) -> Iterator[Callable[..., None]]:
        yield lambda step, own_loss, *_: shown.append((step, own_loss))

    monkeypatch.setattr("coterie.training.many.progress_bar", bar)
    base = run_of(make_users(), hooks=[lambda step: told.append(step.own_loss)])
    train_many([replace(base, rule=rule) for rule in (Alone(), WeightedAveraging(0.9))])
    means = [sum(told[k : k + 2]) / 2 for k in range(0, 24, 2)]
    assert [step for step, _ in shown] == list(range(1, 13))
    assert [own_loss for _, own_loss in shown] == pytest.approx(means)


class Noting(coterie.Hook):
    """Note what is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, start: Start) -> None:
        self.told.append(("start", start.step, start.rule, start.configuration.rule))

    def on_step(self, step: Step) -> None:
        self.told.append((step.step, dict(step.tau())))

    def on_evaluation(self, point: Point) -> None:
        self.told.append(point.step)

    def on_end(self, run: Run) -> None:
        self.told.append((run.step, run.record.end.tau))


def test_hooks_are_told_the_same_by_both(make_users: Users) -> None:
    rule, many, one = WeightedAveraging(0.5, {"peer 1": 0.25, "peer 3": 0.75}), Noting(), Noting()
    base = run_of(make_users(), rule, steps=3, evaluate_every=2)
    train_many([replace(base, hooks=[many]), replace(base, rule=Alone())], progress=False)
    by_itself(replace(base, hooks=[one]))
    tau = {"peer 1": 0.25, "peer 3": 0.75}
    start = ("start", 0, rule, "WeightedAveraging(alpha=0.5, tau={'peer 1': 0.25, 'peer 3': 0.75})")
    assert many.told == one.told == [start, 0, (1, tau), 2, (2, tau), 3, (3, tau), (3, tau)]


def test_metrics_and_examples_on_disk_held_out(make_users: Users) -> None:
    users = make_users()
    one, other = copy.copy(users[0]), copy.copy(users[0])
    other.validation, other.test = from_disk(users[1]).examples, None
    one.validation = None
    metrics = {"largest": lambda outputs, targets: float(outputs.max())}
    base = run_of(users, WeightedAveraging(0.5), metrics=metrics, evaluate_every=None)
    runs = compared(replace(base, me=me) for me in (users[0], one, other))
    assert "largest" in runs[0].record.points[-1].validation


def test_wrong_settings_are_said_as_by_train(make_users: Users) -> None:
    users = make_users()
    base = run_of(users, Alone())
    assert train_many([]) == []
    for wrong, words in (
        (replace(base, rule=WeightedAveraging(0.5, {"nobody": 1.0})), "unknown peer 'nobody'"),
        (replace(base, peers=[users[1], users[1]]), "different names"),
        (replace(base, model=nn.Linear(2, 3)), "does not take user 0's inputs"),
        (
            replace(base, hooks=[3], seed=1, peers=users[2:]),
            "`hooks` must be functions of a `Step`",
        ),
    ):
        with pytest.raises(coterie.errors.CoterieError, match=words):
            train_many([base, wrong], progress=False)
    with pytest.raises(
        coterie.errors.KnobError, match="`steps` must be a whole number, at least 1"
    ):
        train_many([replace(base, steps=0)], progress=False)
