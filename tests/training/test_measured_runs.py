"""Measuring before the first step changes no bit of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.regressions import users_with_validation
from torch import nn
from torch.nn.functional import mse_loss

import coterie


@pytest.mark.parametrize("between", [[], [nn.BatchNorm1d(6)], [nn.Dropout(0.4)]])
def test_a_measured_run_has_the_bits_of_one_that_is_not(
    between: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = users_with_validation()

    def trained() -> coterie.Run:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 6), *between, nn.Linear(6, 1)).double()
        return coterie.train(
            model,
            mse_loss,
            users[0],
            users[1:],
            coterie.BiasCorrection(0.6, 0.1),
            lr=0.01,
            steps=12,
        )

    run = trained()
    assert set(run.record.configuration.estimates["peers"]) == {"u1", "u2", "u3"}
    monkeypatch.setattr(
        "coterie.training.train.with_estimates", lambda configuration, *_, **__: configuration
    )
    plain = trained()
    assert not plain.record.configuration.estimates
    assert run.record.points == plain.record.points
    for key, value in plain.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[key], value)


def test_alone_rules_without_knobs_and_huge_models_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users = users_with_validation()

    def trained(rule: Any, *, measure: bool | None = None) -> coterie.Run:
        model = nn.Linear(20, 1).double()
        return coterie.train(model, mse_loss, users[0], users[1:], rule, steps=2, measure=measure)

    for rule in (coterie.Alone(), coterie.AdaptiveAveraging()):  # which has no knobs
        assert not trained(rule).record.configuration.estimates
    measured = trained(coterie.AdaptiveAveraging(), measure=True).record.configuration
    assert measured.estimates["peers"]
    monkeypatch.setattr("coterie.training.algorithm.MAX_GRADIENT_BYTES", 3 * 21 * 8 - 1)
    run = trained(coterie.WeightedAveraging(0.5))
    assert "would take 0.0 GiB" in run.record.configuration.not_measured
    assert "constants not measured: every peer's gradient" in run.summary()
    # who asks for it gets it
    configuration = trained(coterie.WeightedAveraging("auto")).record.configuration
    assert configuration.estimates["peers"]


@pytest.mark.parametrize("rule", [coterie.Alone(), coterie.methods.FedAvg()])
def test_what_averages_no_gradients_says_that_it_is_not_measured(rule: Any) -> None:
    users = users_with_validation()
    run = coterie.train(
        nn.Linear(20, 1).double(), mse_loss, users[0], users[1:], rule, steps=2, measure=True
    )
    assert (
        "constants not measured: they are for a rule that averages gradients of peers"
        in run.summary()
    )
