"""Contributions against exact Shapley values, and planted peers: copies, strangers and liars."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.errors import KnobError
from coterie.mixture.candidates import folds_of
from coterie.mixture.contributions import contributions, linear_contributions
from coterie.mixture.families import SQUARED, Array

NAMES = ["a", "b", "c"]


def losses_of(who: frozenset[str]) -> Array:
    """A game in which a and b replace each other and c is worth something beside either."""
    worth = 2.0 * bool(who & {"a", "b"}) + 1.0 * ("c" in who) + 0.5 * ({"a", "c"} <= who)
    return np.array([9.0, 11.0]) - worth * np.array([0.8, 1.2])


def test_it_equals_the_exact_shapley_values_over_all_orders() -> None:
    exact = dict.fromkeys(NAMES, 0.0)
    for order in itertools.permutations(NAMES):
        before: frozenset[str] = frozenset()
        for name in order:
            gain = float((losses_of(before) - losses_of(before | {name})).mean())
            exact[name] += gain / math.factorial(len(NAMES))
            before |= {name}
    found = contributions(losses_of, NAMES, permutations=4000)
    for name in NAMES:
        assert found[name].shapley.value == pytest.approx(exact[name], abs=0.03)
    total = sum(one.shapley.value for one in found.values())
    assert total == pytest.approx(
        float((losses_of(frozenset()) - losses_of(frozenset(NAMES))).mean())
    )
    assert found["b"].leave_one_out.value == pytest.approx(0.0)  # a replaces it
    assert found["b"].shapley.value > 0.5


def test_every_coalition_is_asked_for_once() -> None:
    asked: list[frozenset[str]] = []

    def counted(who: frozenset[str]) -> Array:
        asked.append(who)
        return losses_of(who)

    contributions(counted, NAMES, permutations=50)
    assert len(asked) == len(set(asked)) <= 8


def test_peers_alike_come_before_strangers_and_liars() -> None:
    rng, right = np.random.default_rng(1), 0
    for _ in range(8):
        w = rng.normal(size=5)

        def user(n: int, truth: Array) -> tuple[Array, Array]:
            x = rng.normal(size=(n, 5))
            return x, x @ truth + rng.normal(size=n)

        kinds = {"copy 1": w, "copy 2": w, "stranger": 2 * rng.normal(size=5), "liar": -w}
        own, peers = user(20, w), {name: user(80, truth) for name, truth in kinds.items()}
        found = linear_contributions(*own, peers, SQUARED, permutations=8)
        value = {name: one.shapley.value for name, one in found.items()}
        right += min(value["copy 1"], value["copy 2"]) > max(value["stranger"], value["liar"])
    assert right >= 6


def test_a_run_and_everybodys_runs_tell_what_peers_contribute() -> None:
    """By name and by group, as `linear_contributions` of the same rows; rows are who takes, columns who gives."""
    random = torch.Generator().manual_seed(0)
    truth = {"me": 1.0, "alike": 1.0, "stranger": -1.0}
    users = []
    for name, w in truth.items():
        inputs = torch.randn(12 if name == "me" else 60, 4, generator=random)
        noise = torch.randn(len(inputs), 1, generator=random)
        users.append(coterie.User(name, inputs, w * inputs.sum(1, keepdim=True) + noise))
    loss, model = torch.nn.functional.mse_loss, torch.nn.Linear(4, 1)
    run = coterie.train(model, loss, users[0], users[1:], coterie.Mixture(), measure=False)
    found = run.contributions(permutations=4)
    rows: dict[str, Any] = {
        user.name: tuple(part.double().numpy() for part in user.examples.take(torch.arange(n)))
        for user, n in zip(users, (12, 60, 60), strict=True)
    }
    peers: dict[str, Any] = {name: rows[name] for name in ("alike", "stranger")}
    own_x, own_y = rows["me"]
    assert found == linear_contributions(own_x, own_y, peers, SQUARED, permutations=4)
    assert found["alike"].shapley.value > max(0.0, found["stranger"].shapley.value)
    both = run.contributions({"all": ["alike", "stranger"]}, permutations=2)["all"]
    total = sum(one.shapley.value for one in found.values())
    assert both.leave_one_out.value == pytest.approx(total)
    with pytest.raises(KnobError, match="`groups` names 'nobody'"):
        run.contributions({"some": ["nobody"]})
    runs = coterie.train_everyone(model, loss, users, coterie.Mixture())
    given = runs.contributions(permutations=4)
    assert float(given["alike"]["me"]) > 0
    assert float(given["me"]["me"]) == 0
    alone = coterie.train(model, loss, users[0], [], coterie.Alone(), steps=1, measure=False)
    with pytest.raises(KnobError, match="peers' rows are elsewhere"):
        alone.contributions()
    low, high = found["alike"].shapley.interval
    assert low < found["alike"].shapley.value < high


def test_of_a_network_they_are_the_losses_of_runs_with_each_coalition() -> None:
    """Each fold's run with each coalition by itself, in a plain loop; the model given stays as it was."""
    random = torch.Generator().manual_seed(0)

    def rows(n: int, sign: float) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(n, 2, generator=random)
        return inputs, torch.tanh(sign * inputs.sum(1, keepdim=True))

    (x, y), peers = (
        rows(8, 1),
        [coterie.User("alike", *rows(30, 1)), coterie.User("b", *rows(30, -1))],
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    loss = torch.nn.functional.mse_loss
    how: dict[str, Any] = {"steps": 12, "lr": 0.1, "measure": False, "guard": "off", "seed": 3}
    rule, me = coterie.WeightedAveraging(0.5), coterie.User("me", x, y)
    found = coterie.train(net, loss, me, peers, rule, **how).contributions(permutations=2)
    folds = folds_of(np.zeros((8, 1)), 4, 3, classes=False)

    def losses(who: frozenset[str]) -> Array:
        told = np.empty(8)
        for fold in range(4):
            seen = torch.from_numpy(folds != fold)
            given = [peer for peer in peers if peer.name in who]
            part = coterie.User("me", x[seen], y[seen])
            run = coterie.train(net, loss, part, given, rule if given else coterie.Alone(), **how)
            with torch.no_grad():
                told[folds == fold] = (run.model(x[~seen]) - y[~seen]).square()[:, 0].numpy()
        return told

    expected = contributions(losses, ["alike", "b"], permutations=2)
    for name, one in expected.items():
        for mine, other in zip(found[name], one, strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-7)


def test_groups_come_and_go_together() -> None:
    found = contributions(losses_of, {"both": ["a", "b"], "c": ["c"]}, permutations=2)
    gain = losses_of(frozenset()) - losses_of(frozenset("ab"))
    beside = losses_of(frozenset("c")) - losses_of(frozenset("abc"))
    assert found["both"].shapley.value == pytest.approx(float((gain + beside).mean() / 2))
