"""The peers' weights, fitted to user 0's gradient."""

import torch

from coterie.choosing.whom import FittedWeights


def test_a_peer_that_points_the_other_way_has_no_weight() -> None:
    fitted = FittedWeights(2)
    fitted.add(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), own=torch.tensor([1.0, 0.1]))
    assert fitted.tau().tolist() == [1.0, 0.0]
