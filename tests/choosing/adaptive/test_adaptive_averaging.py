"""Adaptive averaging on planted problems, where who is alike is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.linear_users import TRUTH, D, alike, user
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie import AdaptiveAveraging, User
from coterie.engines import Capabilities
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.mixture.served import MixedPredictions
from coterie.recording.costs import Traffic

SETTINGS: dict[str, Any] = {"lr": 0.1, "steps": 60, "batch_size": 100, "progress": False}


def adaptive(
    me: User, peers: Sequence[User], rule: AdaptiveAveraging | None = None, **changed: Any
) -> coterie.Run:
    torch.manual_seed(0)
    rule = AdaptiveAveraging(linear=False) if rule is None else rule
    return coterie.train(nn.Linear(D, 1), mse_loss, me, peers, rule, **(SETTINGS | changed))


def alone(me: User, peers: Sequence[User], **changed: Any) -> coterie.Run:
    torch.manual_seed(0)
    return coterie.train(
        nn.Linear(D, 1), mse_loss, me, peers, coterie.Alone(), **(SETTINGS | changed)
    )


def account(run: coterie.Run) -> Mapping[str, Any]:
    return run.record.end.account


def weight(run: coterie.Run, *kinds: str) -> float:
    """Return the share that kinds of candidates have of what is served."""
    return float(sum(account(run)["leaderboard"][kind]["weight"] for kind in kinds))


def distance(run: coterie.Run, truth: Tensor = TRUTH) -> float:
    return float((Parameters(run.model).vector()[:D] - truth).norm())


def test_users_alike_share_the_weight_and_help() -> None:
    me, peers = user("me", 10, TRUTH), alike(4)
    run = adaptive(me, peers)
    assert weight(run, "alone", "constant") < 0.5
    assert max(account(run)["tau"].values()) < 0.75
    assert distance(run) < 0.5 * distance(alone(me, peers))


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_the_scale_of_the_targets_changes_nothing(scale: float) -> None:
    """From zero, plain steps on squares follow a power of 2 that scales the targets, to the last bit."""

    def trained(scale: float) -> coterie.Run:
        me, *peers = [
            User(each.name, inputs, scale * targets) for each, (inputs, targets) in everyone
        ]
        model = nn.Linear(D, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        return coterie.train(
            model, mse_loss, me, peers, optimizer=sgd, steps=40, batch_size=8, progress=False
        )

    everyone = [
        (each, each.examples.take(torch.arange(len(each))))
        for each in (user("me", 12, TRUTH), *alike(3))
    ]
    plain, scaled = trained(1.0), trained(scale)
    assert weight(plain, "alone") < 0.5
    for kind in account(plain)["leaderboard"]:
        assert weight(scaled, kind) == pytest.approx(weight(plain, kind), rel=1e-9)
    assert account(scaled)["tau"] == pytest.approx(account(plain)["tau"], rel=1e-9)
    torch.testing.assert_close(
        Parameters(scaled.model).vector(), scale * Parameters(plain.model).vector()
    )


def test_copies_share_equally() -> None:
    """Peers with the very same examples have one gradient, and a Gram matrix cannot tell them apart."""
    me, (first, *_) = user("me", 10, TRUTH), alike(1)
    copies = [User(f"copy {k}", *first.examples.take(torch.arange(len(first)))) for k in range(5)]
    run = adaptive(me, copies)
    assert list(account(run)["tau"].values()) == pytest.approx([0.2] * 5, abs=1e-3)


def test_strangers_are_left_alone() -> None:
    me = user("me", 30, TRUTH, noise=0.1)
    strangers = [
        user(f"stranger {k}", 60, 3 * torch.randn(D, generator=torch.Generator().manual_seed(k)))
        for k in range(5)
    ]
    run = adaptive(me, strangers, steps=100)
    assert distance(run) < distance(alone(me, strangers, steps=100)) + 0.1


def test_those_who_mislead_get_nothing() -> None:
    me = user("me", 15, TRUTH)
    peers = [*alike(4), *(user(f"contrary {k}", 60, -TRUTH) for k in range(4))]
    run = adaptive(me, peers)
    assert weight(run, "branch") > 0.5
    kappa = account(run)["weights"]
    assert sum(kappa[f"contrary {k}"][-1] for k in range(4)) < 0.02
    assert distance(run) < distance(alone(me, peers))


def test_noise_is_not_taken_for_bias() -> None:
    """Peers alike with batches of two are noisy, but none of them is biased: about equal weights."""
    run = adaptive(user("me", 10, TRUTH), alike(4), batch_size=2, steps=200, lr=0.02)
    assert np.ptp(list(account(run)["tau"].values())) < 0.25


def test_small_networks_and_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(3, D, generator=generator)

    def writer(name: str, n: int, shift: int = 0) -> User:
        targets = torch.arange(n) % 3
        return User(
            name, centres[targets] + torch.randn(n, D, generator=generator), (targets + shift) % 3
        )

    me, peers = (
        writer("me", 9),
        [writer("good", 60), writer("bad", 60, shift=1), writer("fine", 60)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 3))
    run = coterie.train(model, cross_entropy, me, peers, **SETTINGS)
    weights = {kind: one["weight"] for kind, one in account(run)["leaderboard"].items()}
    assert max(weights, key=lambda kind: (kind != "served") * weights[kind]) == "branch"
    alone = ("constant", "alone", "alone, closed form", "alone, last layer")
    assert sum(weights[kind] for kind in alone) < 0.2  # half of the prior
    assert account(run)["weights"]["bad"][-1] < 0.05
    assert isinstance(run.model, MixedPredictions)


def test_the_account_is_complete_and_plain() -> None:
    me, peers = user("me", 10, TRUTH), alike(3)
    run = adaptive(me, peers)
    told = account(run)
    kappa = np.array([told["nobody"], *told["weights"].values()])
    assert list(told["weights"]) == [peer.name for peer in peers]
    np.testing.assert_allclose(kappa.sum(0), 1)
    assert told["steps"] == list(range(0, 30, 2))
    assert told["cost"] == {"runs": 3.0, "rows": 15 * 4, "exchanges": 0, "messages": 0, "bytes": 0}
    assert set(told["leaderboard"]) == {
        *("served", "constant", "alone", "branch", "branch from pooled", "pooled")
    }
    weights = {kind: one["weight"] for kind, one in told["leaderboard"].items()}
    assert weights.pop("served") == 1
    assert sum(weights.values()) == pytest.approx(1)
    assert told["out_of_fold"] == told["leaderboard"]["served"]["loss"]
    assert json.loads(json.dumps(told)) == told
    asked = run.record.end.costs["alike 0"]
    assert 60 * 2 < asked.gradients <= 60 * 3  # it is not asked where it has no weight
    assert asked.numbers_sent == asked.gradients * (D + 1)


def test_validation_examples_are_evidence() -> None:
    """Own examples that say little, and many that say that peers are strangers."""
    nothing = torch.zeros(D)
    held_out = user("held out", 200, nothing).examples.take(torch.arange(200))
    strangers = [user(f"stranger {k}", 60, 3 * TRUTH) for k in range(3)]
    run = adaptive(user("me", 8, nothing, validation=held_out), strangers)
    assert run.record.end.guard is None
    assert weight(run, "alone", "constant") > 0.99
    assert distance(run, nothing) < 0.5
    good = [user(f"like {k}", 60, nothing) for k in range(3)]
    assert weight(adaptive(user("me", 8, nothing, validation=held_out), good), "alone") < 0.5


def test_the_same_seed_gives_the_same_account_and_bits() -> None:
    me, peers = user("me", 10, TRUTH), alike(3)
    first, second, other = (adaptive(me, peers, seed=seed, steps=30) for seed in (0, 0, 1))
    assert account(first) == account(second) != account(other)
    assert torch.equal(Parameters(first.model).vector(), Parameters(second.model).vector())


def test_a_peer_that_is_not_finite_is_left_out() -> None:
    broken = User("broken", torch.full((20, D), torch.inf), torch.zeros(20, 1))
    run = adaptive(user("me", 10, TRUTH), [*alike(2), broken])
    assert run.record.end.left_out == {"broken": {"not finite": 30}}
    half = User(
        "infinite",
        torch.tensor([[torch.inf, 1.0, *[1.0] * (D - 2)]]).repeat(20, 1),
        torch.zeros(20, 1),
    )
    assert set(
        adaptive(user("me", 10, TRUTH), [*alike(2), half]).record.end.left_out["infinite"]
    ) == {"not finite"}
    assert "broken" not in account(run)["tau"]
    assert bool(Parameters(run.model).vector().isfinite().all())
    only = adaptive(user("me", 10, TRUTH), [broken])
    assert set(account(only)["leaderboard"]) == {"served", "constant", "alone"}
    assert only.record.end.tau == {}


def test_with_one_own_example_there_is_nothing_to_judge_by() -> None:
    me = User("me", torch.zeros(1, D), torch.zeros(1, 1))
    asked = adaptive(me, alike(2)).record.configuration
    assert "one own example" in asked.choice["sentence"]
    assert asked.guard == "off"


@pytest.mark.parametrize("own", [2, 3, 5])
def test_few_own_examples_are_enough(own: int) -> None:
    run = adaptive(user("me", own, TRUTH), alike(3))
    assert account(run)["folds"] == 2
    assert distance(run) < 1.0


def test_paths_that_diverge_are_not_served() -> None:
    """With a step size that only the own examples survive, what is served is still finite."""
    huge = User(
        "huge",
        100 * torch.randn(20, D, generator=torch.Generator().manual_seed(0)),
        torch.zeros(20, 1),
    )
    run = adaptive(user("me", 12, TRUTH), [huge], optimizer=torch.optim.SGD, lr=0.05, steps=200)
    assert weight(run, "alone", "constant") > 0.9
    assert bool(Parameters(run.model).vector().isfinite().all())


@pytest.mark.parametrize("kind", ["related", "strangers"])
def test_what_is_told_is_what_a_fresh_test_gives(kind: str) -> None:
    """Noise of variance 1: no honest loss is far below the loss on fresh examples, within two standard errors."""
    told, fresh = [], []
    for repetition in range(12):
        generator = torch.Generator().manual_seed(repetition)
        truth = torch.randn(D, generator=generator)

        def one(name: str, n: int, w: Tensor, generator: torch.Generator = generator) -> User:
            x = torch.randn(n, D, generator=generator)
            return User(name, x, (x @ w + torch.randn(n, generator=generator))[:, None])

        apart = 0.3 if kind == "related" else 3.0
        me = one("me", 24, truth)
        peers = [
            one(f"{k}", 50, truth + apart * torch.randn(D, generator=generator)) for k in range(8)
        ]
        test = one("test", 2000, truth)
        run = adaptive(me, peers, steps=80, lr=0.05, measure=False)
        told.append(account(run)["out_of_fold"])
        fresh.append(float(coterie.evaluation.evaluate(run.model, mse_loss, test.examples)["loss"]))
    gap = np.array(told) - np.array(fresh)
    assert gap.mean() > -2 * gap.std(ddof=1) / np.sqrt(len(gap))


def test_wrong_uses_are_named() -> None:
    with pytest.raises(KnobError, match="`rates` must be"):
        AdaptiveAveraging(rates=(1.0, math.inf))
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

    with pytest.raises(KnobError, match="let the peers give rows"):
        adaptive(user("me", 10, TRUTH), alike(1), engine=Elsewhere())


def test_what_it_will_cost_is_told_before(capsys: pytest.CaptureFixture[str]) -> None:
    users = [coterie.User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
    spec = coterie.RunSpec(
        torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, users[0], users[1:], steps=50
    )
    before = [p.clone() for p in spec.model.parameters()]
    expected = coterie.AdaptiveAveraging().expected_cost(spec)
    # three step sizes by two weight decays
    assert (expected.runs, expected.own_runs) == (3.0, 6 * 5 * 1.5)
    assert "3 runs of the peers' gradients" in str(expected)
    few, one = (
        replace(spec, me=coterie.User("me", torch.randn(n, 2), torch.randn(n, 1))) for n in (5, 1)
    )
    assert coterie.AdaptiveAveraging().expected_cost(few).runs == 2.0  # two folds
    assert coterie.AdaptiveAveraging().expected_cost(one).runs == 0  # nothing to judge by: Alone
    draws = coterie.User.stream(
        "me", lambda size, seed, step: (torch.randn(size, 2), torch.randn(size, 1))
    )
    stream = coterie.AdaptiveAveraging().expected_cost(replace(spec, me=draws))
    assert (stream.runs, stream.seconds) == (1, stream.averaging_seconds)
    assert all(torch.equal(a, b) for a, b in zip(before, spec.model.parameters(), strict=True))
    how: dict[str, Any] = {"steps": 2, "progress": True}
    for rule, told in ((None, "3 times"), (coterie.Alone(), "")):
        coterie.train(spec.model, spec.loss, users[0], users[1:], rule, **how)
        shown = capsys.readouterr().err
        assert told in shown
        assert ("adaptive averaging asks the peers" in shown) is bool(told)


def test_gradients_asked_are_those_expected() -> None:
    """The estimate of runs, against the gradients that the record counts."""
    users = [
        coterie.User(name, torch.randn(30, 2), torch.randn(30, 1)) for name in ("me", "a", "b")
    ]
    run = coterie.train(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        users[0],
        users[1:],
        steps=200,
        measure=False,
    )
    assert run.record.end.account["cost"]["runs"] == pytest.approx(3.0, abs=0.05)


def test_of_many_own_rows_a_sample_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    me, peers = user("me", 90, TRUTH), alike(3)
    whole = adaptive(me, peers, AdaptiveAveraging())
    monkeypatch.setattr("coterie.mixture.candidates.JUDGING", 30)
    run = adaptive(me, peers, AdaptiveAveraging())
    assert [np.asarray(each.out_of_fold).shape for each in (run, whole)] == [(30,), (90,)]
    assert distance(run) < 0.5  # all own rows are trained on
