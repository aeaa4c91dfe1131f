"""An aggregator in the place of the weighted sum of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.aggregators import normal

import coterie
from coterie.aggregators import (
    Aggregator,
    Bucketing,
    Krum,
    Mean,
    NearestNeighbourMixing,
    TrimmedMean,
)
from coterie.errors import KnobError

MAKE: dict[str, Callable[[Aggregator | None], Any]] = {
    "averaging": lambda aggregator: coterie.WeightedAveraging(0.4, aggregator=aggregator),
    "correction": lambda aggregator: coterie.BiasCorrection(0.4, 0.3, aggregator=aggregator),
}
every_make = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@every_make
@pytest.mark.parametrize("answered", [1.0, 0.75])
def test_a_rule_takes_the_aggregate_for_the_average(
    make: Callable[[Aggregator | None], Any], answered: float
) -> None:
    aggregator, robust, plain = TrimmedMean(1), make(TrimmedMean(1)), make(None)
    assert (robust.needs_rows, plain.needs_rows) == (True, False)
    state, other = (rule.init(torch.zeros(6, dtype=torch.float64)) for rule in (robust, plain))
    for step in range(3):
        own, *rows = normal(6, 6, step)
        each = torch.stack(rows)
        g = coterie.Gradients(own=own, rows=each, names=tuple("abcde"), answered=answered)
        wanted = answered * aggregator(each) + (1 - answered) * own
        direction, state = robust(g, state)
        expected, other = plain(coterie.Gradients(own=own, peers=wanted, answered=answered), other)
        torch.testing.assert_close(direction, expected)
        assert state["weight"] == other["weight"]


@every_make
def test_with_every_peer_gone_an_aggregator_is_alone_to_the_bit(
    make: Callable[[Aggregator | None], Any],
) -> None:
    own, rule = normal(1, 4)[0], make(Krum(1))
    g = coterie.Gradients(own=own, rows=own.new_empty(0, 4), answered=0.0)
    direction, state = rule(g, rule.init(own))
    assert torch.equal(direction, own)
    assert state["weight"] == 0


@every_make
def test_errors_in_rules(make: Callable[[Aggregator | None], Any]) -> None:
    with pytest.raises(KnobError, match="needs 5 peers, got 4; lower `n_byzantine`"):
        make(Krum(2)).weights(tuple("abcd"))
    with pytest.raises(KnobError, match="needs 9 peers, got 4"):
        make(Bucketing(2, then=NearestNeighbourMixing(1, then=TrimmedMean(2)))).weights(
            tuple("abcd")
        )
    assert make(Krum(2)).weights(tuple("abcde")) == dict.fromkeys("abcde", 0.2)
    with pytest.raises(KnobError, match="`aggregator` must be one such as"):
        make(torch.mean)  # type: ignore[arg-type]
    rule, state = make(Krum(1)), make(Krum(1)).init(torch.zeros(2))
    with pytest.raises(KnobError, match="an aggregator needs every peer's gradient"):
        rule(coterie.Gradients(own=torch.zeros(2), peers=torch.zeros(2)), state)
    with pytest.raises(KnobError, match="`tau` and `aggregator` were both given"):
        coterie.WeightedAveraging(0.5, {"a": 1.0}, aggregator=Mean())
    with pytest.raises(KnobError, match="`tau` and `aggregator` were both given"):
        coterie.BiasCorrection(0.5, 0.5, {"a": 1.0}, aggregator=Mean())
