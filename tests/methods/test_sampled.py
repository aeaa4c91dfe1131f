"""Client sampling: everybody is nobody sampled; otherwise absent peers are not asked and stay as they were."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT, ExactUsers
from tests.support.least_squares import (
    HELD_OUT,
    PROBLEM,
    START,
    N,
    last_of,
    same_models,
    weights_of,
)
from torch import Tensor

import coterie
from coterie import methods

PERSONAL: list[methods.Method] = [
    methods.Ditto(personal_steps=2),
    methods.APFL(2),
    methods.L2GD(3),
    methods.Mapper(2),
    methods.PFedMe(2),
    methods.FineTuning(1, methods.FedAvg(2)),
]
ONE_FOR_ALL: list[methods.Method] = [
    methods.FedAvg(2),
    methods.FedAvg(2, "equal"),
    methods.FedAvg(2, aggregator=lambda rows: rows.quantile(0.5, dim=0)),
    methods.FedProx(2),
    methods.AFL(2, weight_lr=0.1),
    methods.QFFL(2),
    methods.PerFedAvg(2),
    methods.Scaffold(2),
    methods.Scaffold(2, option=1),
    methods.Mime(2),
    methods.Mime(2, lite=True),
    methods.Selfish(2, ("user 2",)),
    methods.Selfish(2, alpha=0.4),
    methods.Waffle(9, 2),
]
OTHERS: list[methods.Method] = [
    methods.HypCluster(2, 2),
    methods.FedFomo(2),
    methods.FedFomo(2, "mine"),
    methods.UserCentric(2, blocks=2),
]
OTHERS += [methods.FedPer(2, head=["weight"]), methods.FedRep(1, 2, head=["weight"])]


def name_of(method: methods.Method) -> str:
    """Return a name that is the same in every process."""
    return type(method).__name__


@pytest.mark.parametrize("method", PERSONAL + ONE_FOR_ALL + OTHERS, ids=name_of)
def test_a_sample_of_all_is_no_sample_to_the_bit(method: methods.Method) -> None:
    whole, plain = (
        HELD_OUT.train(m, rounds=3, lr=0.05, batch_size=4)
        for m in (methods.Sampled(method, N - 1), method)
    )
    assert torch.equal(last_of(whole), last_of(plain))
    assert whole.record.end.costs == plain.record.end.costs


@pytest.mark.parametrize("method", ONE_FOR_ALL, ids=name_of)
def test_a_round_with_a_sample_is_a_round_of_those_alone(method: methods.Method) -> None:
    """From the start, where nothing is kept of the absent: as if user 0 had no other peers."""
    sampled = PROBLEM.train(methods.Sampled(method, peers=2), rounds=1, lr=0.05)
    asked = {name for name, cost in sampled.record.end.costs.items() if cost.gradients}
    assert len(asked) == 3
    assert "user 0" in asked
    me, *peers = (user for user in PROBLEM.users if user.name in asked)
    model = torch.nn.Linear(len(START), 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    if isinstance(method, methods.Selfish) and "user 2" not in asked:
        method = methods.Selfish(2, alpha=method.alpha)
    settings = {"lr": 0.05, "steps": 1, "batch_size": 10**6}
    alone = coterie.train(model, torch.nn.functional.mse_loss, me, peers, method, **settings)  # type: ignore[arg-type]
    assert torch.allclose(weights_of(sampled), weights_of(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", PERSONAL, ids=name_of)
def test_the_absent_keep_their_models_and_compute_nothing(method: methods.Method) -> None:
    before = PROBLEM.train(methods.Sampled(method, peers=1), rounds=2, lr=0.05)
    after = PROBLEM.train(methods.Sampled(method, peers=1), rounds=3, lr=0.05)
    given = {
        name: after.record.end.costs[name].gradients - cost.gradients
        for name, cost in before.record.end.costs.items()
    }
    assert sorted(bool(n) for n in given.values()) == [False] * (N - 2) + [True] * 2
    if isinstance(method, methods.APFL | methods.Mapper):
        return  # whose personal models have a part that all share
    for k, name in enumerate(given):
        assert torch.equal(last_of(before)[k], last_of(after)[k]) == (not given[name])


def test_scaffold_with_a_sample_against_a_plain_loop() -> None:
    """c moves by the sample's share of the users: c ← c + (S/N) mean over the sample of c_k⁺ − c_k."""
    x, c, c_k = START, START, [START] * N
    for t in range(4):
        asked = [int(k) for k in drawn(EXACT, 2 * t).nonzero().flatten()]
        ends = {k: PROBLEM.walk(k, x, 2, 0.1, add=c - c_k[k]) for k in asked}
        following = {k: c_k[k] - c + (x - end) / (2 * 0.1) for k, end in ends.items()}
        c = c + len(asked) / N * torch.stack([following[k] - c_k[k] for k in asked]).mean(0)
        for k in asked:
            c_k[k] = following[k]
        x = torch.stack(list(ends.values())).mean(0)
    run = PROBLEM.train(methods.Sampled(methods.Scaffold(2), peers=2), rounds=4, lr=0.1)
    assert same_models(run, [x] * N)


def test_peers_are_drawn_evenly_and_by_the_seed() -> None:
    present = torch.stack([drawn(EXACT, step) for step in range(600)]).double()
    assert (present[:, 0] == 1).all()
    assert (present.sum(1) == 3).all()
    expected = torch.full((N - 1,), 2 / 3).double()
    assert torch.allclose(present[:, 1:].mean(0), expected, rtol=0, atol=4 * (2 / 9 / 600) ** 0.5)

    class OtherSeed(ExactUsers):
        @property
        def seed(self) -> int:
            return 1

    other = OtherSeed(PROBLEM)
    assert any(not torch.equal(drawn(EXACT, step), drawn(other, step)) for step in range(9))


def drawn(users: ExactUsers, step: int) -> Tensor:
    """Return who takes part in a round with two peers."""
    with users.sample(2, step):
        assert users.present is not None
        return users.present
