"""Attacks: what they send, that aggregators survive the crude ones, and that only the guard survives the drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attack_runs import under
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import aggregators
from coterie.engines.attacks import (
    AlternatingDrift,
    Attack,
    Attacked,
    LittleIsEnough,
    Mimic,
    Scaled,
    flip_labels,
    inner_product,
    sign_flip,
)
from coterie.errors import DataError, KnobError
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

HONEST = torch.tensor([[1.0, -2.0], [2.0, 0.0], [3.0, 5.0]], dtype=torch.float64)


def test_what_is_sent() -> None:
    x = HONEST.numpy()
    mean, std = x.mean(0), x.std(0, ddof=1)
    cases: dict[Attack, Any] = {
        sign_flip(): -mean,
        Scaled(7.0): 7 * mean,
        inner_product(0.1): -0.1 * mean,
        LittleIsEnough(z=1.5): mean - 1.5 * std,
        Mimic(row=2): x[2],
        AlternatingDrift(z=0.5, period=10): mean + 0.5 * std,
    }
    before = HONEST.clone()
    for attack, wanted in cases.items():
        sent = attack(HONEST, 2, 3)
        np.testing.assert_allclose(sent.numpy(), [wanted, wanted], err_msg=str(attack))
        sent.zero_()
        assert torch.equal(HONEST, before)


def test_drift_alternates() -> None:
    drift = AlternatingDrift(z=1.0, period=3)
    signs = [float((drift(HONEST, 1, step) - HONEST.mean(0)).sign()[0, 0]) for step in range(9)]
    assert signs == [1, 1, 1, -1, -1, -1, 1, 1, 1]


def test_how_little_is_enough() -> None:
    # Baruch et al., section 4: of 50 workers, 24 corrupted, 2 more make a majority, and Φ(z) =
    # 24/26.
    rows = torch.randn(26, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sent = LittleIsEnough()(rows, 24, 0)
    z = float(((rows.mean(0) - sent[0]) / rows.std(0)).item())
    assert 0.5 * (1 + math.erf(z / math.sqrt(2))) == pytest.approx(24 / 26)
    assert torch.equal(LittleIsEnough()(rows[:1], 1, 0), rows[:1])  # one row has no spread


def test_byzfl_sends_the_same(byzfl: Callable[[str], Any]) -> None:
    theirs = byzfl("attacks.attacks")
    x = HONEST.numpy()
    pairs: list[tuple[Attack, Any]] = [
        (sign_flip(), theirs.SignFlipping()(x)),
        (inner_product(2.0), theirs.InnerProductManipulation(2.0)(x)),
        (LittleIsEnough(-1.5), theirs.ALittleIsEnough(1.5)(x)),  # they add
        (Mimic(1), theirs.Mimic(1)(x)),
    ]
    for attack, wanted in pairs:
        np.testing.assert_allclose(attack(HONEST, 1, 0)[0].numpy(), wanted, err_msg=str(attack))


def test_flipped_labels() -> None:
    user = coterie.User("a", torch.zeros(4, 1), torch.tensor([0, 1, 2, 2]))
    flipped = flip_labels(user, 3)
    inputs, targets = flipped.batch(4, seed=0, step=0)
    assert targets.tolist() == [2, 1, 0, 0]
    assert user.batch(4, seed=0, step=0)[1].tolist() == [0, 1, 2, 2]
    assert (flipped.name, inputs.shape) == ("a", (4, 1))
    with pytest.raises(KnobError, match="`n_classes` must exceed every label of user 'a', got 2"):
        flip_labels(user, 2)
    with pytest.raises(DataError, match="user 'b' has no labels in memory to flip"):
        flip_labels(coterie.User("b", torch.zeros(2, 1), torch.tensor([0.5, 1.0])), 2)


# An engine under attack.


def engine(n: int = 3) -> coterie.Engine:
    return NoisyQuadratic(
        Quadratic(1, 0, noise=0), [Quadratic(1, k + 1, noise=0) for k in range(n)]
    ).engine()


class Sends:
    """An attack that sends given rows and remembers what it saw."""

    def __init__(self, *rows: float) -> None:
        self.rows, self.seen = torch.tensor(rows)[:, None], torch.empty(0)

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        self.seen = honest.clone()
        return self.rows[:n]


@pytest.mark.parametrize("rows", [True, False])
def test_attackers_rows_are_replaced_by_name(rows: bool) -> None:
    x, weights = torch.zeros(1), {"3": 0.5, "2": 0.2, "1": 0.3}
    attack = Sends(10.0, 20.0)
    g = Attacked(engine(), ["1", "3"], attack).gradients(x, 4, weights, rows)
    assert attack.seen.tolist() == [[-2.0]]  # what peer 2 sends; its optimum is at 2
    assert g.own.tolist() == [0.0]
    assert g.answered == pytest.approx(1.0)
    wanted = {"3": 10.0, "2": -2.0, "1": 20.0}
    if rows:
        assert g.rows is not None
        assert dict(zip(g.names, g.rows.flatten().tolist(), strict=True)) == wanted
    else:
        assert g.rows is None
        assert g.peers is not None
        assert g.peers.item() == pytest.approx(
            sum(weights[name] * wanted[name] for name in weights)
        )


def test_an_attacker_that_is_not_finite_is_left_out() -> None:
    attacked = Attacked(engine(), ["1"], Sends(math.nan))
    for rows in (True, False):
        g = attacked.gradients(torch.ones(1), 0, {"1": 0.5, "2": 0.5}, rows)
        assert g.left_out == {"1": "not finite"}
        assert g.answered == 0.5
        average, _ = g.average({"1": 0.5, "2": 0.5})
        assert average.item() == pytest.approx(0.5 * (1 - 2) + 0.5 * 1)


def test_only_attackers_see_the_own_gradient_and_nobody_asked_is_nobody_attacked() -> None:
    attack = Sends(5.0, 5.0, 5.0)
    attacked = Attacked(engine(), ["1", "2", "3"], attack)
    g = attacked.gradients(torch.ones(1), 0, dict.fromkeys("123", 1 / 3))
    assert attack.seen.tolist() == [[1.0]]
    assert g.peers is not None
    assert g.peers.item() == pytest.approx(5.0)
    assert attacked.gradients(torch.ones(1), 0, {}).peers is None
    assert Attacked(engine(), ["1"], attack).gradients(torch.ones(1), 0, {"2": 1.0}).peers == -1.0


def test_what_the_record_says() -> None:
    said = Attacked(engine(), ["1"], LittleIsEnough(z=0.5)).describe()
    assert said["engine"] == "noisy quadratic"
    assert (said["attack"], said["attackers"]) == ("LittleIsEnough(z=0.5)", ["1"])
    with pytest.raises(KnobError, match="`attackers` names an unknown peer 'x'"):
        Attacked(engine(), ["x"], sign_flip())
    with pytest.raises(KnobError, match="`period` must be at least 1, got 0"):
        AlternatingDrift(period=0)


# Training under attack: linear regression, user 0 with few examples, peers that resemble it, a
# quarter of them bad.

D, N, F = 10, 17, 4
POOLS: dict[str, aggregators.Aggregator | None] = {
    "weighted sum": None,
    "mean": aggregators.Mean(),
    "median": aggregators.CoordinateMedian(),
    "trimmed": aggregators.TrimmedMean(F),
    "geometric": aggregators.GeometricMedian(),
    "krum": aggregators.Krum(F),
    "multi-krum": aggregators.MultiKrum(F),
    "clipping": aggregators.CentredClipping(3.0),
    "mixing": aggregators.NearestNeighbourMixing(F, then=aggregators.TrimmedMean(F)),
    "bucketing": aggregators.Bucketing(2, then=aggregators.CoordinateMedian()),
}
NOT_ROBUST = ("weighted sum", "mean")


def examples(n: int, seed: int, spread: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.linspace(-1, 1, D)[:, None] + spread * torch.randn(D, 1, generator=generator)
    inputs = torch.randn(n, D, generator=generator)
    return inputs, inputs @ truth + torch.randn(n, 1, generator=generator)


ME = coterie.User("me", *examples(25, 1), validation=examples(150, 2))
PEERS = [coterie.User(f"peer {k}", *examples(60, 10 + k, spread=0.5)) for k in range(N)]
ATTACKERS = [peer.name for peer in PEERS[:F]]


def train(
    rule: coterie.Rule,
    attack: Attack | None,
    guard: Any = "off",
    steps: int = 150,
    norm_bound: float | None = None,
) -> coterie.Run:
    """Train with nothing but the rule, and the guard where it is wanted, against the attackers."""
    torch.manual_seed(0)
    return coterie.train(
        nn.Linear(D, 1),
        mse_loss,
        ME,
        PEERS,
        rule,
        optimizer=torch.optim.SGD,
        lr=0.05,
        steps=steps,
        batch_size=16,
        evaluate_every=10,
        guard=guard,
        norm_bound=norm_bound,
        engine=under(attack, ATTACKERS),
    )


def at_the_end(run: coterie.Run) -> float:
    return float(run.record.curve("validation_loss")[1][-1])


def served(run: coterie.Run) -> float:
    assert ME.validation is not None
    return coterie.evaluate(run.model, mse_loss, ME.validation)["loss"]


@pytest.fixture(scope="module")
def alone() -> coterie.Run:
    return train(coterie.Alone(), None)


@pytest.mark.parametrize("name", POOLS)
def test_averaging_with_a_pool_survives_what_the_mean_does_not(name: str) -> None:
    attacked = train(
        coterie.WeightedAveraging(0.95, aggregator=POOLS[name]), Scaled(-30.0), steps=60
    )
    if name in NOT_ROBUST:
        assert not at_the_end(attacked) < 1e6
    else:
        assert at_the_end(attacked) < 2 * attacked.record.points[0].validation["loss"]


@pytest.mark.parametrize("name", ["trimmed", "geometric", "krum"])
def test_correction_with_a_pool_survives_what_the_mean_does_not(name: str) -> None:
    assert (
        at_the_end(
            train(
                coterie.BiasCorrection(0.9, 0.05, aggregator=POOLS[name]), Scaled(-30.0), steps=60
            )
        )
        < 3
    )
    assert not at_the_end(train(coterie.BiasCorrection(0.9, 0.05), Scaled(-30.0), steps=60)) < 1e3


@pytest.mark.parametrize(
    "rule", [coterie.WeightedAveraging(0.95), coterie.BiasCorrection(0.9, 0.05)]
)
def test_a_bound_on_norms_survives_it_too(rule: coterie.Rule) -> None:
    assert at_the_end(train(rule, Scaled(-30.0), steps=60, norm_bound=3.0)) < 3


@pytest.mark.parametrize("name", POOLS)
def test_drift_beats_every_pool_and_the_guard_holds(name: str, alone: coterie.Run) -> None:
    rule, drift = (
        coterie.WeightedAveraging(0.95, aggregator=POOLS[name]),
        AlternatingDrift(z=1.5, period=50),
    )
    free, guarded = train(rule, drift), train(rule, drift, guard="held-out")
    assert at_the_end(free) > 1.2 * at_the_end(alone)
    assert served(free) > served(alone)
    assert guarded.record.curve("guard_restarts")[1][-1] >= 1
    assert served(guarded) <= served(alone) + 1e-6


@pytest.mark.parametrize("name", ["weighted sum", "trimmed", "geometric", "mixing"])
def test_without_attackers_the_same_pools_help(name: str, alone: coterie.Run) -> None:
    assert at_the_end(
        train(coterie.WeightedAveraging(0.95, aggregator=POOLS[name]), None)
    ) < at_the_end(alone)
