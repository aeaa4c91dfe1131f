"""The rules of many runs, called once for all."""

import torch

from coterie import WeightedAveraging
from coterie.training.together import StackedRules


def test_each_row_follows_its_own_knobs() -> None:
    rules = StackedRules({4: WeightedAveraging(0.25), 7: WeightedAveraging(0.5)}, torch.zeros(2, 1))
    knobs = torch.tensor(rules.numbers_at(0))
    directions = rules.directions(torch.full((2, 1), 4.0), torch.zeros(2, 1), knobs)
    assert directions.tolist() == [[3.0], [2.0]]
    rules.taken(1)
    assert rules.state(7) == {"step": 1, "weight": 0.5}
