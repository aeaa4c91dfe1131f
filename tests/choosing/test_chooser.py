"""A chooser is no rule: it returns one, and returns the same one from its account."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie import User
from coterie.choosing import Chooser, RuleChoice, chooser_for
from coterie.errors import KnobError
from coterie.learners.spec import RunSpec

CHOOSERS: dict[str, Callable[[], Any]] = {
    "alpha of WGA": lambda: coterie.WeightedAveraging("auto"),
    "alpha of WGA with tau": lambda: coterie.WeightedAveraging("auto", {"b": 1.0}),
    "alpha of WGA with an aggregator": lambda: coterie.WeightedAveraging(
        "auto", aggregator=coterie.aggregators.CoordinateMedian()
    ),
    "both of BC": lambda: coterie.BiasCorrection("auto", "auto"),
    "beta of BC": lambda: coterie.BiasCorrection(lambda step: 0.5, "auto", correction=0.9),
    "alpha of BC": lambda: coterie.BiasCorrection("auto", 0.1, warm_up=False),
}


def spec() -> RunSpec:
    torch.manual_seed(0)
    inputs = torch.randn(90, 3)
    targets = inputs.sum(1, keepdim=True) + 0.3 * torch.randn(90, 1)
    me = User("me", inputs[:12], targets[:12])
    peers = (User("a", inputs[12:50], targets[12:50]), User("b", inputs[50:], targets[50:]))
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return RunSpec(model, mse_loss, me, peers, optimizer=sgd, steps=30, batch_size=8)


def engine_of(problem: RunSpec) -> coterie.InProcess:
    return coterie.InProcess(problem.model, problem.loss, problem.me, problem.peers, batch_size=8)


@pytest.mark.parametrize("make", CHOOSERS.values(), ids=CHOOSERS)
def test_a_choice_is_a_rule_that_its_account_gives_again(make: Callable[[], Any]) -> None:
    run, asked = spec(), make()
    before = [p.detach().clone() for p in run.model.parameters()]
    chooser = chooser_for(asked)
    assert isinstance(chooser, Chooser)
    assert not isinstance(chooser, coterie.Rule)
    choice = chooser.choose(run, engine_of(run))
    assert isinstance(choice, RuleChoice)
    assert isinstance(choice.rule, coterie.Rule)
    assert chooser_for(choice.rule) is None
    assert chooser.rule_from(json.loads(json.dumps(choice.account))) == choice.rule
    kept = len(choice.account["tau"])
    assert f"for {kept} peer{'s' if kept > 1 else ''} by the theory" in choice.account["sentence"]
    assert choice.estimates is not None
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))


def test_a_chosen_rule_serves_in_a_loop_of_ones_own() -> None:
    run = spec()
    engine, chooser = engine_of(run), chooser_for(coterie.WeightedAveraging("auto"))
    assert chooser is not None
    rule, x = chooser.choose(run, engine).rule, torch.zeros(4)
    state = rule.init(x)
    for step in range(run.steps):
        g = engine.gradients(x, step, rule.weights(engine.names), rows=rule.needs_rows)
        direction, state = rule(g, state)
        x = x - 0.05 * direction
    assert float(engine.gradients(x, 0, {}).own_loss) < float(
        engine.gradients(torch.zeros(4), 0, {}).own_loss
    )
    with pytest.raises(KnobError, match=r"chooser_for\(rule\).choose\(spec, engine\).rule"):
        coterie.WeightedAveraging("auto")(g, state)


@pytest.mark.parametrize(
    "rule", [coterie.Alone(), coterie.WeightedAveraging(0.3), coterie.BiasCorrection(0.3, 0.1)]
)
def test_a_rule_with_its_knobs_set_needs_no_chooser(rule: coterie.Rule) -> None:
    assert chooser_for(rule) is None


class HalfOfThePeers:
    """A chooser of a user's own."""

    def choose(self, spec: Any, engine: coterie.Engine, progress: bool | None = None) -> RuleChoice:
        account = {"first": engine.names[0], "sentence": "the first peer"}
        return RuleChoice(self.rule_from(account), account)

    def rule_from(self, account: Any) -> coterie.Rule:
        return coterie.WeightedAveraging(0.5, {account["first"]: 1.0})


def test_a_chooser_of_ones_own_is_used_by_train() -> None:
    run = spec()
    trained = coterie.train(
        run.model, run.loss, run.me, run.peers, HalfOfThePeers(), steps=4, lr=0.1
    )
    assert trained.record.end.tau == {"a": 1.0}
    assert "the first peer" in trained.summary()
