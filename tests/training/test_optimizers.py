"""Any optimizer and scheduler of `torch.optim`, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.small_runs import network, same, state_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

import coterie
from coterie.errors import KnobError, ModelError

Users = Callable[..., list[coterie.User]]


def plain_steps(
    model: nn.Module,
    users: list[coterie.User],
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    steps: int,
) -> list[float]:
    """Train by averaging with weight ½ in a plain loop; return the learning rate after every step."""
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        for user, weight in zip(
            users, (0.5, *[0.5 / (len(users) - 1)] * (len(users) - 1)), strict=True
        ):
            inputs, targets = user.batch(4, seed=0, step=step)
            torch.autograd.backward(weight * cross_entropy(model(inputs), targets))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
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
        groups = [
            {"params": [net[0].weight], "lr": 0.3},
            {"params": list(net[2].parameters()), "momentum": 0.9},
        ]
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
    with pytest.raises(
        ModelError, match=r"parameters of another model; make it from `model\.parameters"
    ):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
            optimizer=torch.optim.SGD(network().parameters(), lr=0.1),
        )


def test_two_learning_rates_or_lbfgs(make_users: Users) -> None:
    users, model = make_users(), network()
    for optimizer, lr, message in (
        (
            torch.optim.SGD(model.parameters(), lr=0.1),
            0.2,
            r"`lr` \(0.2\) and an optimizer that has its own",
        ),
        (torch.optim.LBFGS, None, "LBFGS evaluates the loss several times"),
    ):
        with pytest.raises(KnobError, match=message):
            coterie.train(
                *(model, cross_entropy, users[0], users[1:], coterie.Alone()),
                optimizer=optimizer,
                lr=lr,
            )


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
            measure=False,
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
    with pytest.raises(
        KnobError, match="follows the validation loss, but 'me' has no validation set"
    ):
        coterie.train(
            *(network(torch.float32), cross_entropy, me, [], coterie.Alone()),
            scheduler=lr_scheduler.ReduceLROnPlateau,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
