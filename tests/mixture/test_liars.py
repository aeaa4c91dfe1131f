"""Peers that answer with a program of their own: they cost user 0 the collaboration, not the model."""

from __future__ import annotations

import pytest
from tests.support.liars import E_STEPS, HISTOGRAMS, cost_in_e_steps, cost_in_trees


@pytest.mark.parametrize("peers", [1, 2, 6])
@pytest.mark.parametrize("lie", E_STEPS)
def test_a_liar_costs_the_collaboration_at_most(lie: str, peers: int) -> None:
    """Of one liar alone, or beside honest peers: what is served is finite, and hardly worse than Alone."""
    assert cost_in_e_steps(lie, peers) < 0.1


@pytest.mark.parametrize("lie", ["turned round"])
def test_histograms_that_may_be_true_and_are_not_cost_the_trees_at_most(lie: str) -> None:
    """They pass all checks: own rows decide what trees weigh, also where every peer lies."""
    assert lie in HISTOGRAMS
    assert cost_in_trees(lie, peers=2, liars=2) < 0.1
