"""A model trained alone beside a method: as many own steps, a verdict as for rules, and the method let be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.methods.test_rounds import METHODS
from tests.support.least_squares import HELD_OUT, START, D, last_of, weights_of
from torch import Tensor, nn

import coterie
from coterie import methods
from coterie.errors import GradientError
from coterie.methods.own_variance import OwnVariance
from coterie.rules import State

WITH_PEERS = [method for method in METHODS if not isinstance(method, OwnVariance)]
ON_THEIR_OWN = [method for method in METHODS if isinstance(method, OwnVariance)]


def held_out_loss(x: Tensor) -> float:
    """Return user 0's validation loss, written out."""
    held_out = HELD_OUT.users[0].validation
    assert held_out is not None
    inputs, targets = held_out.take(torch.arange(len(held_out)))
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)
    return float(((inputs @ x - targets.flatten()) ** 2).mean())


@pytest.mark.parametrize("method", WITH_PEERS, ids=repr)
def test_alone_takes_a_plain_step_for_each_own_gradient_of_the_method(
    method: methods.Method,
) -> None:
    run = HELD_OUT.train(method, rounds=4, lr=0.05, batch_size=4, guard="auto", evaluate_every=1)
    x, losses = START, [held_out_loss(START)]
    for step in range(4 * method.gradients_a_round):
        x = x - 0.05 * HELD_OUT.gradient(0, x, step, batch_size=4)
        if (step + 1) % method.gradients_a_round == 0:
            losses.append(held_out_loss(x))
    assert run.record.curve("alone_validation_loss")[1] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("method", WITH_PEERS, ids=repr)
def test_the_rounds_are_those_without_it_and_only_own_gradients_are_added(
    method: methods.Method,
) -> None:
    watched, free = (
        HELD_OUT.train(method, rounds=4, lr=0.05, guard=guard) for guard in ("held-out", "off")
    )
    assert torch.equal(last_of(watched), last_of(free))
    assert watched.record.curve("validation_loss") == free.record.curve("validation_loss")
    ours, theirs = watched.record.end.costs, free.record.end.costs
    assert ours["user 0"].gradients == theirs["user 0"].gradients + 4 * method.gradients_a_round
    assert [ours[f"user {k}"] for k in (1, 2, 3)] == [theirs[f"user {k}"] for k in (1, 2, 3)]


@pytest.mark.parametrize("method", ON_THEIR_OWN, ids=repr)
def test_what_asks_nobody_is_trained_alone_and_needs_no_other_beside(
    method: methods.Method,
) -> None:
    run = HELD_OUT.train(method, rounds=2, lr=0.05, guard="auto")
    assert run.alone is None
    assert run.record.end.costs["user 0"].gradients == 2 * method.gradients_a_round
    assert run.verdict.sentence == "The model for user 0 was trained alone: no peer was asked."


def task(sign: float, noise: float = 0.5) -> tuple[coterie.User, list[coterie.User]]:
    """Return a user with few examples and peers whose truth is the same, or the opposite."""
    random = torch.Generator().manual_seed(1)
    truth = torch.tensor([1.0, -2.0, 0.5])

    def examples(n: int, sign: float) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(n, D, generator=random)
        return inputs, (sign * inputs @ truth + noise * torch.randn(n, generator=random)).unsqueeze(
            1
        )

    me = coterie.User("me", *examples(6, 1.0), validation=examples(40, 1.0), test=examples(60, 1.0))
    return me, [coterie.User(f"peer {k}", *examples(50, sign)) for k in range(4)]


def trained(sign: float, rule: Any, **more: Any) -> coterie.Run:
    torch.manual_seed(0)
    how: dict[str, Any] = {"lr": 0.05, "steps": 40, "batch_size": 100, "evaluate_every": 4}
    return coterie.train(nn.Linear(D, 1), nn.functional.mse_loss, *task(sign), rule, **(how | more))


def test_a_better_method_is_served_and_the_verdict_is_on_the_test_examples() -> None:
    run = trained(1.0, methods.FedAvg(3))
    assert run.record.end.guard is not None
    assert run.record.end.guard.served == "collaborative"
    assert torch.equal(weights_of(run), weights_of(trained(1.0, methods.FedAvg(3), guard="off")))
    assert run.verdict.finding == "better"
    test = task(1.0)[0].test
    assert test is not None
    assert run.alone is not None
    inputs, targets = test.take(torch.arange(len(test)))
    with torch.no_grad():
        ours, alone = (
            ((model(inputs) - targets) ** 2).double().flatten() for model in (run.model, run.alone)
        )
    loss = run.verdict.measures["loss"]
    assert loss.difference == pytest.approx(float((ours - alone).mean()), rel=1e-5)
    assert loss.error == pytest.approx(float((ours - alone).std()) / 60**0.5, rel=1e-5)


def test_a_worse_method_is_not_restarted_and_the_model_trained_alone_is_served() -> None:
    run, free = trained(-1.0, methods.FedAvg(3)), trained(-1.0, methods.FedAvg(3), guard="off")
    assert run.verdict.finding == "alone"
    assert (
        "on 40 validation examples the collaborative model was not better" in run.verdict.sentence
    )
    assert set(run.record.curve("guard_restarts")[1]) == {0}
    assert torch.equal(last_of(run), last_of(free)), "`Run.models` are the method's"
    three_times = {"optimizer": torch.optim.SGD, "steps": 120, "evaluate_every": 12}
    alone = trained(-1.0, coterie.Alone(), **three_times)
    torch.testing.assert_close(weights_of(run), weights_of(alone), rtol=1e-4, atol=1e-5)
    assert 3 * run.best_step == alone.best_step


def test_steps_that_are_too_long_alone_do_not_end_a_method() -> None:
    """(3x − 1)² has the curvature 18: a step of 0.3 multiplies the distance from the optimum by −4.4."""
    inputs = torch.tensor([[1.0], [-1.0]])
    held_out = inputs.repeat(5, 1), inputs.repeat(5, 1)
    me = coterie.User("me", 3 * inputs, inputs, validation=held_out, test=held_out)
    flat = coterie.User("flat", 0.3 * inputs.repeat(60, 1), inputs.repeat(60, 1))
    how: dict[str, Any] = {"lr": 0.3, "steps": 120, "evaluate_every": 10}
    model, loss = nn.Linear(1, 1, bias=False), nn.functional.mse_loss
    nn.init.zeros_(model.weight)
    with pytest.raises(GradientError):
        coterie.train(model, loss, me, [flat], coterie.Alone(), optimizer=torch.optim.SGD, **how)
    run = coterie.train(model, loss, me, [flat], methods.FedAvg(1), **how)
    assert run.step == 120
    assert run.alone is not None
    assert run.verdict.finding == "better"
    assert run.verdict.sentence.endswith("first step: steps may be too long, try a lower `lr`.")
    assert not any(math.isnan(loss) for loss in run.record.curve("alone_validation_loss")[1])
    assert all(parameter.isfinite().all() for parameter in run.alone.parameters()), (
        "the best before that"
    )


@dataclass(frozen=True)
class Astray(methods.FedAvg):
    """Averaging whose model is infinite after ten rounds."""

    def round(self, users: methods.Clients, state: State, lr: float) -> State:
        after = super().round(users, state, lr)
        return after | {"x": after["x"] / float(after["step"] < 10 * self.local_steps)}


def test_a_method_that_is_led_astray_ends_and_the_error_has_the_better_model() -> None:
    with pytest.raises(GradientError, match="not finite at step 9") as caught:
        trained(-1.0, Astray(3))
    run = caught.value.run
    assert run.verdict.finding == "alone"
    assert run.step == 9
    assert weights_of(run).isfinite().all()
