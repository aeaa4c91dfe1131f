"""Bucketing deals every row once."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.aggregators import Aggregator, Bucketing, Points


def test_bucketing_deals_every_row_once_and_anew() -> None:
    class Kept(Aggregator):
        def of(self, points: Points) -> Tensor:
            seen.append(points.rows.clone())
            return points.rows[0]

    seen: list[Tensor] = []
    rows = torch.eye(7)
    for seed in range(4):
        Bucketing(3, then=Kept(), seed=seed)(rows)
    for means in seen:
        assert means.shape == (3, 7)
        assert sorted((means > 0).sum(1).tolist()) == [1, 3, 3]
        torch.testing.assert_close((means > 0).sum(0), torch.ones(7, dtype=torch.int64))
        torch.testing.assert_close(means.sum(1), torch.ones(3))
    assert len({str(means) for means in seen}) > 1
    again = Bucketing(3, then=Kept(), seed=0)
    again(rows)
    assert torch.equal(seen[-1], seen[0])
    before = len({str(means > 0) for means in seen})
    for k in range(1, 5):
        again(k * rows)
    assert len({str(means > 0) for means in seen}) > before
