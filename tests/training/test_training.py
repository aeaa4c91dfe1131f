"""Training: optimizers, schedulers, the best model, callbacks, interruptions and what a run tells."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import lr_scheduler

import coterie
from coterie.choosing.measuring import before_training
from coterie.engines import Capabilities
from coterie.errors import GradientError, KnobError, ModelError
from coterie.gradients.gradients import receive, weighted_sum
from coterie.learners.spec import RunSpec
from coterie.recording import UserSummary, checkpoint
from coterie.recording.traffic import Traffic
from coterie.training.run import Stopped

Users = Callable[..., list[coterie.User]]


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def plain_steps(
    model: nn.Module, users: list[coterie.User], optimizer: torch.optim.Optimizer, scheduler: Any, steps: int
) -> list[float]:
    """Train by averaging with weight ½ in a plain loop; return the learning rate after every step."""
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        for user, weight in zip(users, (0.5, *[0.5 / (len(users) - 1)] * (len(users) - 1)), strict=True):
            inputs, targets = user.batch(4, seed=0, step=step)
            torch.autograd.backward(weight * cross_entropy(model(inputs), targets))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


# Optimizers and schedulers.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(make_users: Users, name: str) -> None:
    users, model = make_users(), network()
    optimizer = OPTIMIZERS[name](model.parameters())
    plain_steps(model, users, optimizer, None, 12)
    last: dict[str, Tensor] = {}
    coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5)),
        optimizer=OPTIMIZERS[name],
        steps=12,
        batch_size=4,
        hooks=[lambda step: last.update(state_of(step.model))],
    )
    for key, value in model.state_dict().items():
        torch.testing.assert_close(last[key], value, rtol=1e-9, atol=1e-12)


def test_parameter_groups_and_a_part_of_the_parameters(make_users: Users) -> None:
    users, model = make_users(), network()

    def grouped(net: nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": [net[0].weight], "lr": 0.3}, {"params": list(net[2].parameters()), "momentum": 0.9}]
        return torch.optim.SGD(groups, lr=0.05)

    start = state_of(model)
    optimizer = grouped(model)
    last: dict[str, Tensor] = {}
    run = coterie.train(
        *(model, cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5)),
        optimizer=optimizer,
        steps=10,
        batch_size=4,
        hooks=[lambda step: last.update(state_of(step.model))],
    )
    assert same(model.state_dict(), start)
    assert not optimizer.state
    assert run.record.configuration.optimizer == "SGD(lr=0.3/0.05)"
    plain = network()
    plain_steps(plain, users, grouped(plain), None, 10)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(last[key], value, rtol=1e-9, atol=1e-12)
    assert torch.equal(last["0.bias"], start["0.bias"])
    assert not torch.equal(last["0.weight"], start["0.weight"])


def test_an_optimizer_of_another_model(make_users: Users) -> None:
    users = make_users()
    with pytest.raises(ModelError, match=r"parameters of another model; make it from `model\.parameters"):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
            optimizer=torch.optim.SGD(network().parameters(), lr=0.1),
        )


def test_two_learning_rates_or_lbfgs(make_users: Users) -> None:
    users, model = make_users(), network()
    for optimizer, lr, message in (
        (torch.optim.SGD(model.parameters(), lr=0.1), 0.2, r"`lr` \(0.2\) and an optimizer that has its own"),
        (torch.optim.LBFGS, None, "LBFGS evaluates the loss several times"),
    ):
        with pytest.raises(KnobError, match=message):
            coterie.train(*(model, cross_entropy, users[0], users[1:], coterie.Alone()), optimizer=optimizer, lr=lr)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "numpy lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: np.cos(0.1 * t)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [3, 6], gamma=0.1),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_and_its_resumption(make_users: Users, name: str, tmp_path: Path) -> None:
    users, model = make_users(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    plain_steps(model, users, optimizer, SCHEDULERS[name](optimizer), 12)

    def trained(steps: int, stop: int | None = None, **keywords: Any) -> dict[str, Tensor]:
        last: dict[str, Tensor] = {}

        def note(step: coterie.Step) -> bool:
            last.update(state_of(step.model))
            return step.step == stop

        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5)),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5),
            scheduler=SCHEDULERS[name],
            steps=steps,
            batch_size=4,
            hooks=[note],
            **keywords,
        )
        return last

    whole = trained(12)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-12)
    trained(12, stop=7, out=tmp_path)
    assert same(trained(12, out=tmp_path, resume=True), whole)


def test_reduce_on_plateau_follows_the_validation_loss(make_users: Users) -> None:
    users = make_users()
    made: list[lr_scheduler.ReduceLROnPlateau] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        made.append(lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1))
        return made[0]

    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
        optimizer=torch.optim.SGD,
        lr=3.0,
        scheduler=scheduler,
        steps=30,
        evaluate_every=2,
    )
    plain = torch.optim.SGD([torch.zeros(1)], lr=3.0)
    twin = lr_scheduler.ReduceLROnPlateau(plain, factor=0.5, patience=1)
    for loss in run.record.curve("validation_loss")[1]:
        twin.step(loss)
    rate = made[0].optimizer.param_groups[0]["lr"]
    assert rate == plain.param_groups[0]["lr"] < 3.0


def test_reduce_on_plateau_needs_a_validation_set(make_users: Users, tmp_path: Path) -> None:
    me = coterie.User("me", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [0, 1])
    with pytest.raises(KnobError, match="follows the validation loss, but 'me' has no validation set"):
        coterie.train(
            *(network(torch.float32), cross_entropy, me, [], coterie.Alone()),
            scheduler=lr_scheduler.ReduceLROnPlateau,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


# The best model, and what is left as it was.


def line(targets: list[float], **held_out: float) -> coterie.User:
    """Return a user whose loss is the mean squared distance to numbers, for a model of one number."""
    parts = {name: ([[1.0]], [[value]]) for name, value in held_out.items()}
    return coterie.User("me", [[1.0]] * len(targets), [[value] for value in targets], **parts)


def number(start: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def the_number(model: nn.Module) -> float:
    return float(next(model.parameters()).detach())


def test_the_best_model_is_that_of_the_lowest_validation_loss() -> None:
    """The number goes from 0 towards 10 and passes the validation's 3; the test's 9 must not matter."""
    seen: list[float] = []
    run = coterie.train(
        *(number(0.0), mse_loss, line([10.0, 10.0], validation=3.0, test=9.0), [], coterie.Alone()),
        optimizer=torch.optim.SGD,
        lr=0.02,
        steps=40,
        evaluate_every=1,
        hooks=[lambda step: seen.append(the_number(step.model))],
    )
    best = min(range(len(seen)), key=lambda i: abs(seen[i] - 3.0))
    assert 0 < best < 35
    assert run.best_step == best + 1
    weight = the_number(run.model)
    assert weight == seen[best]
    assert run.test == {"loss": pytest.approx((9 - weight) ** 2), "rmse": pytest.approx(9 - weight)}
    assert run.step == 40
    losses = dict(zip(*run.record.curve("validation_loss"), strict=True))
    assert min(losses, key=lambda step: losses[step]) == run.best_step


def test_without_a_validation_set_the_model_is_the_last() -> None:
    run = coterie.train(
        *(number(0.0), mse_loss, line([1.0, 3.0]), [], coterie.Alone()),
        optimizer=torch.optim.SGD,
        lr=0.25,
        steps=30,
    )
    assert the_number(run.model) == pytest.approx(2.0)
    assert (run.best_step, run.test) == (30, {})
    assert "nothing held out" in run.summary()


def test_the_start_may_be_the_best() -> None:
    run = coterie.train(
        *(number(3.0), mse_loss, line([10.0, 10.0], validation=3.0), [], coterie.Alone()), steps=10, lr=0.1
    )
    assert run.best_step == 0
    assert the_number(run.model) == 3.0


def test_what_is_passed_in_stays_as_it_is(make_users: Users) -> None:
    users = make_users()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)).double()
    model[1].eval()
    before, modes = state_of(model), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    run = coterie.train(*(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)), steps=8)
    assert same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert [module.training for module in run.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not same(run.model.state_dict(), before) or run.best_step == 0


def test_the_same_seed_gives_the_same_bits(make_users: Users) -> None:
    users = make_users()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)).double()
    found: list[tuple[dict[str, Tensor], Any]] = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(found))  # the global generator must not matter
        last: dict[str, Tensor] = {}
        run = coterie.train(
            *(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=10,
            batch_size=4,
            seed=seed,
            hooks=[lambda step, last=last: last.update(state_of(step.model))],  # type: ignore[misc]  # bound now
        )
        found.append((last, run.record.points))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not same(found[0][0], found[2][0])


class Engine:
    """The users in this process, some of whose answers are lost, of another shape or not finite."""

    capabilities = Capabilities(rows=False)

    def __init__(self, engine: coterie.InProcess, spoil: Callable[[str, int, Tensor], Tensor | None]) -> None:
        self.engine, self.spoil, self.names = engine, spoil, engine.names

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> coterie.Gradients:
        g = self.engine.gradients(x, step, weights, rows=True)
        if not weights:
            return g
        assert g.rows is not None
        answers = {name: self.spoil(name, step, row) for name, row in zip(g.names, g.rows, strict=True)}
        kept, names, left_out = receive(g.own, answers)
        peers, answered = weighted_sum(g.own, kept, [weights[name] for name in names])
        return dataclasses.replace(g, peers=peers, rows=None, names=(), answered=answered, left_out=left_out)

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def close(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"engine": "spoilt"}


def spoilt_run(users: list[coterie.User], rule: Any, spoil: Any) -> tuple[dict[str, Tensor], coterie.Run]:
    model = network()
    engine = Engine(coterie.InProcess(model, cross_entropy, users[0], users[1:], batch_size=4), spoil)
    last: dict[str, Tensor] = {}
    run = coterie.train(
        *(model, cross_entropy, users[0], users[1:], rule),
        optimizer=torch.optim.Adam,
        lr=0.05,
        steps=15,
        engine=engine,
        hooks=[lambda step: last.update(state_of(step.model))],
    )
    return last, run


@pytest.mark.parametrize(
    "rule",
    [
        coterie.WeightedAveraging(0.9),
        coterie.BiasCorrection(0.9, 0.1),
        coterie.BiasCorrection(0.9, 0.1, start="zero"),
    ],
)
def test_all_peers_left_out_in_every_step_is_alone(make_users: Users, rule: Any) -> None:
    users = make_users()
    ways: dict[str, Callable[[Tensor], Tensor | None]] = {
        "peer 1": lambda row: row[:-1],
        "peer 2": lambda row: torch.full_like(row, math.nan),
        "peer 3": lambda row: None,
    }
    alone, quiet = spoilt_run(users, coterie.Alone(), None)
    spoilt, run = spoilt_run(users, rule, lambda name, _, row: ways[name](row))
    assert same(alone, spoilt)
    assert all(alone[key].numpy().tobytes() == spoilt[key].numpy().tobytes() for key in alone)
    assert run.record.end.left_out == {
        "peer 1": {"shape (37,) instead of (38,)": 15},
        "peer 2": {"not finite": 15},
        "peer 3": {"no answer": 15},
    }
    assert run.record.points[-1].left_out == 45
    assert run.record.points[-1].weight == 0
    assert all(f"{name} in 15 steps" in run.summary().splitlines()[-1] for name in ways)
    assert [p.own_loss for p in run.record.points[1:]] == [p.own_loss for p in quiet.record.points[1:]]


def test_peers_left_out_in_some_steps_are_counted(make_users: Users) -> None:
    users = make_users()
    told: list[Mapping[str, str]] = []
    model = network()
    engine = Engine(
        coterie.InProcess(model, cross_entropy, users[0], users[1:]),
        lambda name, step, row: row * math.inf if name == "peer 2" and step % 3 == 0 else row,
    )
    run = coterie.train(
        *(model, cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.6)),
        steps=9,
        engine=engine,
        hooks=[lambda step: told.append(step.left_out)],
    )
    assert run.record.end.left_out == {"peer 2": {"not finite": 3}}
    assert [bool(left_out) for left_out in told] == [True, False, False] * 3
    assert run.state["weight"] == pytest.approx(0.6)


# Callbacks, progress, metrics, TensorBoard, devices, the summary.


def test_callbacks(make_users: Users, tmp_path: Path) -> None:
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


def test_own_loss_is_the_mean_since_the_last_point(make_users: Users) -> None:
    users, losses = make_users(), list[float]()
    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.25)),
        steps=7,
        evaluate_every=3,
        batch_size=4,
        hooks=[lambda step: losses.append(step.own_loss)],
    )
    steps, found = run.record.curve("own_loss")
    assert steps == [3, 6, 7]
    assert found == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]], rel=1e-12)
    assert [point.step for point in run.record.points] == [0, 3, 6, 7]


@pytest.mark.parametrize("shown", [True, False, None])
def test_progress(make_users: Users, monkeypatch: pytest.MonkeyPatch, shown: bool | None) -> None:
    users, screen = make_users(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.25)), steps=10, progress=shown
    )
    text = screen.getvalue()
    assert bool(text) == bool(shown)  # None: standard error is no terminal here
    if shown:
        assert "WeightedAveraging" in text
        assert "10/10" in text
        assert "peers' weight 0.25" in text
        assert "own loss" in text


def test_metrics(make_users: Users) -> None:
    users = make_users()

    def shares(outputs: Tensor, targets: Tensor) -> Any:
        assert outputs.shape == (6, 3)
        assert targets.shape == (6,)
        return np.float32(0.5)

    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=4, metrics={"shares": shares}
    )
    assert run.record.points[-1].validation["shares"] == 0.5
    assert run.test.keys() == {"loss", "shares"}
    run = coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=4)
    assert run.test.keys() == {"loss", "accuracy"}


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
    found = {event.step: event.value for event in events.Scalars("validation_loss")}
    wanted = dict(zip(steps, losses, strict=True))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert {"own_loss", "weight", "validation_accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device(make_users: Users, device: Any) -> None:
    users = make_users()
    run = coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=2, device=device)
    assert run.record.configuration.engine["device"] == "cpu"
    assert next(run.model.parameters()).device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("between", [[], [nn.BatchNorm1d(5), nn.Dropout(0.0)]])
def test_a_gpu_gives_what_the_cpu_gives(make_users: Users, between: list[nn.Module]) -> None:
    users = make_users()
    model = nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 3)).double()
    found: list[list[float]] = []
    for device in ("cpu", "cuda"):
        run = coterie.train(
            *(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)), steps=10, device=device
        )
        assert next(run.model.parameters()).device.type == device
        found.append(run.record.curve("validation_loss")[1])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_summary_and_record(make_users: Users) -> None:
    users = make_users()
    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5, {"peer 1": 1.0})),
        optimizer=torch.optim.SGD,
        lr=0.1,
        steps=10,
        seed=4,
    )
    first, best, test, weight, constants, plan, guard = run.summary().splitlines()
    assert first == "WeightedAveraging(alpha=0.5, tau={'peer 1': 1.0}), 3 peers, 10 steps of SGD(lr=0.1)"
    at_best = next(point for point in run.record.points if point.step == run.best_step)
    assert best.startswith(f"best at step {run.best_step} by validation loss: ")
    assert f"loss {at_best.validation['loss']:.4g}, accuracy {at_best.validation['accuracy']:.4g}" in best
    assert test == f"test: loss {run.test['loss']:.4g}, accuracy {run.test['accuracy']:.4g} (6 examples)"
    assert weight == "weight on peers in the last step: 0.5"
    assert constants.startswith("measured at the start: noise ")
    assert plan.startswith("the theory's plan for that: WGA alpha ")
    assert guard == (
        "whether collaboration helped is not known: guard off: 6 validation examples, fewer than 100; most weight "
        "among peers: peer 1 1; left out: peer 2, peer 3"
    )
    configuration = run.record.configuration
    assert (configuration.seed, configuration.steps, configuration.batch_size) == (4, 10, 32)
    assert configuration.me == UserSummary(name="me", examples=12, validation=6, test=6)
    assert configuration.peers == {"peer 1": 16, "peer 2": 9, "peer 3": 5}
    assert run.record.versions["torch"] == torch.__version__
    assert run.record.end.test == run.test


def test_numbers_of_numpy_do(make_users: Users, tmp_path: Path) -> None:
    users = make_users()

    def trained(**keywords: Any) -> coterie.Run:
        alpha: Any = np.float32(0.5)
        tau: Any = {"peer 1": np.float32(0.5), "peer 2": np.float32(0.5)}
        return coterie.train(
            *(
                network(),
                cross_entropy,
                users[0],
                users[1:],
                coterie.BiasCorrection(alpha, np.float64(0.1), tau),
            ),
            optimizer=torch.optim.SGD,
            lr=np.float64(0.1),
            steps=np.int64(6),  # type: ignore[arg-type]  # what a loop over an array gives
            seed=np.int64(3),  # type: ignore[arg-type]  # the same
            evaluate_every=2,
            checkpoint_every=2,
            out=tmp_path,
            **keywords,
        )

    whole = trained()
    checkpoint.saved(tmp_path / "checkpoints")[-1].unlink()
    assert trained(resume=True).record.points == whole.record.points


# Interruptions.


def test_ctrl_c_saves_stops_and_resumes_to_the_same_bits(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    handler = signal.getsignal(signal.SIGINT)

    def trained(out: Path, interrupt: int | None = None, **keywords: Any) -> coterie.Run:
        def press(step: coterie.Step) -> None:
            if step.step == interrupt:
                signal.raise_signal(signal.SIGINT)

        return coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=20,
            evaluate_every=3,
            batch_size=4,
            hooks=[press],
            out=out,
            **keywords,
        )

    whole = trained(tmp_path / "whole")
    stopped = trained(tmp_path / "stopped", interrupt=7)
    assert (stopped.stopped, stopped.step, stopped.test) == ("Ctrl-C", 7, {})
    assert "stopped by Ctrl-C at step 7 of 20" in stopped.summary()
    assert coterie.Record.load(tmp_path / "stopped" / "record.jsonl").end.stopped == "Ctrl-C"
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = trained(tmp_path / "stopped", resume=True)
    assert resumed.stopped is None
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.record.points == whole.record.points
    assert resumed.test == whole.test
    assert same({"c": resumed.state["c"]}, {"c": whole.state["c"]})


def test_a_second_ctrl_c_stops_at_once(make_users: Users) -> None:
    users, done = make_users(), list[int]()
    handler = signal.getsignal(signal.SIGINT)

    def press(step: coterie.Step) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(step.step)

    with pytest.raises(KeyboardInterrupt):
        coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=9, hooks=[press])
    assert not done
    assert signal.getsignal(signal.SIGINT) is handler


SCRIPT = """
    import sys, torch, coterie
    torch.set_num_threads(1)
    users = [coterie.User(name, torch.eye(3).repeat(4, 1), torch.arange(12) % 3) for name in ("me", "a")]
    def tell(step):
        if step.step == 3:
            print("going", flush=True)
    run = coterie.train(torch.nn.Linear(3, 3), torch.nn.functional.cross_entropy, users[0], users[1:],
                        coterie.WeightedAveraging(0.5), steps=10**7, evaluate_every=10**6, hooks=[tell],
                        checkpoint_every=10**6, out=sys.argv[1])
    print(run.stopped, run.step)
"""


def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[0].split()
    assert process.returncode == 0
    assert told[0] == "Ctrl-C"
    steps = int(told[1])
    assert 3 <= steps < 10**7
    assert checkpoint.load(checkpoint.saved(tmp_path / "checkpoints")[-1])["learner"]["step"] == steps


def test_a_thread_can_train(make_users: Users) -> None:
    import threading

    users, runs = make_users(), list[coterie.Run]()

    def work() -> None:
        runs.append(coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runs[0].step == 3


# A gradient of user 0 that is not finite.


def explosive(at: int) -> Any:
    """Return a loss that is NaN from the at-th training pass on."""

    class Explosive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if outputs.requires_grad and len(outputs) == 12:  # user 0's full batch, in training
                self.calls += 1
            factor = math.nan if self.calls > at else 1.0
            return cross_entropy(outputs, targets) * factor

    return Explosive()


@pytest.mark.parametrize("saved", [True, False])
def test_a_non_finite_own_gradient_ends_the_run_with_the_last_good_state(
    make_users: Users, tmp_path: Path, saved: bool
) -> None:
    users, good = make_users(), list[dict[str, Tensor]]()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    probing = explosive(10**9)
    engine = coterie.InProcess(model, probing, users[0], users[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before_training(engine, RunSpec(model, probing, users[0], users[1:], optimizer=optimizer))
    with pytest.raises(GradientError, match="own gradient is not finite at step 5") as caught:
        coterie.train(
            *(model, explosive(probing.calls + 5), users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=20,
            checkpoint_every=100,
            hooks=[lambda step: good.append(state_of(step.model))],
            out=tmp_path if saved else None,
        )
    assert len(good) == 5
    run = caught.value.run
    assert (run.step, run.stopped, run.test) == (5, "a non-finite gradient", {})
    assert isinstance(caught.value, ArithmeticError)
    if saved:
        (path,) = checkpoint.saved(tmp_path / "checkpoints")
        assert str(path) in str(caught.value)
        held = checkpoint.load(path)["learner"]
        assert held["step"] == 5
        assert same(held["model"], good[-1])
    else:
        assert "in this error's `run`" in str(caught.value)


def test_examples_with_infinities_are_named(make_users: Users) -> None:
    users = make_users()
    inputs, targets = users[0].batch(12, seed=0, step=0)
    bad = coterie.User("ward 3", inputs.clone().fill_(math.inf), targets)
    with pytest.raises(GradientError, match=r"at step 0 .* lower `lr`, or look for extreme values .* 'ward 3'"):
        coterie.train(*(network(), cross_entropy, bad, users[1:], coterie.Alone()), steps=3)


def test_a_deep_copy_of_a_run_is_independent(make_users: Users) -> None:
    users = make_users()
    run = coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=3)
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        next(run.model.parameters()).zero_()
    assert next(twin.parameters()).any()
    assert list(run.model.parameters())[1].any()  # parameters share no memory that another one's change reaches


def test_an_engine_made_for_a_run_is_closed_whatever_ends_it(tmp_path: Path) -> None:
    closed = []

    class Closing(coterie.InProcess):
        def close(self) -> None:
            closed.append(True)

    users = [coterie.User(name, torch.eye(4), torch.ones(4, 1)) for name in ("me", "a")]
    settings: dict[str, Any] = {"steps": 1, "engine": Closing, "out": tmp_path / "run"}
    model, loss, rule = nn.Linear(4, 1), nn.functional.mse_loss, coterie.WeightedAveraging(0.5)
    coterie.train(model, loss, users[0], users[1:], rule, **settings)
    assert len(closed) == 1
    with pytest.raises(KnobError, match="already holds a run"):  # before the first step
        coterie.train(model, loss, users[0], users[1:], rule, **settings)
    with pytest.raises(KnobError, match="unknown peer"):  # by the check of the rule
        coterie.train(model, loss, users[0], users[1:], coterie.WeightedAveraging(0.5, {"b": 1.0}), **settings)
    assert len(closed) == 3
