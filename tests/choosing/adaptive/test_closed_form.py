"""What has a closed form beside gradient steps: nothing set, absurd step sizes, networks, peers elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import ENGINES
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie import User
from coterie.choosing import AdaptiveAveraging
from coterie.errors import GradientError
from coterie.evaluation.evaluate import evaluate

D, CLASSES = 8, 3
QUIET: dict[str, Any] = {"measure": False, "progress": False}


def planted(seed: int, own: int = 40, peers: int = 8) -> tuple[User, list[User], User]:
    """Return users who differ in one of 8 coefficients, and a test set of user 0."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=D)

    def user(name: str, n: int, shift: float) -> User:
        x = rng.normal(size=(n, D))
        y = x @ (truth + shift * np.eye(D)[0]) + rng.normal(size=n)
        return User(name, *(torch.from_numpy(each).float() for each in (x, y[:, None])))

    mine, *shifts = rng.normal(size=1 + peers)
    others = [user(f"peer {k}", 200, shift) for k, shift in enumerate(shifts)]
    return user("me", own, mine), others, user("test", 2000, mine)


def classes(own: int = 24) -> tuple[User, list[User]]:
    """Return users of three classes that no linear model tells apart."""
    draws = torch.Generator().manual_seed(0)

    def user(name: str, n: int) -> User:
        x = torch.randn(n, 4, generator=draws)
        return User(name, x, (x[:, :2].square().sum(1) + x[:, 2]).long() % CLASSES)

    return user("me", own), [user(f"peer {k}", 60) for k in range(5)]


def network(columns: int, outputs: int, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def board(run: coterie.Run) -> dict[str, dict[str, float]]:
    return dict(run.record.end.account["leaderboard"])


def test_a_linear_model_with_a_step_size_has_its_closed_form_beside() -> None:
    """On both sides, so that a step size that does not arrive costs little."""
    me, peers, test = planted(0)
    settings: dict[str, Any] = {"lr": 1e-4, "steps": 20, **QUIET}
    run = coterie.train(nn.Linear(D, 1), mse_loss, me, peers, **settings)
    closed = coterie.train(nn.Linear(D, 1), mse_loss, me, peers, **QUIET)
    loss, best = (evaluate(one.model, mse_loss, test.examples)["loss"] for one in (run, closed))
    assert isinstance(run.model, nn.Linear)
    assert {"alone, closed form", "hierarchical, closed form"} <= board(run).keys()
    assert loss < best + 0.05
    assert sum(run.record.end.tau.values()) > 0.5


@pytest.mark.parametrize("kind", ["linear", "network"])
def test_a_step_size_of_a_million_is_told_as_it_is(kind: str) -> None:
    """It was "better, loss −51025"."""
    me, peers = classes()
    model = nn.Linear(4, CLASSES) if kind == "linear" else network(4, CLASSES)
    settings: dict[str, Any] = {"lr": 1e6, "optimizer": torch.optim.SGD, "steps": 12, **QUIET}
    try:
        run, why = coterie.train(model, cross_entropy, me, peers, **settings), ""
    except GradientError as error:  # a network's gradients are soon beyond all numbers
        run, why = error.run, str(error)
    assert ("lower `lr`" in why) is (kind == "network")
    assert abs(run.record.end.account["difference"]) < 1
    fresh = classes(own=500)[0].examples
    assert evaluate(run.model, cross_entropy, fresh)["loss"] < 2


def test_a_network_does_the_planted_regression_with_nothing_set_but_steps() -> None:
    """A linear truth: not worse than cross-validated ridge regression on the own rows, beyond a tenth."""
    from sklearn.linear_model import RidgeCV

    served, ridge = [], []
    for seed in range(3):
        me, peers, test = planted(seed)
        run = coterie.train(network(D, 1), mse_loss, me, peers, steps=60, **QUIET)
        (x, y), (to, truth) = (
            tuple(part.numpy() for part in one.examples.take(torch.arange(len(one))))
            for one in (me, test)
        )
        plain = RidgeCV(np.logspace(-3, 3, 9)).fit(x, y[:, 0]).predict(to)
        served.append(evaluate(run.model, mse_loss, test.examples)["loss"])
        ridge.append(float(np.square(plain - truth[:, 0]).mean()))
    assert np.mean(served) < 1.1 * np.mean(ridge)


def test_last_layers_are_found_behind_the_pooled_model_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    me, peers = classes(own=40)
    settings: dict[str, Any] = {"steps": 60, "lr": 0.03, "checkpoint_every": 20, **QUIET}
    rule = AdaptiveAveraging()
    run = coterie.train(network(4, CLASSES), cross_entropy, me, peers, rule, **settings)
    lines = board(run)
    assert {"alone, last layer", "hierarchical, last layer", "alone, closed form"} <= lines.keys()
    last = [line["loss"] for name, line in lines.items() if name.endswith("last layer")]
    steps = [lines[kind]["loss"] for kind in ("alone", "pooled", "branch", "branch from pooled")]
    assert min(last) < min(steps)
    without = AdaptiveAveraging(linear=False)
    plain = coterie.train(network(4, CLASSES), cross_entropy, me, peers, without, **settings)
    assert not any("," in name for name in board(plain))

    folder: dict[str, Any] = {**settings, "out": tmp_path}
    stop = [lambda step: step.step == 20]
    coterie.train(network(4, CLASSES), cross_entropy, me, peers, rule, hooks=stop, **folder)
    for _ in range(2):  # once more after its end: what was found is in the checkpoint
        again = coterie.train(
            network(4, CLASSES), cross_entropy, me, peers, rule, resume=True, **folder
        )
        x, _ = me.examples.take(torch.arange(len(me)))
        assert torch.equal(again.model(x), run.model(x))


@pytest.mark.parametrize("kind", ["linear", "network"])
def test_peers_elsewhere_give_the_same(kind: str) -> None:
    me, peers = classes()
    model = nn.Linear(4, CLASSES) if kind == "linear" else network(4, CLASSES)
    settings: dict[str, Any] = {"steps": 20, "lr": 0.03, **QUIET}
    with ENGINES["here"]() as engine:
        run = coterie.train(model, cross_entropy, me, peers, engine=engine, **settings)
    inside = coterie.train(model, cross_entropy, me, peers, **settings)
    assert board(run).keys() == board(inside).keys()
    for name, line in board(inside).items():
        assert board(run)[name] == pytest.approx(line, abs=1e-4)
    assert run.record.end.account["cost"]["exchanges"] == 39


def test_a_model_without_a_last_linear_layer_is_trained_as_it_was() -> None:
    me, peers = classes()
    model = nn.Sequential(network(4, CLASSES), nn.Tanh())
    run = coterie.train(model, cross_entropy, me, peers, steps=10, lr=0.03, **QUIET)
    assert not any("last layer" in name for name in board(run))
    assert "alone, closed form" in board(run)
