"""FedPer, FedRep and FedBN: the joint minimiser in closed form, plain loops with autograd, FedAvg as a limit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.least_squares import PROBLEM, SHARES, D, N
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import coterie
from coterie.methods import FedAvg, FedBN, FedPer, FedRep, Method

LOSS = nn.functional.mse_loss


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def played(model: nn.Module, method: Method, rounds: int, lr: float, **more: Any) -> coterie.Run:
    me, *peers = PROBLEM.users
    settings = {"lr": lr, "steps": rounds, "evaluate_every": rounds, "batch_size": 10**6} | more
    return coterie.train(model, LOSS, me, peers, method, **settings)


def numbers(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def own_step(k: int, model: nn.Module, names: list[str], lr: float) -> None:
    """Let user k move some parameters of its model by a plain gradient step."""
    inputs, targets = PROBLEM.users[k].batch(10**6, seed=0, step=0)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(LOSS(model(inputs), targets), list(named.values()))
    with torch.no_grad():
        for (name, p), gradient in zip(named.items(), gradients, strict=True):
            if name in names:
                p.sub_(gradient, alpha=lr)


def average(models: list[nn.Module], names: list[str]) -> None:
    """Give all models the mean of these parameters, by the shares of the examples."""
    for name in names:
        rows = [dict(model.named_parameters())[name] for model in models]
        mean = sum(
            (share * p.detach() for share, p in zip(SHARES, rows, strict=True)),
            torch.zeros_like(rows[0]),
        )
        for p in rows:
            p.data.copy_(mean)


def test_fedper_ends_at_the_minimiser_of_the_joint_objective() -> None:
    """One slope for all and an intercept for each, the default head of a linear model: a linear system."""
    wide = torch.zeros(D + N, D + N, dtype=torch.float64)
    right = torch.zeros(D + N, dtype=torch.float64)
    for k, user in enumerate(PROBLEM.users):
        inputs, targets = user.batch(10**6, seed=0, step=0)
        intercept = torch.zeros(len(inputs), N, dtype=torch.float64)
        intercept[:, k] = 1
        rows = torch.cat([inputs, intercept], 1)
        wide += SHARES[k] * rows.T @ rows / len(inputs)
        right += SHARES[k] * rows.T @ targets.flatten() / len(inputs)
    solution = torch.linalg.solve(wide, right)
    run = played(nn.Linear(D, 1).double(), FedPer(), rounds=600, lr=0.2)
    for k, model in enumerate(run.models.values()):
        assert torch.allclose(
            numbers(model),
            torch.cat([solution[:D], solution[D + k : D + k + 1]]),
            rtol=0,
            atol=1e-8,
        )
    assert run.record.end.costs["user 1"].numbers_sent == 600 * D  # the intercept never travels


def test_fedper_without_a_head_is_fedavg_to_the_bit_and_with_all_of_it_users_are_alone() -> None:
    model = network(nn.Linear(D, 2), nn.Tanh(), nn.Linear(2, 1))
    shared, plain = (
        played(model, method, 4, 0.1, batch_size=4) for method in (FedPer(3, head=[]), FedAvg(3))
    )
    assert torch.equal(numbers(shared.model), numbers(plain.model))
    alone = played(model, FedPer(3, head=["0", "2"]), 2, 0.1)
    expected = copy.deepcopy(model)
    for _ in range(6):
        own_step(2, expected, ["0.weight", "0.bias", "2.weight", "2.bias"], 0.1)
    assert torch.allclose(numbers(alone.models["user 2"]), numbers(expected), rtol=0, atol=1e-12)
    assert alone.record.end.costs["user 1"].numbers_sent == 0


@pytest.mark.parametrize("head", [None, ["2"], ["2.bias", "0"]])
def test_fedper_against_a_plain_loop(head: list[str] | None) -> None:
    model = network(nn.Linear(D, 2), nn.Tanh(), nn.Linear(2, 1))
    everything = [name for name, _ in model.named_parameters()]
    shared = ["2.weight"] if head == ["2.bias", "0"] else ["0.weight", "0.bias"]
    models = [copy.deepcopy(model) for _ in range(N)]
    for _ in range(3):
        for k in range(N):
            for _ in range(2):
                own_step(k, models[k], everything, 0.1)
        average(models, shared)
    run = played(model, FedPer(2, head), rounds=3, lr=0.1)
    for ours, theirs in zip(run.models.values(), models, strict=True):
        assert torch.allclose(numbers(ours), numbers(theirs), rtol=0, atol=1e-12)


def test_fedrep_against_a_plain_loop() -> None:
    # the paper's: a linear representation
    model = network(nn.Linear(D, 2, bias=False), nn.Linear(2, 1))
    models = [copy.deepcopy(model) for _ in range(N)]
    for _ in range(3):
        for k in range(N):
            for _ in range(4):
                own_step(k, models[k], ["1.weight", "1.bias"], 0.1)
            for _ in range(2):
                own_step(k, models[k], ["0.weight"], 0.1)
        average(models, ["0.weight"])
    run = played(model, FedRep(2, head_steps=4), rounds=3, lr=0.1)
    for ours, theirs in zip(run.models.values(), models, strict=True):
        assert torch.allclose(numbers(ours), numbers(theirs), rtol=0, atol=1e-12)
    assert run.record.end.costs["user 0"].gradients == 3 * 6


@pytest.mark.parametrize("method", [FedPer(2), FedRep(1, 2)], ids=repr)
def test_a_resumed_run_has_the_same_bits(method: Method, tmp_path: Path) -> None:
    model = network(nn.Linear(D, 2), nn.Linear(2, 1))
    played(model, method, 2, 0.1, batch_size=4, out=tmp_path / "a")
    resumed = played(
        model, method, 4, 0.1, batch_size=4, evaluate_every=2, out=tmp_path / "a", resume=True
    )
    whole = played(model, method, 4, 0.1, batch_size=4, evaluate_every=2, out=tmp_path / "b")
    for ours, theirs in zip(resumed.models.values(), whole.models.values(), strict=True):
        assert torch.equal(numbers(ours), numbers(theirs))


def test_fedbn_is_fedper_with_the_normalisation_for_its_head() -> None:
    model = network(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    ours, named = (played(model, method, 3, 0.1) for method in (FedBN(2), FedPer(2, head=["1"])))
    assert torch.equal(numbers(ours.model), numbers(named.model))
    scales = [model[1].weight for model in ours.models.values()]  # type: ignore[index]
    weights = [model[0].weight for model in ours.models.values()]  # type: ignore[index]
    assert not torch.equal(scales[0], scales[1])
    assert torch.equal(weights[0], weights[1])
