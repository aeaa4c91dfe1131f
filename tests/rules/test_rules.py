"""The rules' knobs: what they take and what they refuse. Their formulas are in `test_reference.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.errors import KnobError

RULES: dict[str, Any] = {
    "averaging": coterie.WeightedAveraging,
    "correction": lambda alpha, tau=None: coterie.BiasCorrection(alpha, 0.1, tau),
    "oracle": lambda alpha, tau=None: coterie.OracleCorrection(alpha, torch.sin, tau),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)


@every_rule
@pytest.mark.parametrize("alpha", [-0.1, 1.2, math.nan, math.inf, True, "0.5", None, [0.5]])
def test_alpha_outside_its_range(make: Any, alpha: Any) -> None:
    with pytest.raises(KnobError) as caught:
        make(alpha)
    assert str(caught.value) == f"`alpha` must lie in [0, 1], got {alpha!r}"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"beta": 1.5}, r"`beta` must lie in \[0, 1\], got 1.5"),
        ({"beta": -1}, r"`beta` must lie in \[0, 1\], got -1"),
        ({"beta": 0.1, "correction": 2.0}, r"`correction` must lie in \[0, 1\], got 2.0"),
        ({"beta": 0.1, "start": "mean"}, '`start` must be "first" or "zero", got \'mean\''),
    ],
)
def test_other_knobs_outside_their_range(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        coterie.BiasCorrection(0.5, **knobs)


@every_rule
@pytest.mark.parametrize(
    ("tau", "message"),
    [
        ({"a": -0.5, "b": 1.5}, r"`tau\['a'\]` must be finite and not negative, got -0.5"),
        ({"a": math.nan, "b": 1.0}, r"`tau\['a'\]` must be finite and not negative, got nan"),
        ({"a": 0.5, "b": 0.6}, "`tau` must sum to 1, got 1.1; divide each weight by the sum"),
        ({"a": math.inf}, r"`tau\['a'\]` must be finite and not negative, got inf"),
        ({}, "`tau` must map each peer's name to its weight, got {}; None gives equal weights"),
        ([0.5, 0.5], r"`tau` must map each peer's name to its weight, got \[0.5, 0.5\]"),
    ],
)
def test_weights_off_the_simplex(make: Any, tau: Any, message: str) -> None:
    with pytest.raises(KnobError, match=message):
        make(0.5, tau)


@every_rule
def test_who_is_asked(make: Any) -> None:
    assert make(0.5).weights(["a", "b", "c", "d"]) == dict.fromkeys("abcd", 0.25)
    assert make(0.5, {"b": 0.7, "a": 0.3, "c": 0.0}).weights(["a", "b", "c", "d"]) == {
        "a": 0.3,
        "b": 0.7,
    }
    with pytest.raises(KnobError, match="`tau` names an unknown peer 'z'; the peers are 'a', 'b'"):
        make(0.5, {"z": 1.0}).weights(["a", "b"])
    with pytest.raises(
        KnobError, match=r"no peers: pass at least one, or use `rule=coterie.Alone\(\)`"
    ):
        make(0.5).weights([])
    assert coterie.Alone().weights(["a"]) == {}
    assert coterie.Alone().weights([]) == {}


@every_rule
@pytest.mark.parametrize("alpha", [0, 1, 0.5, np.float32(0.5), np.int64(1)])
def test_knobs_that_are_taken(make: Any, alpha: Any) -> None:
    rule = make(alpha)
    own, peers = torch.tensor([1.0]), torch.tensor([3.0])
    _, state = rule(coterie.Gradients(own=own, peers=peers, x=own), rule.init(own))
    assert type(state["weight"]) is float
    assert state["weight"] == float(alpha)


@every_rule
def test_a_schedule_is_checked_as_it_goes(make: Any) -> None:
    rule, own = make(lambda t: 0.6 * t), torch.tensor([1.0])
    state = rule.init(own)
    for _ in range(2):
        _, state = rule(coterie.Gradients(own=own, peers=own, x=own), state)
    with pytest.raises(KnobError, match=r"`alpha` must lie in \[0, 1\], got 1.2 at step 2"):
        rule(coterie.Gradients(own=own, peers=own, x=own), state)


@every_rule
def test_gradients_without_peers(make: Any) -> None:
    rule, own = make(0.5), torch.tensor([1.0])
    with pytest.raises(KnobError, match=r"needs `Gradients\(peers=…\)` or `Gradients\(rows=…\)`"):
        rule(coterie.Gradients(own=own, x=own), rule.init(own))
    rule = make(0.5, {"a": 1.0})
    with pytest.raises(
        KnobError,
        match="`names` must name every row when weights are given by name: 0 names, 1 rows",
    ):
        rule(coterie.Gradients(own=own, rows=own[None], x=own), rule.init(own))


def test_an_oracle_needs_the_point() -> None:
    rule, own = coterie.OracleCorrection(0.5, torch.sin), torch.tensor([1.0])
    with pytest.raises(KnobError, match="needs the point of the gradients"):
        rule(coterie.Gradients(own=own, peers=own), rule.init(own))


def test_pooled_weighs_by_examples() -> None:
    """One step of the pooled rule on full batches is a step on everybody's examples in one batch."""
    generator = torch.Generator().manual_seed(0)
    users = [
        coterie.User(
            name,
            torch.randn(n, 2, generator=generator).double(),
            torch.randn(n, 1, generator=generator).double(),
        )
        for name, n in (("me", 5), ("a", 12), ("b", 3))
    ]
    rule = coterie.WeightedAveraging.pooled(users[0], users[1:])
    model = torch.nn.Linear(2, 1).double()
    loss = torch.nn.functional.mse_loss
    engine = coterie.InProcess(model, loss, users[0], users[1:], batch_size=100)
    x = torch.cat([p.detach().flatten() for p in model.parameters()])
    direction, _ = rule(engine.gradients(x, 0, rule.weights(engine.names)), rule.init(x))
    inputs, targets = (
        torch.cat(part) for part in zip(*(u.batch(100, seed=0, step=0) for u in users), strict=True)
    )
    wanted = torch.autograd.grad(loss(model(inputs), targets), list(model.parameters()))
    torch.testing.assert_close(
        direction, torch.cat([g.flatten() for g in wanted]), rtol=1e-12, atol=1e-14
    )
