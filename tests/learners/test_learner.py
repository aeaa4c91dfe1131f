"""A learner: the step it takes, what it counts, its state, and a restart from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.small_runs import network
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

import coterie
from coterie import Alone, BiasCorrection, RunSpec
from coterie.errors import KnobError, ModelError
from coterie.learners.learner import RuleLearner
from coterie.learners.stack import Steps
from coterie.recording.costs import Costs

Users = Callable[..., list[coterie.User]]


def learner_of(users: list[coterie.User], rule: coterie.Rule, **changed: Any) -> RuleLearner:
    settings: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.5, "batch_size": 4} | changed
    spec = RunSpec(network(), cross_entropy, users[0], users[1:], rule, **settings).prepared()
    return RuleLearner(spec, rule, spec.in_process(), Costs({user.name: 4 for user in users}))


def test_a_step_is_the_rule_the_optimizer_and_the_scheduler(make_users: Users) -> None:
    users = make_users()
    learner = learner_of(users, BiasCorrection(0.5, 0.1), scheduler=lambda sgd: StepLR(sgd, 1, 0.1))
    before, step = learner.x.clone(), learner.next_step()
    assert torch.equal(learner.x, before)  # nothing moves before it is taken
    assert step.own.isfinite().all()
    g = learner.gradients()
    direction, state = learner.rule(g, learner.state)
    step.write()
    Steps().take(learner.stacks)
    learner.advanced(1)
    assert torch.equal(learner.x, before - 0.5 * direction)
    assert torch.equal(learner.state["c"], state["c"])
    assert (learner.step, learner.weight) == (1, 0.5)
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    costs = learner.costs.by_user()
    assert costs["peer 1"].gradients == 2
    assert costs["peer 1"].numbers_received == 2 * learner.x.numel()


def test_a_state_goes_on_to_the_same_bits(make_users: Users) -> None:
    users = make_users()
    whole, part = (
        learner_of(users, BiasCorrection(0.5, 0.1), optimizer=torch.optim.Adam) for _ in range(2)
    )
    for _ in range(6):
        whole.take_step()
    for _ in range(3):
        part.take_step()
    resumed = learner_of(users, BiasCorrection(0.5, 0.1), optimizer=torch.optim.Adam)
    resumed.load_state_dict(part.state_dict())
    for _ in range(3):
        resumed.take_step()
    assert torch.equal(whole.x, resumed.x)


def test_a_restart_listens_to_nobody_for_a_while(make_users: Users) -> None:
    users = make_users()
    learner, shadow = learner_of(users, BiasCorrection(0.5, 0.1)), learner_of(users, Alone())
    for _ in range(3):
        learner.take_step()
        shadow.take_step()
    learner.restart_from(shadow, listens_from=5)
    for _ in range(2):
        learner.take_step()
        shadow.take_step()
        assert torch.equal(learner.x, shadow.x)
        assert learner.weight == 0.0
    learner.take_step()
    assert learner.weight == 0.5


def test_after_a_restart_peers_are_asked_at_the_same_steps_as_ever(make_users: Users) -> None:
    """One exchange for four steps, at 0, 4, 8, …: a restart at step 5 that listens from 6 on waits for step 8."""
    users = make_users()
    learner = learner_of(users, BiasCorrection(0.5, 0.1), exchange_every=4)
    shadow = learner_of(users, Alone())
    asked = []
    for step in range(12):
        if step == 5:
            learner.restart_from(shadow, listens_from=6)
        before = learner.costs.by_user()["peer 1"].gradients if step else 0
        learner.take_step()
        shadow.take_step()
        asked += [step] * (learner.costs.by_user()["peer 1"].gradients - before)
    assert asked == [0, 4, 8]


def test_a_spec_is_prepared_on_copies(make_users: Users) -> None:
    users, model = make_users(), network()
    spec = RunSpec(model, cross_entropy, users[0], users[1:], lr=0.1, steps=500)
    with pytest.raises(TypeError, match="call `prepared"):
        _ = spec.made_optimizer
    ready = spec.prepared()
    assert ready.model is not model
    assert isinstance(ready.made_optimizer, torch.optim.Adam)
    assert ready.made_optimizer.param_groups[0]["lr"] == 0.1
    assert (spec.every, RunSpec(model, cross_entropy, users[0], [], steps=7).every) == (10, 1)
    again = ready.prepared()  # whose optimizer is copied with its model
    assert {id(p) for p in again.model.parameters()} == {
        id(p) for p in again.made_optimizer.param_groups[0]["params"]
    }
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ModelError, match="parameters of another model"):
        RunSpec(model, cross_entropy, users[0], [], optimizer=sgd).prepared()
    with pytest.raises(KnobError, match="cannot be used here"):
        RunSpec(model, cross_entropy, users[0], [], device="cuda:99").prepared()
