"""What all methods share, FedAvg and SCAFFOLD: against closed forms on heterogeneous quadratics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.least_squares import D, balance, last_of, least_squares, weights_of
from torch import Tensor, nn

import coterie
from coterie.errors import KnobError
from coterie.methods import (
    APFL,
    L2GD,
    MVR,
    SAGA,
    SVRG,
    Ditto,
    FedAvg,
    FedFomo,
    FineTuning,
    HypCluster,
    Mapper,
    Method,
    Mime,
    PerFedAvg,
    Scaffold,
    Selfish,
    UserCentric,
    Waffle,
)

STEPS = [1, 3, 8]
PROBLEM = least_squares()
N = len(PROBLEM.users)
EQUAL = torch.full((N,), 1 / N, dtype=torch.float64)
EXAMPLES = torch.tensor([len(user) for user in PROBLEM.users], dtype=torch.float64)
SHARES = EXAMPLES / EXAMPLES.sum()

METHODS: list[Method] = [
    APFL(3),
    Ditto(together=FedAvg(3), personal_steps=2),
    FedAvg(3),
    FineTuning(3, FedAvg(2)),
    HypCluster(2, 3),
    L2GD(3),
    Mapper(2),
    PerFedAvg(2),
    PerFedAvg(2, difference=1e-3),
    Scaffold(3),
    Scaffold(3, option=1),
    Mime(3),
    Mime(3, lite=True),
    SVRG(3),
    SAGA(3),
    SAGA(3, biased=True),
    MVR(3),
    FedFomo(3),
    FedFomo(3, "mine"),
    Waffle(9, 3),
    UserCentric(3),
    UserCentric(3, clusters=2, blocks=3),
    Selfish(3, ("user 2",)),
]
HELD_OUT = least_squares(held_out=10)


def fedavg_point(shares: Tensor, local_steps: int, lr: float) -> Tensor:
    """Return where Σ p_k (1 − (1 − ηA_k)^K)(x − o_k) = 0."""
    shrink = torch.eye(D, dtype=torch.float64) - lr * PROBLEM.curvatures
    pull = torch.eye(D, dtype=torch.float64) - torch.linalg.matrix_power(shrink, local_steps)
    return balance(shares, pull, PROBLEM.optima)


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("shares", ["examples", "equal"])
def test_fedavg_ends_at_its_biased_point(local_steps: int, shares: str) -> None:
    run = PROBLEM.train(FedAvg(local_steps, shares), rounds=400, lr=0.1)  # type: ignore[arg-type]
    expected = fedavg_point(SHARES if shares == "examples" else EQUAL, local_steps, 0.1)
    assert torch.allclose(weights_of(run), expected, atol=1e-9)
    minimiser = PROBLEM.minimiser(SHARES if shares == "examples" else EQUAL)
    assert torch.allclose(expected, minimiser, atol=1e-9) == (local_steps == 1)


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_ends_at_the_minimiser_whatever_the_local_steps(local_steps: int, option: int) -> None:
    run = PROBLEM.train(Scaffold(local_steps, option), rounds=600, lr=0.05)  # type: ignore[arg-type]
    assert torch.allclose(weights_of(run), PROBLEM.minimiser(EQUAL), atol=1e-8)


def test_scaffold_against_a_plain_loop() -> None:
    """Two rounds written out, with a server step other than 1."""
    gradient = [lambda x, k=k: PROBLEM.curvatures[k] @ (x - PROBLEM.optima[k]) for k in range(N)]
    x, c = torch.zeros(D, dtype=torch.float64), [torch.zeros(D, dtype=torch.float64)] * N
    for _ in range(2):
        mean, moved, following = sum(c) / N, [], []
        for k in range(N):
            y = x
            for _ in range(3):
                y = y - 0.05 * (gradient[k](y) - c[k] + mean)
            moved.append(y - x)
            following.append(c[k] - mean + (x - y) / (3 * 0.05))
        x, c = x + 0.7 * sum(moved) / N, following
    run = PROBLEM.train(Scaffold(3, server_lr=0.7), rounds=2, lr=0.05)
    assert torch.allclose(weights_of(run), x, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_costs_are_counted_by_user(method: Method) -> None:
    run = HELD_OUT.train(method, rounds=5, lr=0.05)
    costs = run.record.end["costs"]
    before = method.blocks if isinstance(method, UserCentric) else 0  # of blocks that are all examples together
    assert costs["user 0"]["gradients"] == before + 5 * method.gradients_a_round
    assert costs["user 1"]["examples"] == 20 * (costs["user 1"]["gradients"] - max(0, before - 1))
    assert costs["user 0"]["received"] == sum(costs[f"user {k}"]["sent"] for k in range(1, N))
    assert costs["user 0"]["sent"] == sum(costs[f"user {k}"]["received"] for k in range(1, N))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_resumed_run_is_the_run_that_was_never_stopped(method: Method, tmp_path: Path) -> None:
    def train(out: Path, steps: int, resume: bool = False) -> coterie.Run:
        me, *peers = HELD_OUT.users
        torch.manual_seed(0)
        model = nn.Linear(D, 1, bias=False).double()
        return coterie.train(
            model,
            nn.functional.mse_loss,
            me,
            peers,
            method,
            lr=0.05,
            steps=steps,
            batch_size=4,
            out=out,
            resume=resume,
        )

    train(tmp_path / "a", 4)
    resumed, whole = train(tmp_path / "a", 9, resume=True), train(tmp_path / "b", 9)
    assert torch.equal(last_of(resumed), last_of(whole))
    assert resumed.record.end["costs"] == whole.record.end["costs"]


def test_batches_of_a_method_are_those_of_the_users() -> None:
    """One round of one local step is user k's gradient on the batch of step 0."""
    run = PROBLEM.train(FedAvg(1, "equal"), rounds=1, lr=1.0, batch_size=4)
    rows = []
    for user in PROBLEM.users:
        inputs, targets = user.batch(4, seed=0, step=0)
        rows.append(-2 * (inputs.T @ targets).flatten() / len(inputs))
    assert torch.allclose(weights_of(run), -torch.stack(rows).mean(0), atol=1e-12)


def test_a_peer_whose_gradient_is_not_finite_takes_no_step_and_is_counted() -> None:
    bad = coterie.User("bad", torch.full((4, D), torch.inf, dtype=torch.float64), torch.zeros(4, 1).double())
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    run = coterie.train(model, nn.functional.mse_loss, me, [*peers, bad], FedAvg(2), lr=0.05, steps=3)
    assert run.record.end["left_out"] == {"bad": {"not finite": 3}}
    assert torch.isfinite(weights_of(run)).all()


def test_every_user_has_a_model_and_one_model_for_all_is_everybodys() -> None:
    run = PROBLEM.train(FedAvg(2), rounds=3, lr=0.05)
    assert set(run.models) == {user.name for user in PROBLEM.users}
    for model in run.models.values():
        assert torch.equal(next(iter(model.parameters())).flatten(), weights_of(run))


def test_what_a_method_cannot_use_is_refused() -> None:
    me, *peers = PROBLEM.users
    model, loss = nn.Linear(D, 1, bias=False).double(), nn.functional.mse_loss
    with pytest.raises(KnobError, match="plain gradient steps"):
        coterie.train(model, loss, me, peers, FedAvg(), optimizer=torch.optim.Adam)
    with pytest.raises(KnobError, match="guard"):
        coterie.train(model, loss, me, peers, FedAvg(), guard="held-out")
    with pytest.raises(KnobError, match="local_steps"):
        FedAvg(0)


def test_rules_count_what_they_cost_too() -> None:
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    rule = coterie.WeightedAveraging(0.5, {"user 1": 0.5, "user 3": 0.5})
    run = coterie.train(model, nn.functional.mse_loss, me, peers, rule, steps=6, batch_size=10)
    assert run.record.end["costs"] == {
        "user 0": {"gradients": 6, "examples": 48, "sent": 36, "received": 36},
        "user 1": {"gradients": 6, "examples": 60, "sent": 18, "received": 18},
        "user 2": {"gradients": 0, "examples": 0, "sent": 0, "received": 0},
        "user 3": {"gradients": 6, "examples": 60, "sent": 18, "received": 18},
    }
