"""A sample of the peers at each exchange: unbiased, with the variance that is stated, the same on every engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.small_runs import same, state_of
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.errors import KnobError
from coterie.rules.similarity import CosineSimilarity
from coterie.users.sampling import sample_of

UNEQUAL = {"a": 0.4, "b": 0.25, "c": 0.2, "d": 0.1, "e": 0.05}
EQUAL = dict.fromkeys("abcde", 0.2)
VALUES = dict(zip("abcde", [1.0, -2.0, 0.5, 3.0, 7.0], strict=True))
DRAWS = 4000


def mean_and_variance(tau: dict[str, float], n: int) -> tuple[float, float]:
    """The exact moments of the weighted sum over n of the peers, drawn as is stated."""
    mean = sum(weight * VALUES[name] for name, weight in tau.items())
    if n == 1:
        return mean, sum(w * (VALUES[name] - mean) ** 2 for name, w in tau.items())
    sets = [sum(VALUES[name] for name in some) / n for some in itertools.combinations(tau, n)]
    return mean, float(np.var(sets))  # equal weights: every set is as likely


@pytest.mark.parametrize(("tau", "n"), [(UNEQUAL, 1), (EQUAL, 1), (EQUAL, 2), (EQUAL, 4)])
def test_sums_over_a_sample_have_the_moments_that_are_stated(tau: dict[str, float], n: int) -> None:
    sums = []
    for step in range(DRAWS):
        drawn = sample_of(tau, n, seed=3, step=step)
        assert len(drawn) == n
        assert sum(drawn.values()) == pytest.approx(1)
        sums.append(sum(weight * VALUES[name] for name, weight in drawn.items()))
    mean, variance = mean_and_variance(tau, n)
    if len(set(tau.values())) == 1:
        spread = np.var(list(VALUES.values()))
        assert variance == pytest.approx((5 - n) / (n * 4) * spread)
    assert abs(np.mean(sums) - mean) < 4 * (variance / DRAWS) ** 0.5
    assert np.var(sums) == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_weights_are_in_the_mean_what_they_were(n: int) -> None:
    """Each, of one that is certain to be drawn (a, from three on) to the bit; nobody is drawn twice."""
    total = dict.fromkeys(UNEQUAL, 0.0)
    for step in range(DRAWS):
        drawn = sample_of(UNEQUAL, n, seed=0, step=step)
        assert len(drawn) == n
        assert n < 3 or drawn["a"] == UNEQUAL["a"]
        for name, weight in drawn.items():
            total[name] += weight / DRAWS
    for name, weight in UNEQUAL.items():
        error = (weight * (1 / n) / DRAWS) ** 0.5  # at most: a share drawn or not
        assert abs(total[name] - weight) < 4 * error


def test_all_is_no_sample_and_the_draw_is_by_seed_and_step() -> None:
    assert sample_of(UNEQUAL, 6, 0, 0) == sample_of(UNEQUAL, 5, 0, 0) == UNEQUAL
    draws = [sample_of(UNEQUAL, 2, seed, step) for seed in (0, 1) for step in range(6)]
    assert draws == [sample_of(UNEQUAL, 2, seed, step) for seed in (0, 1) for step in range(6)]
    assert len({tuple(sorted(drawn)) for drawn in draws}) > 1
    assert draws[:6] != draws[6:]


def numbers(count: int) -> list[coterie.User]:
    """Return users of one example each, whose losses are (x − o)² for optima o."""
    optima = [-100.0, *np.random.default_rng(0).normal(size=count - 1).tolist()]
    one = torch.ones(1, 1, dtype=torch.float64)
    return [coterie.User(f"user {k}", one, o * one) for k, o in enumerate(optima)]


def trained(users: list[coterie.User], rule: Any, **settings: Any) -> coterie.Run:
    """Train by plain gradient steps."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    me, *peers = users
    how: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.25, "guard": "off"}
    how |= {"measure": False, "norm_bound": None} | settings
    return coterie.train(model, mse_loss, me, peers, rule, **how)


def test_the_stationary_moments_of_averaging_a_sample_are_exact() -> None:
    """x ← x − η·2((1 − α)(x − o_0) + α(x − Σ τ̂ o_k)): a scalar recursion whose moments are known."""
    users, alpha, n, steps = numbers(9), 0.8, 2, 4000
    at: list[float] = []

    def note(step: coterie.Step) -> None:
        at.append(-100 + step.own_loss**0.5)  # where the step began

    trained(users, coterie.WeightedAveraging(alpha), sample=n, steps=steps, hooks=[note])
    optima = np.array([user.batch(1, seed=0, step=0)[1].item() for user in users[1:]])
    mean = (1 - alpha) * -100 + alpha * optima.mean()
    of_a_sample = (8 - n) / (n * 7) * optima.var()
    variance = (0.5 * alpha) ** 2 * of_a_sample / (1 - 0.5**2)
    late = np.array(at[40:])
    # neighbours have a correlation of a half: the mean of m has three times the variance
    assert abs(late.mean() - mean) < 4 * (3 * variance / len(late)) ** 0.5
    assert late.var() == pytest.approx(variance, rel=0.15)


def test_a_step_asks_the_sample_and_nobody_else() -> None:
    users = numbers(9)
    run = trained(users, coterie.BiasCorrection(0.5, 0.1), sample=3, steps=40)
    asked = [cost.gradients for name, cost in run.record.end.costs.items() if name != "user 0"]
    assert sum(asked) == 3 * 40
    assert all(asked)
    assert run.record.configuration.sample == 3
    whole, plain = (
        trained(users, coterie.WeightedAveraging(0.5), sample=n, steps=9) for n in (8, None)
    )
    assert same(state_of(whole.model), state_of(plain.model))


def test_a_run_with_a_sample_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    users, rule = numbers(9), coterie.WeightedAveraging(0.5)

    def stop(step: coterie.Step) -> bool:
        return step.step == 13

    whole = trained(users, rule, sample=3, steps=30)
    folder: dict[str, Any] = {"out": tmp_path, "checkpoint_every": 5, "sample": 3, "steps": 30}
    trained(users, rule, hooks=[stop], **folder)
    assert same(state_of(trained(users, rule, resume=True, **folder).model), state_of(whole.model))


def test_a_method_plays_its_rounds_with_the_sample() -> None:
    users = numbers(7)
    by_option, by_method = (
        trained(users, method, steps=6, optimizer=None, norm_bound=3.0, **more)
        for method, more in (
            (coterie.methods.FedAvg(2), {"sample": 2}),
            (coterie.methods.Sampled(coterie.methods.FedAvg(2), 2), {}),
        )
    )
    assert same(state_of(by_option.model), state_of(by_method.model))


def test_a_closed_form_asks_the_same_sample_all_along() -> None:
    random = np.random.default_rng(1)
    inputs = [torch.from_numpy(random.normal(size=(12, 3))) for _ in range(12)]
    me, *peers = (coterie.User(f"{k}", x, x.sum(1, keepdim=True)) for k, x in enumerate(inputs))
    model = nn.Linear(3, 1).double()
    run = coterie.train(model, mse_loss, me, peers, coterie.Mixture(), sample=6, measure=False)
    asked = list(run.record.configuration.peers)
    assert len(asked) == 6
    few = [peer for peer in peers if peer.name in asked]
    other = coterie.train(model, mse_loss, me, few, coterie.Mixture(), measure=False)
    assert same(state_of(run.model), state_of(other.model))
    assert run.record.end.costs == other.record.end.costs


def test_what_has_no_sample_is_refused() -> None:
    users = numbers(5)
    with pytest.raises(KnobError, match="`CosineSimilarity` needs each peer's gradient"):
        trained(users, CosineSimilarity(0.5), sample=2, steps=2)
    with pytest.raises(KnobError, match="`sample`"):
        trained(users, coterie.WeightedAveraging(0.5), sample=0, steps=2)
    me, *peers = users
    model = nn.Linear(1, 1, bias=False).double()
    engine = coterie.InProcess(model, mse_loss, me, peers)
    with pytest.raises(KnobError, match="draws them where they are in this process"):
        trained(users[:1], coterie.AdaptiveAveraging(), sample=2, steps=2, engine=engine)
