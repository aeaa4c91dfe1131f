"""A newcomer begins from the model that suits it, learns from the others' gradients, and changes nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_runs import same, state_of
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.errors import DataError, UserCodeError
from coterie.everyone.runs import best_start

SETTINGS: dict[str, Any] = {"lr": 0.05, "steps": 150, "measure": False, "trackers": ()}


def user(name: str, slope: float, n: int, seed: int) -> coterie.User:
    """Return a user whose targets are a slope times the sum of ten inputs, with noise."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n + 60, 10, generator=draws)
    targets = slope * inputs.sum(1, keepdim=True) + 0.5 * torch.randn(n + 60, 1, generator=draws)
    held_out = [(inputs[a:b], targets[a:b]) for a, b in ((n, n + 30), (n + 30, None))]
    return coterie.User(name, inputs[:n], targets[:n], validation=held_out[0], test=held_out[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> coterie.Runs:
    torch.manual_seed(0)
    users = [user("a", 1.0, 60, 1), user("b", 1.0, 60, 2), user("contrary", -1.0, 60, 3)]
    out = tmp_path_factory.mktemp("join") / "runs"
    return coterie.train_everyone(nn.Linear(10, 1), mse_loss, users, out=out, **SETTINGS)


def test_a_newcomer_with_few_examples_begins_near_the_end(trained: coterie.Runs) -> None:
    before = {name: state_of(model) for name, model in trained.models.items()}
    newcomer = user("late", -1.0, 5, 4)
    joined = trained.join(newcomer, steps=20)
    assert joined.began_from == {"late": "the model of contrary"}
    for name, state in before.items():
        assert same(state, state_of(joined.models[name]))  # nobody trained again
        assert joined.runs[name] is trained.runs[name]
    run = joined.runs["late"]
    peers = [spec.me for spec in trained.specs]
    scratch = coterie.train(
        trained.specs[0].model, mse_loss, newcomer, peers, **{**SETTINGS, "steps": 20}
    )
    assert run.test["loss"] < 0.5 < scratch.test["loss"]  # in 20 steps from the start of everybody
    assert joined.weights.loc["a", "late"] == 0
    assert "late joined later and began from the model of contrary" in joined.summary()
    out = trained.out
    assert out is not None
    assert (Path(out) / "late" / "record.jsonl").exists()


def test_the_pooled_model_is_left_only_for_one_that_is_clearly_better(
    trained: coterie.Runs,
) -> None:
    assert trained.pooled is not None
    between = user("between", 1 / 3, 6, 5)  # where the pooled model is
    whose, model = best_start(trained, between, mse_loss)
    assert whose == "the pooled model"
    assert model is trained.pooled.model
    assert best_start(trained, user("like a", 1.0, 6, 6), mse_loss)[0] in (
        "the model of a",
        "the model of b",
    )


def test_who_cannot_join(trained: coterie.Runs) -> None:
    with pytest.raises(DataError, match="different names"):
        trained.join(user("a", 1.0, 5, 7))
    with pytest.raises(DataError, match="nobody has trained yet"):
        coterie.Runs(trained.runs).join(user("late", 1.0, 5, 7))


def test_who_was_left_out_and_joins_is_no_longer_said_to_be(trained: coterie.Runs) -> None:
    told = replace(
        trained, not_trained={"late riser": "left out: too few", "other": "left out: too few"}
    )
    joined = told.join(user("late riser", 1.0, 5, 8), steps=2)
    assert list(joined.not_trained) == ["other"]
    assert joined.summary().count("late riser: ") == 1
    assert (Path(str(trained.out)) / "late_riser" / "record.jsonl").exists()


def test_who_does_not_fit_is_told(trained: coterie.Runs) -> None:
    narrow = coterie.User("narrow", torch.randn(4, 9), torch.randn(4, 1))
    with pytest.raises(
        DataError, match=r"the inputs of the newcomer 'narrow' .* are not like those of 'a'"
    ):
        trained.join(narrow)
    broken = {name: replace(run, model=torch.nn.Linear(9, 1)) for name, run in trained.runs.items()}
    with pytest.raises(
        UserCodeError, match="the newcomer 'wide' could begin from, on its examples, raised"
    ):
        replace(trained, runs=broken).join(user("wide", 1.0, 5, 7))
    stream = coterie.User.stream(
        "stream", lambda n, seed, step: (torch.zeros(n, 10), torch.zeros(n, 1))
    )
    with pytest.raises(DataError, match="'stream' is a stream"):
        trained.join(stream)
