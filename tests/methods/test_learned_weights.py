"""What methods and rules that learn weights share: copies and strangers, and weights in the record."""

from __future__ import annotations

import pytest
import torch
from tests.support.least_squares import COPIES_AND_STRANGERS, HELD_OUT, PROBLEM, START, D, N

import coterie
from coterie.methods import (
    FedFomo,
    Method,
    MirrorDescent,
    Selfish,
    UserCentric,
    Waffle,
    WeightErosion,
)
from coterie.rules import weights_in


def test_mirror_descent_climbs_what_automatic_differentiation_says() -> None:
    """MeritFed's direction: the derivative by w of user 0's loss after the step, but for the scale."""
    rule, x = MirrorDescent(0.5), START
    rows = torch.stack([PROBLEM.gradient(k, x) for k in range(N)])
    names = tuple(user.name for user in PROBLEM.users[1:])
    direction, state = rule(coterie.Gradients(rows[0], rows=rows[1:], names=names), rule.init(x))
    before, x = state["tau"], x - 0.1 * direction
    following = torch.stack([PROBLEM.gradient(k, x) for k in range(N)])
    _, state = rule(coterie.Gradients(following[0], rows=following[1:], names=names), state)

    w = torch.full((N,), 1 / N, dtype=torch.float64, requires_grad=True)
    away = START - 0.1 * w @ rows - PROBLEM.optima[0]
    (slope,) = torch.autograd.grad(0.5 * away @ PROBLEM.curvatures[0] @ away, w)
    scale = 0.1 * float(following[0].norm() * rows.norm(dim=1).max())
    expected = before * torch.exp(-0.5 * slope / scale)
    assert state["names"] == ["", *names]
    assert state["tau"].tolist() == pytest.approx((expected / expected.sum()).tolist())


@pytest.mark.parametrize("rule", [MirrorDescent(0.5), WeightErosion(0.02)], ids=repr)
def test_rules_of_this_family_tell_copies_from_strangers(rule: coterie.Rule) -> None:
    me, *peers = COPIES_AND_STRANGERS.users
    model = torch.nn.Linear(D, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    settings = {
        "optimizer": torch.optim.SGD,
        "lr": 0.05,
        "steps": 30,
        "batch_size": 10,
        "guard": "off",
    }
    run = coterie.train(model, torch.nn.functional.mse_loss, me, peers, rule, **settings)  # type: ignore[arg-type]
    tau = weights_in(run.state)
    assert min(tau["user 1"], tau["user 3"]) > 2 * max(tau["user 2"], tau["user 4"])


@pytest.mark.parametrize("method", [FedFomo(2), Waffle(5, 2), UserCentric(2), Selfish(2)], ids=repr)
def test_the_record_has_the_peers_weight_and_each_ones_share(method: Method) -> None:
    run = HELD_OUT.train(method, rounds=3, lr=0.02)
    shares = run.state["weights"][1:] / run.state["weights"][1:].sum()
    assert run.record.end.tau == pytest.approx(
        dict(zip(("user 1", "user 2", "user 3"), shares.tolist(), strict=False))
    )
    assert (
        run.record.points[-1].weight
        == run.state["weight"]
        == pytest.approx(float(run.state["weights"][1:].sum()))
    )
