"""One run: the best model, what stays as it is, peers left out, metrics, devices and what a run tells."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.small_runs import network, same, state_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie.engines import Capabilities
from coterie.errors import KnobError
from coterie.gradients.gradients import keep_finite, weighted_sum
from coterie.recording import UserSummary, checkpoint
from coterie.recording.costs import Traffic
from coterie.training import loop

Users = Callable[..., list[coterie.User]]


def line(targets: list[float], **held_out: float) -> coterie.User:
    """Return a user whose loss is the mean squared distance to numbers, for a model of one number."""
    parts: dict[str, Any] = {name: ([[1.0]], [[value]]) for name, value in held_out.items()}
    return coterie.User("me", [[1.0]] * len(targets), [[value] for value in targets], **parts)


def number(start: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def the_number(model: nn.Module) -> float:
    return float(next(model.parameters()).detach())


def test_the_default_rule_weighs_own_examples_beside_those_of_validation() -> None:
    """Ten own ones outvote one that is held out, at whose number a fixed rule would stop."""
    own = [9.9, 10.1] * 5
    run = coterie.train(
        *(number(0.0), mse_loss, line(own, validation=3.0)),
        [coterie.User("peer", [[1.0]] * 10, [[value] for value in own])],
        coterie.AdaptiveAveraging(linear=False),
        optimizer=torch.optim.SGD,
        lr=0.05,
        steps=60,
        measure=False,
    )
    lowest = min(run.record.curve("validation_loss")[1])
    assert lowest < 4
    assert (the_number(run.model) - 3.0) ** 2 > 16


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
        *(number(3.0), mse_loss, line([10.0, 10.0], validation=3.0), [], coterie.Alone()),
        steps=10,
        lr=0.1,
    )
    assert run.best_step == 0
    assert the_number(run.model) == 3.0


def test_what_is_passed_in_stays_as_it_is(make_users: Users) -> None:
    users = make_users()
    model = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)
    ).double()
    model[1].eval()
    before, modes = state_of(model), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    run = coterie.train(
        *(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)), steps=8
    )
    assert same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert [module.training for module in run.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not same(run.model.state_dict(), before) or run.best_step == 0


def test_the_same_seed_gives_the_same_bits(make_users: Users) -> None:
    users = make_users()
    model = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)
    ).double()
    results: list[tuple[dict[str, Tensor], Any]] = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(results))  # the global generator must not matter
        last: dict[str, Tensor] = {}
        run = coterie.train(
            *(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=10,
            batch_size=4,
            seed=seed,
            hooks=[lambda step, last=last: last.update(state_of(step.model))],
        )
        results.append((last, run.record.points))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert not same(results[0][0], results[2][0])


class Engine:
    """The users in this process, some of whose answers are lost, of another shape or not finite."""

    capabilities = Capabilities(rows=False)

    def __init__(
        self, engine: coterie.InProcess, spoil: Callable[[str, int, Tensor], Tensor | None]
    ) -> None:
        self.engine, self.spoil, self.names = engine, spoil, engine.names

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> coterie.Gradients:
        g = self.engine.gradients(x, step, weights, rows=True)
        if not weights:
            return g
        assert g.rows is not None
        answers = {
            name: self.spoil(name, step, row) for name, row in zip(g.names, g.rows, strict=True)
        }
        left_out = {name: "no answer" for name, answer in answers.items() if answer is None}
        whole = {name: answer for name, answer in answers.items() if answer is not None}
        for name in [name for name, answer in whole.items() if answer.shape != g.own.shape]:
            shape = tuple(whole.pop(name).shape)
            left_out[name] = f"shape {shape} instead of {tuple(g.own.shape)}"
        whole_rows = torch.stack([*whole.values(), g.own])[:-1]
        kept, names, not_finite = keep_finite(whole_rows, list(whole))
        left_out |= not_finite
        peers, answered = weighted_sum(g.own, kept, [weights[name] for name in names])
        return dataclasses.replace(
            g, peers=peers, rows=None, names=(), answered=answered, left_out=left_out
        )

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def close(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"engine": "spoilt"}


def spoilt_run(
    users: list[coterie.User], rule: Any, spoil: Any
) -> tuple[dict[str, Tensor], coterie.Run]:
    model = network()
    engine = Engine(
        coterie.InProcess(model, cross_entropy, users[0], users[1:], batch_size=4), spoil
    )
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
    assert run.record.end.absent == {f"peer {k}": [[0, 14]] for k in (1, 2, 3)}
    assert run.record.points[-1].left_out == 45
    assert run.record.points[-1].weight == 0
    assert all(f"{name} in 15 steps" in run.summary().splitlines()[-1] for name in ways)
    assert [p.own_loss for p in run.record.points[1:]] == [
        p.own_loss for p in quiet.record.points[1:]
    ]


def test_no_peer_fills_the_record_with_reasons_of_its_own(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exploit: another reason at every step, each kept for good."""
    monkeypatch.setattr(loop, "MOST_REASONS", 5)
    rule = coterie.WeightedAveraging(0.9)
    _, run = spoilt_run(make_users(), rule, lambda name, step, row: row[: -step - 1])
    assert len(run.record.end.left_out) == 3
    for reasons in run.record.end.left_out.values():
        assert (len(reasons), reasons[loop.OTHER_REASONS]) == (6, 10)


def test_no_peer_fills_the_record_with_stretches(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes and goes: the last of so many stretches goes on, gaps or not."""

    def every_other(name: str, step: int, row: Tensor) -> Tensor | None:
        return None if (name, step % 2) == ("peer 1", 0) else row

    rule = coterie.WeightedAveraging(0.5)
    _, run = spoilt_run(make_users(), rule, every_other)
    assert run.record.end.absent == {"peer 1": [[k, k] for k in range(0, 15, 2)]}
    monkeypatch.setattr(loop, "MOST_STRETCHES", 3)
    _, run = spoilt_run(make_users(), rule, every_other)
    assert run.record.end.absent == {"peer 1": [[0, 0], [2, 2], [4, 14]]}


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


def test_own_loss_is_the_mean_since_the_last_point(make_users: Users) -> None:
    users, losses = make_users(), list[float]()
    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.25)),
        steps=7,
        evaluate_every=3,
        batch_size=4,
        hooks=[lambda step: losses.append(step.own_loss)],
    )
    steps, means = run.record.curve("own_loss")
    assert steps == [3, 6, 7]
    assert means == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]], rel=1e-12)
    assert [point.step for point in run.record.points] == [0, 3, 6, 7]


def test_metrics(make_users: Users) -> None:
    users = make_users()

    def shares(outputs: Tensor, targets: Tensor) -> Any:
        assert outputs.shape == (6, 3)
        assert targets.shape == (6,)
        return np.float32(0.5)

    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
        steps=4,
        metrics={"shares": shares},
    )
    assert run.record.points[-1].validation["shares"] == 0.5
    assert run.test.keys() == {"loss", "shares"}
    run = coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=4)
    assert run.test.keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device(make_users: Users, device: Any) -> None:
    users = make_users()
    run = coterie.train(
        *(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=2, device=device
    )
    assert run.record.configuration.engine["device"] == "cpu"
    assert next(run.model.parameters()).device.type == "cpu"


@pytest.mark.cuda
@pytest.mark.parametrize("between", [[], [nn.BatchNorm1d(5), nn.Dropout(0.0)]])
def test_a_gpu_gives_what_the_cpu_gives(make_users: Users, between: list[nn.Module]) -> None:
    users = make_users()
    model = nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 3)).double()
    curves: list[list[float]] = []
    for device in ("cpu", "cuda"):
        run = coterie.train(
            *(model, cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=10,
            device=device,
            capture=False if between else None,  # BatchNorm cannot be captured
        )
        assert next(run.model.parameters()).device.type == device
        curves.append(run.record.curve("validation_loss")[1])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


def test_summary_and_record(make_users: Users) -> None:
    users = make_users()
    run = coterie.train(
        *(
            network(),
            cross_entropy,
            users[0],
            users[1:],
            coterie.WeightedAveraging(0.5, {"peer 1": 1.0}),
        ),
        optimizer=torch.optim.SGD,
        lr=0.1,
        steps=10,
        seed=4,
        guard="off",
    )
    said, to_do, first, who, best, test, weight, constants = run.summary().splitlines()
    assert said == run.verdict.sentence == run.record.end.verdict
    assert to_do == f"what to do: {run.verdict.advice}"
    assert (
        first
        == "WeightedAveraging(alpha=0.5, tau={'peer 1': 1.0}), 3 peers, 10 steps of SGD(lr=0.1)"
    )
    at_best = next(point for point in run.record.points if point.step == run.best_step)
    assert best.startswith(f"best at step {run.best_step} by validation loss: ")
    assert (
        f"loss {at_best.validation['loss']:.4g}, accuracy {at_best.validation['accuracy']:.4g}"
        in best
    )
    assert (
        test
        == f"test: loss {run.test['loss']:.4g}, accuracy {run.test['accuracy']:.4g} (6 examples)"
    )
    assert weight == "weight on peers in the last step: 0.5"
    assert constants.startswith("measured at the start: noise ")
    assert who == "most weight among peers: peer 1 1; no weight: peer 2, peer 3"
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


def test_a_deep_copy_of_a_run_is_independent(make_users: Users) -> None:
    users = make_users()
    run = coterie.train(*(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=3)
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        next(run.model.parameters()).zero_()
    assert next(twin.parameters()).any()
    # parameters share no memory that another one's change reaches
    assert list(run.model.parameters())[1].any()


def test_an_engine_made_for_a_run_is_closed_whatever_ends_it(tmp_path: Path) -> None:
    """Before the end is told, so that peers need not wait while the model is judged."""
    closed, at_the_end = list[bool](), list[int]()

    class Closing(coterie.InProcess):
        def close(self) -> None:
            closed.append(True)

    class End(coterie.Hook):
        def on_end(self, run: coterie.Run) -> None:
            at_the_end.append(len(closed))

    users = [coterie.User(name, torch.eye(4), torch.ones(4, 1)) for name in ("me", "a")]
    settings: dict[str, Any] = {"steps": 1, "engine": Closing, "out": tmp_path / "run"}
    settings["hooks"] = [End()]
    model, loss, rule = nn.Linear(4, 1), nn.functional.mse_loss, coterie.WeightedAveraging(0.5)
    coterie.train(model, loss, users[0], users[1:], rule, **settings)
    assert (len(closed), at_the_end) == (1, [1])
    with pytest.raises(KnobError, match="already holds a run"):  # before the first step
        coterie.train(model, loss, users[0], users[1:], rule, **settings)
    with pytest.raises(KnobError, match="unknown peer"):  # by the check of the rule
        coterie.train(
            model, loss, users[0], users[1:], coterie.WeightedAveraging(0.5, {"b": 1.0}), **settings
        )
    assert len(closed) == 3
