"""Clients: gradients and losses of all users, each at a point of its own."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, D, N
from torch import Tensor, nn

import coterie
from coterie.errors import DataError
from coterie.methods import MVR, SAGA, SVRG, Clients, Method, Mime
from coterie.recording.costs import Costs


def test_exact_users_are_the_users() -> None:
    engine = coterie.InProcess(
        nn.Linear(D, 1, bias=False).double(),
        nn.functional.mse_loss,
        PROBLEM.users[0],
        PROBLEM.users[1:],
    )
    costs = Costs(dict.fromkeys(EXACT.names, 1))
    users = Clients(engine, PROBLEM.users[0], PROBLEM.users[1:], costs)
    points = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(
        users.gradients(points, 0), EXACT.gradients(points, 0), rtol=0, atol=1e-12
    )
    assert torch.allclose(users.losses(points, 0), EXACT.losses(points, 0), rtol=0, atol=1e-12)
    assert torch.allclose(users.shares, EXACT.shares)


def test_losses_move_no_running_statistics_and_drop_out_alike() -> None:
    model = nn.Sequential(
        nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
    ).double()
    engine = coterie.InProcess(model, nn.functional.mse_loss, PROBLEM.users[0], PROBLEM.users[1:])
    users = Clients(
        engine, PROBLEM.users[0], PROBLEM.users[1:], Costs(dict.fromkeys(EXACT.names, 1))
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    points = engine.passes.parameters.vector().expand(N, -1)
    first, again = users.losses(points, 3), users.losses(points, 3)
    assert torch.equal(first, again)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("method", [SVRG(2), SAGA(2), Mime(2)], ids=repr)
def test_methods_that_go_through_all_examples_refuse_a_stream(method: Method) -> None:
    def fresh(size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(
            size, D, generator=torch.Generator().manual_seed(seed % 2**40 + step)
        ).double()
        return inputs, inputs.sum(1, keepdim=True)

    model = torch.nn.Linear(D, 1, bias=False).double()
    me, *peers = coterie.User.stream("me", fresh), coterie.User.stream("a", fresh)
    with pytest.raises(DataError, match="stream"):
        coterie.train(model, torch.nn.functional.mse_loss, me, peers, method, steps=1)
    coterie.train(model, torch.nn.functional.mse_loss, me, peers, MVR(2), steps=1)


def test_dropout_and_running_statistics_are_those_of_user_0_and_of_the_step() -> None:
    """A pass over all of a peer's examples moves no buffer, and what is random in it comes from the step."""
    norm = torch.nn.BatchNorm1d(D)
    model = torch.nn.Sequential(norm, torch.nn.Dropout(0.5), torch.nn.Linear(D, 1)).double()
    me, peer = PROBLEM.users[:2]
    engine = coterie.engines.InProcess(model, torch.nn.functional.mse_loss, me, [peer])
    x, everything = engine.passes.parameters.vector(), torch.arange(8)
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    gradients = [engine.on("user 1", x, everything, step)[0] for step in (3, 3, 4)]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
    assert torch.equal(norm.running_mean, before)
    engine.on("user 0", x, everything, 3)
    assert not torch.equal(norm.running_mean, before)
