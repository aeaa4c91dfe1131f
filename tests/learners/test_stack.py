"""Rows of parameters under one optimizer, or under one each: stepped, forked and saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.many_runs import from_disk, my_loss
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.learners.stack import ELEMENTWISE, Stack, Steps, why_not_stacked

Users = Callable[..., list[coterie.User]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "groups": lambda p: torch.optim.SGD(
        [{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], momentum=0.5
    ),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def spec_of(users: list[coterie.User], model: nn.Module, kind: str) -> RunSpec:
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    return RunSpec(
        *(model, cross_entropy, users[0], users[1:]),
        optimizer=OPTIMIZERS[kind](model.parameters()),
        scheduler=halving,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_row_steps_as_a_model_by_itself_does_also_when_forked_and_saved(
    make_users: Users, kind: str
) -> None:
    users, slopes = (
        make_users(),
        torch.randn(9, 3, 38, generator=torch.Generator().manual_seed(0)).double(),
    )
    starts = torch.randn(3, 38, generator=torch.Generator().manual_seed(1)).double()
    spec = spec_of(users, network(), kind)
    stack = Stack.of(spec, starts)
    expected = []
    for row in range(3):
        model, optimizer = copy.deepcopy((spec.model, spec.made_optimizer))
        parameters, schedule = Parameters(model), spec.made_scheduler(optimizer)
        x = parameters.share()
        x.copy_(starts[row])
        for slope in slopes:
            parameters.set_gradient(slope[row].clone())
            optimizer.step()
            schedule.step()  # type: ignore[union-attr]
        expected.append(x.clone())
    for step, slope in enumerate(slopes):
        if step == 4:
            stack = stack.forked([[2], [0], [1]])
        if step == 6:
            other = Stack.of(spec, torch.zeros_like(starts))
            other.load_state_dict(copy.deepcopy(stack.state_dict()))
            stack = other
        stack.direction.copy_(slope if step < 4 else slope[[2, 0, 1]])
        Steps().take([stack])
    torch.testing.assert_close(stack.x, torch.stack(expected)[[2, 0, 1]], rtol=1e-9, atol=1e-12)
    assert torch.equal(Parameters(spec.model).vector(), Parameters(network()).vector())  # untouched


def test_a_row_may_be_the_mean_of_others_with_their_momentum(make_users: Users) -> None:
    stack = Stack.of(spec_of(make_users(), network(), "momentum"), torch.zeros(2, 38).double())
    stack.direction.copy_(torch.tensor([[1.0], [3.0]]).expand(2, 38))
    Steps().take([stack])
    mean = stack.forked([[0, 1]])
    for each in (stack, mean):
        each.direction.zero_()
        Steps().take([each])
    torch.testing.assert_close(mean.x[0], stack.x.mean(0))


def test_what_cannot_be_stacked_says_why(make_users: Users) -> None:
    users, model = make_users(), network()

    def why(users: list[coterie.User], model: nn.Module, loss: Any = cross_entropy) -> str:
        return coterie.InProcess(model, loss, users[0], users[1:]).capabilities.not_stacked or ""

    assert not why(users, model)
    assert "mean over examples" in why(users, model, my_loss)
    assert "buffers" in why(
        users, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    )
    assert "random" in why(users, nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)).double())
    assert "in memory" in why([from_disk(users[0]), *users[1:]], model)
    assert "Adafactor" in (why_not_stacked(torch.optim.Adafactor(model.parameters())) or "")
    assert why_not_stacked(torch.optim.Adam(model.parameters())) is None


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_optimizers_are(name: str) -> None:
    """Two parameters in one tensor step as each does by itself."""
    generator = torch.Generator().manual_seed(0)
    start, slopes = (torch.randn(2, 4, generator=generator) for _ in range(2))
    kind = getattr(torch.optim, name)
    whole, *rows = ([x.clone().requires_grad_()] for x in (start, *start))
    for parameters, slope in zip((whole, *rows), (slopes, *slopes), strict=True):
        optimizer = kind(parameters)
        for scale in (1.0, -2.0, 0.5):
            parameters[0].grad = scale * slope
            optimizer.step()
    np.testing.assert_allclose(
        whole[0].detach(), torch.stack([row[0].detach() for row in rows]), rtol=1e-6
    )


def test_rows_are_stepped_together_and_forked_to_means() -> None:
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    me = coterie.User("me", [[1.0]], [[1.0]])
    spec = RunSpec(model, nn.functional.mse_loss, me, (), optimizer=sgd)
    stack = Stack(torch.zeros(3, 2), [(spec, 3)])
    stack.direction.copy_(torch.tensor([[2.0, 0.0]]))
    Steps().take([stack])
    assert stack.x[0].tolist() == [-1.0, 0.0]
    stack.x[2] = 3.0
    assert stack.forked([[1, 2], [0]]).x.tolist() == [[1.0, 1.5], [-1.0, 0.0]]


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_rows_that_are_columns_of_a_larger_matrix_step_as_those_of_their_own_do(
    make_users: Users, kind: str
) -> None:
    starts, slopes = torch.randn(2, 3, 38, generator=torch.Generator().manual_seed(0)).double()
    spec, larger = spec_of(make_users(), network(), kind), torch.zeros(3, 60, dtype=torch.float64)
    larger[:, :38] = starts
    whole, columns = Stack(starts.clone(), [(spec, 3)]), Stack(larger[:, :38], [(spec, 3)])
    for stack in (whole, columns):
        for scale in (1.0, -0.5):
            stack.direction.copy_(scale * slopes)
            Steps().take([stack])
    torch.testing.assert_close(larger[:, :38], whole.x)
    assert not larger[:, 38:].any()
