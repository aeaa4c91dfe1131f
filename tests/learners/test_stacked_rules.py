"""The rules of many runs, called once for all."""

import torch

from coterie import WeightedAveraging
from coterie.learners.program import StackedRules


def test_each_row_follows_its_own_knobs() -> None:
    rules = StackedRules({4: WeightedAveraging(0.25), 7: WeightedAveraging(0.5)}, torch.zeros(2, 1))
    assert rules(own=torch.full((2, 1), 4.0), peers=torch.zeros(2, 1)).tolist() == [[3.0], [2.0]]
    assert rules.weight(7) == 0.5
