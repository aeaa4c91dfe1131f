"""What all methods share: costs, batches, resuming, the models of a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.exact_users import ExactUsers
from tests.support.least_squares import HELD_OUT, PROBLEM, START, D, N, last_of, weights_of
from torch import Tensor, nn

import coterie
from coterie import methods
from coterie.errors import KnobError
from coterie.recording import Cost

METHODS: list[methods.Method] = [
    methods.APFL(3),
    methods.Ditto(together=methods.FedAvg(3), personal_steps=2),
    methods.FedAvg(3),
    methods.FineTuning(3, methods.FedAvg(2)),
    methods.HypCluster(2, 3),
    methods.L2GD(3),
    methods.Mapper(2),
    methods.PerFedAvg(2),
    methods.PerFedAvg(2, difference=1e-3),
    methods.Scaffold(3),
    methods.Scaffold(3, option=1),
    methods.Mime(3),
    methods.Mime(3, lite=True),
    methods.SVRG(3),
    methods.SAGA(3),
    methods.SAGA(3, biased=True),
    methods.MVR(3),
    methods.AffPCL(3),
    methods.FedALA(3, weight_steps=2),
    methods.FedAMP(3),
    methods.AuxMom(3),
    methods.AuxMVR(3),
    methods.FedFomo(3),
    methods.FedFomo(3, "mine"),
    methods.Waffle(9, 3),
    methods.UserCentric(3),
    methods.UserCentric(3, clusters=2, blocks=3),
    methods.Selfish(3, ("user 2",)),
    methods.FedProx(3),
    methods.AFL(2),
    methods.QFFL(2),
    methods.PFedMe(2, inner_steps=2),
    methods.Sampled(methods.Scaffold(2), peers=3),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_costs_are_counted_by_user(method: methods.Method) -> None:
    run = HELD_OUT.train(method, rounds=5, lr=0.05)
    costs = run.record.end.costs
    before = (
        method.blocks if isinstance(method, methods.UserCentric) else 0
    )  # of blocks that are all examples together
    assert costs["user 0"].gradients == before + 5 * method.gradients_a_round
    assert costs["user 1"].examples == 20 * (costs["user 1"].gradients - max(0, before - 1))
    assert costs["user 0"].numbers_received == sum(
        costs[f"user {k}"].numbers_sent for k in range(1, N)
    )
    assert costs["user 0"].numbers_sent == sum(
        costs[f"user {k}"].numbers_received for k in range(1, N)
    )


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    method: methods.Method, tmp_path: Path
) -> None:
    def train(out: Path, **more: Any) -> coterie.Run:
        how: dict[str, Any] = {"evaluate_every": 3, "guard": "auto", "out": out} | more
        return HELD_OUT.train(method, rounds=9, lr=0.05, batch_size=4, **how)

    train(tmp_path / "a", hooks=[lambda step: step.step == 4])
    resumed, whole = train(tmp_path / "a", resume=True), train(tmp_path / "b")
    assert torch.equal(last_of(resumed), last_of(whole))
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.record.points[-1] == whole.record.points[-1]
    assert resumed.record.end.costs == whole.record.end.costs


def test_batches_of_a_method_are_those_of_the_users() -> None:
    """One round of one local step is user k's gradient on the batch of step 0."""
    run = PROBLEM.train(methods.FedAvg(1, "equal"), rounds=1, lr=1.0, batch_size=4)
    rows = [PROBLEM.gradient(k, START, step=0, batch_size=4) for k in range(N)]
    assert torch.allclose(weights_of(run), -torch.stack(rows).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        methods.APFL(3),
        methods.Ditto(together=methods.FedAvg(3), personal_steps=2),
        methods.FineTuning(2, methods.FedAvg(3)),
        methods.HypCluster(2, 3),
        methods.L2GD(3),
        methods.Mapper(2),
        methods.PerFedAvg(2),
        methods.PerFedAvg(2, difference=0.1),
        methods.FedProx(2),
        methods.AFL(2),
        methods.AffPCL(2),
        methods.FedALA(2, weight_steps=2),
        methods.FedAMP(2),
        methods.AuxMom(2),
        methods.AuxMVR(2),
        methods.PFedMe(2, inner_steps=2),
    ],
    ids=repr,
)
def test_a_round_draws_the_batches_it_counts(method: methods.Method) -> None:
    drawn: list[int] = []

    class Listening(ExactUsers):
        def gradients(self, points: Tensor, step: int) -> Tensor:
            drawn.append(step)
            return super().gradients(points, step)

        def losses(self, points: Tensor, step: int) -> Tensor:
            drawn.append(step)
            return super().losses(points, step)

    users = Listening(PROBLEM)
    state = method.init(users, START)
    for _ in range(4):
        before, drawn[:] = state["step"], []
        state = method.round(users, state, 0.1)
        assert set(drawn) == set(range(before, state["step"]))


def test_a_peer_whose_gradient_is_not_finite_takes_no_step_and_is_counted() -> None:
    bad = coterie.User(
        "bad", torch.full((4, D), torch.inf, dtype=torch.float64), torch.zeros(4, 1).double()
    )
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    run = coterie.train(
        model, nn.functional.mse_loss, me, [*peers, bad], methods.FedAvg(2), lr=0.05, steps=3
    )
    assert run.record.end.left_out == {"bad": {"not finite": 3}}
    assert torch.isfinite(weights_of(run)).all()


def test_every_user_has_a_model_and_one_model_for_all_is_everybodys() -> None:
    run = PROBLEM.train(methods.FedAvg(2), rounds=3, lr=0.05)
    assert set(run.models) == {user.name for user in PROBLEM.users}
    for model in run.models.values():
        assert torch.equal(next(iter(model.parameters())).flatten(), weights_of(run))


def test_what_a_method_cannot_use_is_refused() -> None:
    me, *peers = PROBLEM.users
    model, loss = nn.Linear(D, 1, bias=False).double(), nn.functional.mse_loss
    with pytest.raises(KnobError, match="plain gradient steps"):
        coterie.train(model, loss, me, peers, methods.FedAvg(), optimizer=torch.optim.Adam)
    with pytest.raises(KnobError, match="no validation examples"):
        coterie.train(model, loss, me, peers, methods.FedAvg(), guard="held-out")
    with pytest.raises(KnobError, match="`norm_bound` is for gradients that a rule"):
        coterie.train(model, loss, me, peers, methods.FedAvg(), norm_bound=2.0)
    with pytest.raises(KnobError, match="local_steps"):
        methods.FedAvg(0)


def test_a_scheduler_changes_the_step_size_from_round_to_round() -> None:
    """And torch does not warn that it was called before the optimizer, as warnings are errors here."""
    half = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    run, x = PROBLEM.train(methods.FedAvg(2, "equal"), rounds=3, lr=0.2, scheduler=half), START
    for lr in (0.2, 0.1, 0.05):
        x = torch.stack([PROBLEM.walk(k, x, 2, lr) for k in range(N)]).mean(0)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)


def test_rules_count_what_they_cost_too() -> None:
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    rule = coterie.WeightedAveraging(0.5, {"user 1": 0.5, "user 3": 0.5})
    run = coterie.train(model, nn.functional.mse_loss, me, peers, rule, steps=6, batch_size=10)
    assert run.record.end.costs == {
        "user 0": Cost(gradients=6, examples=48, numbers_sent=36, numbers_received=36),
        "user 1": Cost(gradients=6, examples=60, numbers_sent=18, numbers_received=18),
        "user 2": Cost(),
        "user 3": Cost(gradients=6, examples=60, numbers_sent=18, numbers_received=18),
    }
