"""The cost model of docs/scale.md against what small runs count, for one peer and for user 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import coterie
from coterie.mixture.candidates import FOLDS
from coterie.mixture.prior import EXCHANGES, JOINT, POOLED, TIMES

PEERS, COLUMNS, STEPS = 6, 5, 40
D = COLUMNS + 1  # numbers of the model


def costs(rule: Any, **settings: Any) -> dict[str, Any]:
    """Return what a run cost everybody, user 0 first."""
    torch.manual_seed(0)
    users = [
        coterie.User(str(k), torch.randn(12, COLUMNS), torch.randn(12, 1)) for k in range(PEERS + 1)
    ]
    model = torch.nn.Linear(COLUMNS, 1)
    run = coterie.train(model, mse_loss, users[0], users[1:], rule, measure=False, **settings)
    return dict(run.record.end.costs)


@pytest.mark.parametrize(
    ("rule", "settings", "exchanges", "gradients"),
    [
        (coterie.WeightedAveraging(0.5), {}, STEPS, STEPS),
        (coterie.BiasCorrection(0.5, 0.1), {"exchange_every": 4}, STEPS // 4, STEPS // 4),
        (coterie.methods.FedAvg(3), {}, STEPS, 3 * STEPS),
    ],
    ids=["averaging", "correction, fewer exchanges", "rounds"],
)
def test_a_peer_gets_and_gives_the_model_in_each_exchange(
    rule: Any, settings: dict[str, Any], exchanges: int, gradients: int
) -> None:
    me, *peers = costs(rule, steps=STEPS, lr=0.05, **settings).values()
    for peer in peers:
        assert (peer.numbers_received, peer.numbers_sent) == (exchanges * D, exchanges * D)
        assert peer.gradients == gradients
    assert me.numbers_sent == me.numbers_received == PEERS * exchanges * D


def test_a_sample_exchanges_with_so_many() -> None:
    me, *peers = costs(coterie.WeightedAveraging(0.5), steps=STEPS, lr=0.05, sample=2).values()
    assert me.numbers_sent == sum(peer.numbers_received for peer in peers) == 2 * STEPS * D
    assert sum(peer.gradients for peer in peers) == 2 * STEPS


def test_a_closed_form_takes_39_exchanges_of_a_mean_and_a_variance_for_each_prior() -> None:
    me, *peers = costs(coterie.Mixture()).values()
    views = 1 + FOLDS
    of_gradients, of_posteriors = POOLED + JOINT * len(TIMES) * views, EXCHANGES * (1 + views)
    assert POOLED + JOINT + EXCHANGES == 39
    for peer in peers:
        assert peer.numbers_received == 2 * D * (of_gradients + of_posteriors)
        # a share with a loss and a gradient, or with a residual, modes, squares and widths
        assert peer.numbers_sent == (2 + D) * of_gradients + (2 + 3 * D) * of_posteriors
        assert peer.gradients == of_gradients + 2 * of_posteriors == 339
    assert me.numbers_sent == PEERS * peers[0].numbers_received
