"""Adaptive averaging on planted problems, where who is alike is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.linear_users import TRUTH, D, alike, user
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie import AdaptiveAveraging, User
from coterie.choosing.adaptive import PLANS, plan_for
from coterie.engines import Capabilities
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.recording.traffic import Traffic

SETTINGS: dict[str, Any] = {"lr": 0.1, "steps": 60, "batch_size": 100, "progress": False}


def adaptive(me: User, peers: Sequence[User], rule: AdaptiveAveraging | None = None, **changed: Any) -> coterie.Run:
    torch.manual_seed(0)
    rule = rule or AdaptiveAveraging(budget=60)
    return coterie.train(nn.Linear(D, 1), mse_loss, me, peers, rule, **(SETTINGS | changed))


def choice(run: coterie.Run) -> Mapping[str, Any]:
    return run.record.configuration.choice


def distance(run: coterie.Run, truth: Tensor = TRUTH) -> float:
    return float((Parameters(run.model).vector()[:D] - truth).norm())


def test_users_alike_share_the_weight_and_help() -> None:
    me, peers = user("me", 10, TRUTH), alike(4)
    run = adaptive(me, peers)
    found = choice(run)
    assert found["alpha"] >= 0.6
    assert max(found["tau"].values()) < 0.5
    alone = coterie.train(nn.Linear(D, 1), mse_loss, me, peers, coterie.Alone(), **SETTINGS)
    assert distance(run) < 0.5 * distance(alone)


def test_copies_share_equally() -> None:
    """Peers with the very same examples have one gradient, and a Gram matrix cannot tell them apart."""
    me, (first, *_) = user("me", 10, TRUTH), alike(1)
    copies = [User(f"copy {k}", *first.examples.take(torch.arange(len(first)))) for k in range(5)]
    found = choice(adaptive(me, copies))
    assert found["alpha"] >= 0.6
    assert list(found["tau"].values()) == pytest.approx([0.2] * 5, abs=1e-3)


def test_strangers_are_left_alone() -> None:
    me = user("me", 30, TRUTH, noise=0.1)
    strangers = [
        user(f"stranger {k}", 60, 3 * torch.randn(D, generator=torch.Generator().manual_seed(k))) for k in range(5)
    ]
    run = adaptive(me, strangers, steps=100)
    alone = coterie.train(nn.Linear(D, 1), mse_loss, me, strangers, coterie.Alone(), **(SETTINGS | {"steps": 100}))
    assert choice(run)["alpha"] <= 0.1
    assert distance(run) < distance(alone) + 0.1


def test_those_who_mislead_get_nothing() -> None:
    me = user("me", 15, TRUTH)
    peers = [*alike(4), *(user(f"contrary {k}", 60, -TRUTH) for k in range(4))]
    run = adaptive(me, peers)
    found = choice(run)
    assert found["alpha"] >= 0.3
    assert sum(found["tau"].get(f"contrary {k}", 0.0) for k in range(4)) < 0.02
    verdict = run.summary().splitlines()[-1]
    assert verdict.startswith("collaboration helped: peers weigh")
    assert "left out: contrary 0, contrary 1" in verdict


def test_noise_is_not_taken_for_bias() -> None:
    """Peers alike with batches of two are noisy, but none of them is biased: equal weights, and a large α."""
    found = choice(adaptive(user("me", 10, TRUTH), alike(4), batch_size=2, steps=200, lr=0.02))
    assert found["alpha"] >= 0.6
    assert np.ptp(list(found["tau"].values())) < 0.25


def test_small_networks_and_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(3, D, generator=generator)

    def writer(name: str, n: int, shift: int = 0) -> User:
        targets = torch.arange(n) % 3
        return User(name, centres[targets] + torch.randn(n, D, generator=generator), (targets + shift) % 3)

    me, peers = writer("me", 9), [writer("good", 60), writer("bad", 60, shift=1), writer("fine", 60)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 3))
    found = choice(coterie.train(model, cross_entropy, me, peers, AdaptiveAveraging(budget=60), **SETTINGS))
    assert found["alpha"] >= 0.3
    assert found["tau"].get("bad", 0.0) < 0.05
    assert found["runs"] == "one program"


def test_the_account_is_complete_and_chooses_the_least_loss() -> None:
    me, peers = user("me", 10, TRUTH), alike(3)
    found = choice(adaptive(me, peers))
    losses = [candidate["loss"] for candidate in found["candidates"]]
    chosen = found["candidates"][int(np.argmin(losses))]
    assert (chosen["alpha"], found["cost"], len(losses)) == (found["alpha"], 60, 11)
    first = found["candidates"][0]
    assert (first["alpha"], first["difference"], first["error"]) == (0.0, 0.0, 0.0)
    assert all(candidate["error"] > 0 for candidate in found["candidates"][1:])
    kappa = np.array([found["own_weight"], *found["weights"].values()])
    assert list(found["weights"]) == [peer.name for peer in peers]
    np.testing.assert_allclose(kappa.sum(0), 1)
    assert found["steps"] == list(range(0, 60, 5))
    assert found["regime"].startswith("finite own data")
    json.dumps(found)


def test_a_choice_is_the_training_that_follows() -> None:
    me, peers = user("me", 10, TRUTH), alike(3)
    run = adaptive(me, peers)
    found = choice(run)
    torch.manual_seed(0)
    rule = coterie.WeightedAveraging(found["alpha"], found["tau"])
    same = coterie.train(nn.Linear(D, 1), mse_loss, me, peers, rule, **SETTINGS)
    assert torch.equal(Parameters(run.model).vector(), Parameters(same.model).vector())
    assert found["sentence"] in run.summary()


def test_with_a_validation_set_candidates_count_at_their_best() -> None:
    """What `train` then serves is the best model by validation: to overfit later does no harm."""
    nothing = torch.zeros(D)
    held_out = user("held out", 40, nothing).examples.take(torch.arange(40))
    with_set, without = user("me", 8, nothing, validation=held_out), user("me", 8, nothing)
    at_best, at_end = (choice(adaptive(each, alike(2), steps=100))["candidates"] for each in (with_set, without))
    assert all(b["loss"] <= e["loss"] for b, e in zip(at_best, at_end, strict=True))
    assert at_best[0]["loss"] < at_end[0]["loss"]


def test_the_same_seed_gives_the_same_choice_and_bits() -> None:
    me, peers = user("me", 10, TRUTH), alike(3)
    first, second, other = (adaptive(me, peers, seed=seed, steps=30) for seed in (0, 0, 1))
    assert choice(first) == choice(second) != choice(other)
    assert torch.equal(Parameters(first.model).vector(), Parameters(second.model).vector())


def test_resuming_keeps_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me, peers, rule = user("me", 10, TRUTH), alike(3), AdaptiveAveraging(budget=8)
    whole = adaptive(me, peers, rule)
    adaptive(me, peers, rule, out=tmp_path / "run", checkpoint_every=10, hooks=[lambda step: step.step == 25])

    def refuse(*_: object) -> None:
        raise AssertionError("the choice was made again")

    monkeypatch.setattr(AdaptiveAveraging, "choose", refuse)
    resumed = adaptive(me, peers, rule, out=tmp_path / "run", resume=True)
    assert choice(resumed) == choice(whole)
    assert torch.equal(Parameters(resumed.model).vector(), Parameters(whole.model).vector())
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.unlink()  # killed before the first checkpoint: the record has the choice
    again = adaptive(me, peers, rule, out=tmp_path / "run", resume=True)
    assert torch.equal(Parameters(again.model).vector(), Parameters(whole.model).vector())
    with pytest.raises(KnobError, match="already holds a run"):
        adaptive(me, peers, rule, out=tmp_path / "run")
    with pytest.raises(AssertionError, match="made again"):  # another seed is another choice
        adaptive(me, peers, rule, out=tmp_path / "run", resume=True, seed=5)


def test_a_peer_that_is_not_finite_is_left_out() -> None:
    broken = User("broken", torch.full((20, D), torch.inf), torch.zeros(20, 1))
    run = adaptive(user("me", 10, TRUTH), [*alike(2), broken], AdaptiveAveraging(budget=8))
    found = choice(run)
    assert found["left_out"] == {"broken": "not finite"}
    assert "broken" not in found["tau"]
    only = choice(adaptive(user("me", 10, TRUTH), [broken], AdaptiveAveraging(budget=8)))
    assert only["alpha"] == 0.0
    assert "no peer's gradient is finite" in only["sentence"]


def test_with_one_own_example_there_is_nothing_to_choose_by() -> None:
    me = User("me", torch.zeros(1, D), torch.zeros(1, 1))
    assert "one own example" in choice(adaptive(me, alike(2)))["sentence"]


def test_runs_that_diverge_are_no_candidates() -> None:
    """With a step size that only small weights survive, the choice is still finite."""
    huge = User("huge", 100 * torch.randn(20, D, generator=torch.Generator().manual_seed(0)), torch.zeros(20, 1))
    me = user("me", 12, TRUTH)
    run = adaptive(me, [huge], AdaptiveAveraging(budget=60), optimizer=torch.optim.SGD, lr=0.05, steps=200)
    assert choice(run)["alpha"] == 0.0
    assert any(candidate["loss"] == float("inf") for candidate in choice(run)["candidates"])
    assert bool(Parameters(run.model).vector().isfinite().all())


def test_models_that_allow_no_batching_are_chosen_for_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    me, peers = user("me", 12, TRUTH), [*alike(2), user("contrary", 60, -TRUTH)]
    before = [buffer.clone() for buffer in model.buffers()]
    found = choice(coterie.train(model, mse_loss, me, peers, AdaptiveAveraging(budget=8), **SETTINGS))
    assert "buffers" in found["runs"]
    assert found["tau"].get("contrary", 0.0) < 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_budgets() -> None:
    assert [plan.cost for plan in PLANS] == [60, 32, 18, 8, 6]
    for budget in (6, 7, 17, 31, 59, 1000):
        assert plan_for(budget, 1, 1000).cost <= budget
    assert plan_for(None, 10**8, 30).cost == 8
    assert plan_for(None, 100, 3).folds == 3


def test_wrong_uses_are_named() -> None:
    with pytest.raises(KnobError, match="`budget` must be at least 6 runs, got 2"):
        AdaptiveAveraging(budget=2)
    assert not isinstance(AdaptiveAveraging(), coterie.Rule)  # it has no member that only raises
    with pytest.raises(KnobError, match="no peers"):
        adaptive(user("me", 10, TRUTH), [])

    class Elsewhere:
        names, capabilities = ("a",), Capabilities(rows=False)

        def gradients(self, *_: object) -> coterie.Gradients:
            raise AssertionError

        def traffic(self) -> dict[str, Traffic]:
            return {}

        def close(self) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {}

    with pytest.raises(KnobError, match="pass no `engine`"):
        adaptive(user("me", 10, TRUTH), alike(1), engine=Elsewhere())
