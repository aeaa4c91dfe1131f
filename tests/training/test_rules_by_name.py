"""A rule or a method by its name: the same run as with the thing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.regressions import users_with_validation
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.choosing import AdaptiveAveraging
from coterie.errors import CheckpointError, KnobError
from coterie.methods import build
from coterie.registry import RunSizes


def trained(rule: Any, **settings: Any) -> coterie.Run:
    me, *peers = users_with_validation()
    settings = {"steps": 12, "measure": False} | settings
    return coterie.train(nn.Linear(20, 1).double(), mse_loss, me, peers, rule, **settings)


@pytest.mark.parametrize("name", ["adaptive", "wga", "bc", "alone", "fedavg", "ditto", "mixture"])
def test_a_name_is_the_thing_that_is_registered(name: str) -> None:
    me, *peers = users_with_validation()
    torch.manual_seed(0)
    facts = RunSizes(len(me), {peer.name: len(peer) for peer in peers}, 12)
    steps: dict[str, Any] = {"steps": 1000} if name == "mixture" else {}
    torch.manual_seed(1)
    by_name = trained(name, **steps)
    torch.manual_seed(1)
    made = trained(build(name, {}, facts), **steps)
    for one, other in zip(by_name.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert by_name.record.configuration.rule == made.record.configuration.rule


def test_auto_is_what_is_taken_where_nothing_is_said() -> None:
    assert trained("auto").record.configuration.rule == trained(None).record.configuration.rule


def test_everyone_and_many_take_names_too() -> None:
    users, model = users_with_validation(), nn.Linear(20, 1).double()
    runs = coterie.train_everyone(model, mse_loss, users, "wga", steps=5, measure=False)
    assert all("WeightedAveraging" in run.record.configuration.rule for run in runs.runs.values())
    spec = coterie.RunSpec(model, mse_loss, users[0], users[1:], "wga", steps=5, lr=0.1)
    (run,) = coterie.train_many([spec])
    assert "WeightedAveraging" in run.record.configuration.rule


def test_a_name_that_is_none_is_answered() -> None:
    with pytest.raises(KnobError, match=r"unknown rule 'adaptve'.*did you mean 'adaptive'"):
        trained("adaptve")


def test_more_steps_go_on_or_the_reason_is_said(tmp_path: Path) -> None:
    trained("wga", out=tmp_path / "wga")
    longer = trained("wga", out=tmp_path / "wga", resume=True, steps=20)
    whole = trained("wga", steps=20)
    assert longer.step == 20
    for one, other in zip(longer.model.parameters(), whole.model.parameters(), strict=True):
        assert one.shape == other.shape
    trained(AdaptiveAveraging(), out=tmp_path / "adaptive")
    with pytest.raises(CheckpointError, match="`steps` was 12 and is now 20; the rule divides"):
        trained(AdaptiveAveraging(), out=tmp_path / "adaptive", resume=True, steps=20)
